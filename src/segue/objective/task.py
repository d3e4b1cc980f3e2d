"""Tasks: a batch of histories → what to encode, which states to question, and the right answers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from segue.data.batch import Batch


@dataclass(frozen=True, slots=True, eq=False)
class Examples:
    """Inputs and the answers expected of their states."""

    inputs: Batch
    targets: np.ndarray  # [M] int64, item numbers
    positions: np.ndarray | None = None  # [M] int64, the input tokens questioned; None: all of them, in order
    weights: np.ndarray | None = None  # [M] float32; None: all alike


NEXT_ITEM_EXTRA = 1  # events a window holds beyond the model's length: the last answer is no input


def next_item(batch: Batch) -> Examples:
    """Every event but a user's last is an input, and the event after it its answer. Each user has at least two."""
    ends = np.cumsum(batch.lengths)
    inputs, answers = np.ones(len(batch.items), dtype=bool), np.ones(len(batch.items), dtype=bool)
    inputs[ends - 1] = False
    answers[ends - batch.lengths] = False
    return Examples(
        inputs=batch.tokens(inputs, batch.lengths - 1, asked=batch.times[ends - 1]), targets=batch.items[answers]
    )
