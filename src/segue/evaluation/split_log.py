"""A log with its split: what evaluation and the baselines read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from segue.data.dataset import Data
from segue.data.sequences import Sequences
from segue.data.split import Split


@dataclass(frozen=True, slots=True, eq=False)
class SplitLog:
    """The events of a log, and which of them are for training, validation and test."""

    sequences: Sequences
    split: Split
    n_items: int

    @staticmethod
    def of(data: Data) -> SplitLog:
        return SplitLog(data.sequences, data.split, len(data.vocabulary))

    @property
    def kind(self) -> Literal["last", "time"]:
        """How the log was split, as in `--split`."""
        return "last" if self.split.boundaries is None else "time"

    @property
    def training_rows(self) -> np.ndarray:
        """True for each event of the training part [E] bool."""
        return _rows_before(self.sequences, self.split.train_end)

    @property
    def training_counts(self) -> np.ndarray:
        """Training events of each item [V + 1] int64; item 0 has none."""
        return counts_before(self.sequences, self.split.train_end, self.n_items)


def counts_before(sequences: Sequences, ends: np.ndarray, n_items: int) -> np.ndarray:
    """Events of each item [V + 1] int64 in each user's rows before `ends` [U]."""
    return np.bincount(sequences.items[_rows_before(sequences, ends)], minlength=n_items + 1)


def _rows_before(sequences: Sequences, ends: np.ndarray) -> np.ndarray:
    """True from each user's first row to the one before its end [E] bool."""
    edges = np.zeros(sequences.n_events + 1, dtype=np.int8)  # an overflow is undone: each begin has its end
    np.add.at(edges, np.asarray(sequences.offsets[:-1]), np.int8(1))
    np.add.at(edges, np.asarray(ends), np.int8(-1))
    return np.cumsum(edges[:-1], dtype=np.int8).astype(bool)
