"""What training has met: the rows before each user's first cut, and how often each item is among them."""

from __future__ import annotations

import numpy as np

from segue.data.sequences import Sequences
from segue.data.split import Split


def training_rows(split: Split, n_events: int) -> np.ndarray:
    """True where a row of the flat arrays belongs to the training part [E] bool."""
    edges = np.zeros(n_events + 1, dtype=np.int8)  # sums wrap around and come back: each begin has its end
    np.add.at(edges, np.asarray(split.offsets[:-1]), np.int8(1))
    np.add.at(edges, np.asarray(split.train_end), np.int8(-1))
    return np.cumsum(edges[:-1], dtype=np.int8).astype(bool)


def training_counts(sequences: Sequences, split: Split, n_items: int) -> np.ndarray:
    """Training events of each item [V + 1] int64; number 0 has none."""
    return np.bincount(sequences.items[training_rows(split, sequences.n_events)], minlength=n_items + 1)
