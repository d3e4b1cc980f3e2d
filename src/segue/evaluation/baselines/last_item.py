"""First-order transitions: the items that followed the history's last item in training."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from segue.data.batch import Batch, ragged_rows
from segue.evaluation.baselines.popularity import below_one
from segue.evaluation.split_log import SplitLog


@dataclass(frozen=True, slots=True, eq=False)
class LastItem:
    """Counts of transitions a → b; those of item a are rows offsets[a] .. offsets[a + 1]."""

    offsets: np.ndarray  # [V + 2] int64
    following: np.ndarray  # [N] int64, the item b
    counts: np.ndarray  # [N] float32
    popularity: Tensor  # [V + 1], below 1: the order of equal counts, and of items that never followed
    note: str = "items that followed the last one in training, by how often; then by popularity"

    @staticmethod
    def fit(log: SplitLog) -> LastItem:
        training, columns = log.training_rows, log.n_items + 1
        follows = training[1:] & training[:-1]
        inner = np.asarray(log.split.offsets[1:-1])  # no transition from one user to the next
        follows[inner[(inner > 0) & (inner < len(training))] - 1] = False
        rows = np.flatnonzero(follows)
        before, after = (log.sequences.items[some].astype(np.int64) for some in (rows, rows + 1))
        pairs, counts = np.unique(before * columns + after, return_counts=True)
        return LastItem(
            offsets=np.searchsorted(pairs, np.arange(columns + 1) * columns),
            following=pairs % columns,
            counts=counts.astype(np.float32),
            popularity=below_one(log.training_counts),
        )

    def scores(self, histories: Batch) -> Tensor:
        last = histories.items[np.cumsum(histories.lengths) - 1]  # [B]
        starts, lengths = self.offsets[last], self.offsets[last + 1] - self.offsets[last]
        pairs = ragged_rows(starts, lengths)
        rows = torch.from_numpy(np.repeat(np.arange(len(last)), lengths))
        scores = self.popularity.repeat(len(last), 1)  # [B, V + 1]
        scores[rows, torch.from_numpy(self.following[pairs])] += torch.from_numpy(self.counts[pairs])
        return scores
