"""Learned positions: a vector for each place in the history, counted from the oldest item or from the newest."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional

from segue.layers.packed import PackedBatch

CountedFrom = Literal["newest", "oldest"]


class LearnedPositions(nn.Module):
    """Add row p of a table to the token at place p; place 0 is the newest or the oldest token of the user."""

    def __init__(self, length: int, width: int, counted_from: CountedFrom) -> None:
        super().__init__()
        self.places = length
        self.table = nn.Parameter(Tensor(length, width))
        self.counted_from = counted_from

    def forward(self, x: Tensor, batch: PackedBatch) -> Tensor:
        assert batch.longest <= self.places, "histories are cut to the model's length before they are encoded"
        place = batch.position_from_newest if self.counted_from == "newest" else batch.position
        return x + functional.embedding(place, self.table)


class Unplaced(nn.Module):
    """For blocks that know the order of tokens by themselves: tokens stay as they are, up to so many of a user."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.places = length

    def forward(self, x: Tensor, batch: PackedBatch) -> Tensor:
        assert batch.longest <= self.places, "histories are cut to the model's length before they are encoded"
        return x
