"""What training has met: the rows before each user's first cut, and how often each item is among them."""

from __future__ import annotations

import numpy as np

from segue.data.sequences import Sequences
from segue.data.split import Split


def training_rows(split: Split, n_events: int) -> np.ndarray:
    """True where a row of the flat arrays belongs to the training part [E] bool."""
    return _rows_before(split.offsets, split.train_end, n_events)


def training_counts(sequences: Sequences, split: Split, n_items: int) -> np.ndarray:
    """Training events of each item [V + 1] int64; number 0 has none."""
    return counts_before(sequences, split.train_end, n_items)


def counts_before(sequences: Sequences, ends: np.ndarray, n_items: int) -> np.ndarray:
    """Events of each item [V + 1] int64 among what users had before `ends` [U]."""
    rows = _rows_before(sequences.offsets, ends, sequences.n_events)
    return np.bincount(sequences.items[rows], minlength=n_items + 1)


def _rows_before(offsets: np.ndarray, ends: np.ndarray, n_events: int) -> np.ndarray:
    """True from each user's first row to the one before its end [E] bool."""
    edges = np.zeros(n_events + 1, dtype=np.int8)  # sums wrap around and come back: each begin has its end
    np.add.at(edges, np.asarray(offsets[:-1]), np.int8(1))
    np.add.at(edges, np.asarray(ends), np.int8(-1))
    return np.cumsum(edges[:-1], dtype=np.int8).astype(bool)
