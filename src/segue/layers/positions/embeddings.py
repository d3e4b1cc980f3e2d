"""Position embeddings, added to tokens and counted from the oldest or from the newest one."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from segue.layers.packed import PackedBatch

CountedFrom = Literal["newest", "oldest"]
LONGEST_WAVE = 10_000.0  # of a sinusoid, in units of 2π
TOO_LONG = "histories are cut to the model's length before they are encoded"


class Positions(nn.Module):
    """Add row p of a table to the token at position p; position 0 is the user's newest or oldest token."""

    table: Tensor
    counted_from: CountedFrom = "oldest"

    @property
    def length(self) -> int:
        """Number of positions."""
        return len(self.table)

    def forward(self, x: Tensor, batch: PackedBatch) -> Tensor:
        assert batch.longest <= self.length, TOO_LONG
        positions = batch.position_from_newest if self.counted_from == "newest" else batch.position
        return x + functional.embedding(positions, self.table)


class LearnedPositions(Positions):
    """A learned table."""

    def __init__(self, length: int, width: int, counted_from: CountedFrom) -> None:
        super().__init__()
        self.table = nn.Parameter(Tensor(length, width))
        self.counted_from = counted_from


class SinusoidalPositions(Positions):
    """Fixed sinusoids."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.register_buffer("table", sinusoids(length, width), persistent=False)


class NoPositions(Positions):
    """No position embeddings, for models that use distances or order in another way. The states of a prefix are the
    same as within the whole history."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(length, 1), persistent=False)  # broadcasts to any width

    def forward(self, x: Tensor, batch: PackedBatch) -> Tensor:
        assert batch.longest <= self.length, TOO_LONG
        return x


def sinusoids(length: int, width: int) -> Tensor:
    """Sines at even features and cosines at odd ones, with longer and longer waves [length, width]: Vaswani et al.,
    "Attention Is All You Need", NeurIPS 2017."""
    angles, table = position_angles(length, width), torch.zeros(length, width)
    table[:, ::2] = angles.sin()
    table[:, 1::2] = angles.cos()[:, : width // 2]
    return table


def position_angles(length: int, width: int) -> Tensor:
    """Angle of each position and each pair of features [length, width / 2]; float64, as late positions have large
    angles."""
    speed = LONGEST_WAVE ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    return torch.arange(length, dtype=torch.float64)[:, None] * speed
