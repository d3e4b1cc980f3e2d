"""What came right after the history's last item, by how often it did in training."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from segue.data.batch import Batch, ragged_rows
from segue.data.sequences import Sequences
from segue.data.split import Split
from segue.evaluation.baselines.popularity import below_one
from segue.evaluation.training_counts import training_counts, training_rows


@dataclass(frozen=True, slots=True, eq=False)
class LastItem:
    """Counted transitions a → b; item a's are rows offsets[a] .. offsets[a + 1]."""

    offsets: np.ndarray  # [V + 2] int64
    following: np.ndarray  # [N] int64, the item b
    times: np.ndarray  # [N] float32, how often
    popularity: Tensor  # [V + 1], below 1: orders equal counts, and everything that never followed
    note: str = "items that followed the last one in training, by how often; then by popularity"

    @staticmethod
    def fit(sequences: Sequences, split: Split, n_items: int) -> LastItem:
        inside = training_rows(split, sequences.n_events)
        follows = inside[1:] & inside[:-1]
        inner = np.asarray(split.offsets[1:-1])  # a user's first row follows nobody's last
        follows[inner[(inner > 0) & (inner < len(inside))] - 1] = False
        rows = np.flatnonzero(follows)
        before, after = sequences.items[rows].astype(np.int64), sequences.items[rows + 1].astype(np.int64)
        pairs, times = np.unique(before * (n_items + 1) + after, return_counts=True)
        return LastItem(
            offsets=np.searchsorted(pairs, np.arange(n_items + 2) * (n_items + 1)),
            following=pairs % (n_items + 1),
            times=times.astype(np.float32),
            popularity=below_one(training_counts(sequences, split, n_items)),
        )

    def scores(self, histories: Batch) -> Tensor:
        last = histories.items[np.cumsum(histories.lengths) - 1]  # [B]
        starts, lengths = self.offsets[last], self.offsets[last + 1] - self.offsets[last]
        found = ragged_rows(starts, lengths)
        owner = np.repeat(np.arange(len(last)), lengths)
        scores = self.popularity.repeat(len(last), 1)  # [B, V + 1]
        scores[torch.from_numpy(owner), torch.from_numpy(self.following[found])] += torch.from_numpy(self.times[found])
        return scores
