"""Collisions: sampled items that are no negatives of a query, because they are its target or another of its group.

The only file that decides which sampled items are no negatives. Without groups the only positive of a row is its
target.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Rows (queries) of one group, such as those of one state or user: no positive of the group is a negative of them.
    The positives include the rows' targets."""

    rows: Tensor  # [M], the group of each row
    owners: Tensor  # [P], the group of each positive
    positives: Tensor  # [P], items


@dataclass(frozen=True, slots=True, eq=False)
class Collisions:
    """The collisions among [M, K]: those of row m are `columns[first[m] : last[m]]`. Rows of one group share their
    columns, so that this is small even if the pairs of row and column are many."""

    first: Tensor  # [M]
    last: Tensor  # [M]
    columns: Tensor  # [C]

    def pairs(self, some: slice) -> tuple[Tensor, Tensor]:
        """The collisions of the rows `some`: row numbers from the start of the slice, ascending, and columns."""
        first = self.first[some]
        counts = self.last[some] - first
        rows = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        indices = torch.arange(len(rows), device=rows.device) + (first + counts - counts.cumsum(0))[rows]
        return rows, self.columns[indices]


def shared_collisions(targets: Tensor, items: Tensor, groups: Groups | None) -> Collisions:
    """The collisions of `items` [K], which all rows share, without a mask [M, K]."""
    order = items.argsort()
    if groups is None:
        return Collisions(*_bounds(items[order], targets), order)
    stride = groups.positives.max() + 1
    distinct = torch.unique(groups.owners * stride + groups.positives)  # pairs of group and item, ascending by group
    begins, ends = _bounds(items[order], distinct % stride)
    pairs, columns = Collisions(begins, ends, order).pairs(slice(0, len(distinct)))
    return Collisions(*_bounds((distinct // stride)[pairs], groups.rows), columns)


def own_collisions(targets: Tensor, items: Tensor, groups: Groups | None) -> Tensor:
    """A mask [M, K] of the collisions of `items` [M, K], the negatives of each row."""
    if groups is None:
        return targets[:, None] == items
    stride = torch.maximum(groups.positives.max(), items.max()) + 1
    pairs = (groups.owners * stride + groups.positives).sort().values
    keys = groups.rows[:, None] * stride + items
    collides: Tensor = pairs[torch.searchsorted(pairs, keys).clamp_(max=len(pairs) - 1)] == keys
    return collides


def _bounds(ordered: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """The first index of each key among ascending numbers, and the index after its last."""
    return torch.searchsorted(ordered, keys), torch.searchsorted(ordered, keys, right=True)
