"""Batches in which every event is distinct, and a bound for chi-square tests."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from segue.data.batch import Batch

some_users = st.lists(st.lists(st.integers(1, 50), min_size=2, max_size=9), min_size=1, max_size=6)


def batch_of(histories: Sequence[Sequence[int]]) -> Batch:
    """Every event has its own time and value: ten times its index in the batch, and that index."""
    lengths = [len(history) for history in histories]
    total = sum(lengths)
    return Batch(
        items=np.array([item for history in histories for item in history], dtype=np.int64),
        times=np.arange(total) * 10,
        lengths=np.array(lengths),
        kinds=np.arange(total) % 3,
        values=np.arange(total, dtype=np.float32),
    )


def users_of(tokens: np.ndarray, lengths: np.ndarray) -> list[list[int]]:
    return [part.tolist() for part in np.split(tokens, np.cumsum(lengths)[:-1])]


def owners(lengths: np.ndarray) -> np.ndarray:
    return np.repeat(np.arange(len(lengths)), lengths)


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    assert counts.sum() == round(expected.sum()) and (expected >= 5).all()
    return float(((counts - expected) ** 2 / expected).sum())


def most_chi_square(cells: int) -> float:
    """The 99.9 % quantile of the chi-square statistic over this many cells (Wilson and Hilferty)."""
    freedom = cells - 1
    return freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
