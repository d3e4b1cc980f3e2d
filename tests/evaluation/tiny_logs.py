"""Logs small enough to count by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from segue.data.batch import Batch
from segue.data.sequences import Sequences
from segue.evaluation.ranks import Exclusions, candidate_scores, ranks_among


def sequences_of(*users: Sequence[int], times: Sequence[Sequence[int]] | None = None) -> Sequences:
    """One list of items a user; times in seconds, or 0, 1, 2 … for each user."""
    when = times or [range(len(user)) for user in users]
    return Sequences(
        offsets=np.concatenate(([0], np.cumsum([len(user) for user in users]))).astype(np.int64),
        items=np.array([item for user in users for item in user], dtype=np.int32),
        times=np.array([time * 1_000_000 for user in when for time in user], dtype=np.int64),
    )


def histories_of(*users: Sequence[int]) -> Batch:
    """One query per list."""
    return Batch(
        items=np.array([item for user in users for item in user], dtype=np.int64),
        times=np.array([time for user in users for time in range(len(user))], dtype=np.int64),
        lengths=np.array([len(user) for user in users], dtype=np.int64),
    )


class Table:
    """Scores by the history's last item: row a of `scores` [V + 1, V + 1] answers a history that ends with a."""

    def __init__(self, scores: Tensor) -> None:
        self.table = scores
        self.calls: list[Batch] = []

    def scores(self, histories: Batch) -> Tensor:
        self.calls.append(histories)
        return self.table[torch.from_numpy(histories.items[np.cumsum(histories.lengths) - 1])]


class HistoryFirst:
    """Scores 1 for what is in the history, 0 for the rest."""

    def __init__(self, n_items: int) -> None:
        self.n_items = n_items

    def scores(self, histories: Batch) -> Tensor:
        scores = torch.zeros(len(histories.lengths), self.n_items + 1)
        owner = np.repeat(np.arange(len(histories.lengths)), histories.lengths)
        scores[torch.from_numpy(owner), torch.from_numpy(histories.items)] = 1
        return scores


def ranks(
    scores: Tensor, targets: np.ndarray, seen: Exclusions | None = None, *, known: np.ndarray | None = None
) -> np.ndarray:
    """The targets' ranks [B] by scores [B, V + 1] of every item."""
    return ranks_among(candidate_scores(scores, seen, known=known), targets)
