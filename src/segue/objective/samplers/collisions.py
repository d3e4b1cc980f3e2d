"""Drawn items that are no negatives of a question, because they are answers: its own, or another of its group.

Some losses want several answers of one state, and some tasks know more of a user's answers than they ask for. Their
questions are rows with the same number in `groups`, and a drawn item that is an answer of the group is no negative for
any of them. Without groups each row has its own answer alone. A group's answers are its rows' targets, or, where
`own` is given, the items own[1] [P] of the groups own[0] [P], to which the targets belong.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

Own = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Collisions:
    """Of [M, K], row m has no negative in the columns `columns[first[m] : last[m]]`. Rows of one group share them, so
    that this is small where the pairs of row and column are many."""

    first: Tensor  # [M]
    last: Tensor  # [M]
    columns: Tensor  # [C]

    def pairs(self, some: slice) -> tuple[Tensor, Tensor]:
        """The rows, ascending and counted from the slice's first, and the columns."""
        first = self.first[some]
        counts = self.last[some] - first
        rows = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        places = torch.arange(len(rows), device=rows.device) + (first + counts - counts.cumsum(0))[rows]
        return rows, self.columns[places]


def shared_collisions(targets: Tensor, items: Tensor, groups: Tensor | None, own: Own | None = None) -> Collisions:
    """Where `items` [K], which all rows share, are answers of the rows. No mask of all scores is made."""
    if groups is None:
        order = items.argsort()
        first, last = _bounds(items[order], targets)
        return Collisions(first, last, order)
    owners, answers = _distinct((groups, targets) if own is None else own)
    order = items.argsort()
    begins, ends = _bounds(items[order], answers)
    pairs, columns = Collisions(begins, ends, order).pairs(slice(0, len(answers)))
    first, last = _bounds(owners[pairs], groups)
    return Collisions(first, last, columns)


def own_collisions(targets: Tensor, items: Tensor, groups: Tensor | None, own: Own | None = None) -> Tensor:
    """A mask [M, K] of the `items` [M, K], each row's own, that are answers of their row."""
    if groups is None:
        return targets[:, None] == items
    owners, answers = (groups, targets) if own is None else own
    stride = torch.maximum(answers.max(), items.max()) + 1
    known = (owners * stride + answers).sort().values
    wanted = groups[:, None] * stride + items
    found: Tensor = known[torch.searchsorted(known, wanted).clamp_(max=len(known) - 1)] == wanted
    return found


def _bounds(ordered: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Where each number wanted begins and ends among ascending ones."""
    return torch.searchsorted(ordered, wanted), torch.searchsorted(ordered, wanted, right=True)


def _distinct(own: Own) -> Own:
    """Every pair of group and item once, by group."""
    stride = own[1].max() + 1
    pairs = torch.unique(own[0] * stride + own[1])
    return pairs // stride, pairs % stride
