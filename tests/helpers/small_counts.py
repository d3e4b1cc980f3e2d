"""Item-to-item counts made by hand."""

from __future__ import annotations

import numpy as np

from segue.counts.counts import Counts
from segue.counts.features import FEATURES, ItemCounts
from segue.counts.neighbours import Neighbours

Pairs = dict[tuple[int, int], int]


def neighbours(n_items: int, pairs: Pairs) -> Neighbours:
    """The matrix of counts by (item, neighbour)."""
    ordered = sorted(pairs.items())
    rows = np.bincount([row for (row, _), _ in ordered], minlength=n_items + 1)
    return Neighbours(
        offsets=np.concatenate(([0], np.cumsum(rows))),
        items=np.array([item for (_, item), _ in ordered], dtype=np.int32),
        counts=np.array([count for _, count in ordered], dtype=np.int32),
    )


def counts_of(users: list[int], followers: list[Pairs], companions: Pairs, **weights: float) -> Counts:
    """Counts of items 1..n with these users; weights by the names of features, `_` for `-`."""
    by_name = {name.replace("_", "-"): weight for name, weight in weights.items()}
    assert set(by_name) <= set(FEATURES)
    pairs = ItemCounts(
        followers=tuple(neighbours(len(users), each) for each in followers),
        companions=neighbours(len(users), companions),
        users=np.array([0, *users], dtype=np.int64),
    )
    return Counts(pairs, tuple(by_name.get(name, 0.0) for name in FEATURES))
