"""Collisions: sampled items that are no negatives of a query, because they are its target or another of its group.

The only file that decides which sampled items are no negatives. Rows (queries) with the same number in `groups` [M]
form a group, such as the queries of one state or user, and no positive of a group is a negative of its rows. The
positives of a group are the targets of its rows, or, with `own`, the items own[1] [P] of the groups own[0] [P], which
include the targets. Without groups the only positive of a row is its target.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

Own = tuple[Tensor, Tensor]


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


def shared_collisions(targets: Tensor, items: Tensor, groups: Tensor | None, own: Own | None = None) -> Collisions:
    """The collisions of `items` [K], which all rows share, without a mask [M, K]."""
    if groups is None:
        order = items.argsort()
        first, last = _bounds(items[order], targets)
        return Collisions(first, last, order)
    owners, positives = _distinct((groups, targets) if own is None else own)
    order = items.argsort()
    begins, ends = _bounds(items[order], positives)
    pairs, columns = Collisions(begins, ends, order).pairs(slice(0, len(positives)))
    first, last = _bounds(owners[pairs], groups)
    return Collisions(first, last, columns)


def own_collisions(targets: Tensor, items: Tensor, groups: Tensor | None, own: Own | None = None) -> Tensor:
    """A mask [M, K] of the collisions of `items` [M, K], the negatives of each row."""
    if groups is None:
        return targets[:, None] == items
    owners, positives = (groups, targets) if own is None else own
    stride = torch.maximum(positives.max(), items.max()) + 1
    pairs = (owners * stride + positives).sort().values
    keys = groups[:, None] * stride + items
    collides: Tensor = pairs[torch.searchsorted(pairs, keys).clamp_(max=len(pairs) - 1)] == keys
    return collides


def _bounds(ordered: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """The first index of each key among ascending numbers, and the index after its last."""
    return torch.searchsorted(ordered, keys), torch.searchsorted(ordered, keys, right=True)


def _distinct(own: Own) -> Own:
    """The distinct pairs of group and item, ascending by group."""
    stride = own[1].max() + 1
    pairs = torch.unique(own[0] * stride + own[1])
    return pairs // stride, pairs % stride
