"""Where a token stands in its history: added to it, or looked at where two tokens meet.

Learned and sinusoidal places are added to tokens, counted from the oldest or from the newest. Rotary places and buckets
of distances belong to attention, which then knows how far apart two tokens are and nothing else about places.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from segue.layers.attention.scores import KeyScores
from segue.layers.incremental import array
from segue.layers.packed import PackedBatch

CountedFrom = Literal["newest", "oldest"]
SLOWEST = 10_000.0  # the longest wave of a sinusoid is this times 2π


class LearnedPositions(nn.Module):
    """Add row p of a table to the token at place p; place 0 is the newest or the oldest token of the user."""

    table: Tensor

    def __init__(self, length: int, width: int, counted_from: CountedFrom) -> None:
        super().__init__()
        self.table = nn.Parameter(Tensor(length, width))
        self.counted_from = counted_from

    @property
    def length(self) -> int:
        """Places there are."""
        return len(self.table)

    def forward(self, x: Tensor, batch: PackedBatch) -> Tensor:
        assert batch.longest <= len(self.table), TOO_LONG
        place = batch.position_from_newest if self.counted_from == "newest" else batch.position
        return x + functional.embedding(place, self.table)


class SinusoidalPositions(nn.Module):
    """Add waves, from short to long, at the token's place counted from the oldest: nothing is learned."""

    table: Tensor
    counted_from: CountedFrom = "oldest"

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.register_buffer("table", sinusoids(length, width), persistent=False)  # the settings have it

    @property
    def length(self) -> int:
        return len(self.table)

    def forward(self, x: Tensor, batch: PackedBatch) -> Tensor:
        assert batch.longest <= len(self.table), TOO_LONG
        return x + functional.embedding(batch.position, self.table)


class NoPositions(nn.Module):
    """Nothing is added: attention knows distances, or order does not count. A prefix is encoded as inside the whole."""

    table: Tensor
    counted_from: CountedFrom = "oldest"

    def __init__(self, length: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(length, 1), persistent=False)  # adds nothing to any width

    @property
    def length(self) -> int:
        return len(self.table)

    def forward(self, x: Tensor, batch: PackedBatch) -> Tensor:
        assert batch.longest <= len(self.table), TOO_LONG
        return x


Positions = LearnedPositions | SinusoidalPositions | NoPositions

TOO_LONG = "histories are cut to the model's length before they are encoded"


class Rotary(nn.Module):
    """Turn each pair of a query's or key's features by an angle that grows with its place, faster or slower from pair
    to pair: what is left of the places in an inner product is their distance.

    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
    """

    cosines: Tensor
    sines: Tensor

    def __init__(self, length: int, width: int) -> None:
        """`width` of a head: pairs are made of the two halves' features."""
        super().__init__()
        assert width % 2 == 0
        angles = _angles(length, width)
        self.register_buffer("cosines", angles.cos().float().repeat(1, 2), persistent=False)
        self.register_buffer("sines", angles.sin().float().repeat(1, 2), persistent=False)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        """Features [B, H, N, d] at places [N], the same for all users, or [B, N]."""
        cosines, sines = self.cosines[places], self.sines[places]  # [N, d] or [B, N, d]
        if places.dim() == 2:
            cosines, sines = cosines[:, None], sines[:, None]
        left, right = x.chunk(2, dim=-1)
        return x * cosines + torch.cat((-right, left), dim=-1) * sines

    def token_step(self, score: KeyScores) -> KeyScores:
        """Scores of the newest token, and keys up to its own, both turned."""
        cosines, sines = array(self.cosines), array(self.sines)

        def turned(x: np.ndarray, places: slice) -> np.ndarray:
            left, right = np.split(x, 2, axis=-1)
            result: np.ndarray = x * cosines[places] + np.concatenate((-right, left), axis=-1) * sines[places]
            return result

        def turned_score(query: np.ndarray, keys: np.ndarray) -> np.ndarray:
            newest = slice(len(keys) - 1, len(keys))
            return score(turned(query[None], newest)[0], turned(keys, slice(len(keys))))

        return turned_score


class RelativeBuckets(nn.Module):
    """A learned number for each head and each bucket of distances, added to scores.

    Short distances have a bucket each, longer ones share wider and wider ones: Raffel et al., "Exploring the Limits of
    Transfer Learning with a Unified Text-to-Text Transformer", JMLR 2020. There one table serves all layers; here each
    layer has its own.
    """

    of_distance: Tensor

    def __init__(self, heads: int, length: int, *, causal: bool, buckets: int = 32, furthest: int = 128) -> None:
        """Of places below `length`; `furthest` is the distance from which on all share the last bucket."""
        super().__init__()
        self.length = length
        self.table = nn.Parameter(torch.zeros(buckets, heads))
        distances = torch.arange(1 - length, length)
        buckets_of = distance_buckets(distances, causal=causal, buckets=buckets, furthest=furthest)
        self.register_buffer("of_distance", buckets_of, persistent=False)

    def forward(self, asking: Tensor, asked: Tensor) -> Tensor:
        """What is added to scores of queries at places [M] or [B, M] and keys at places [N] → [H, M, N] or
        [B, H, M, N]."""
        distances = asked - asking[..., None]  # [.., M, N]
        buckets = self.of_distance[distances + self.length - 1]
        return functional.embedding(buckets, self.table).transpose(-1, -2).transpose(-2, -3)

    def token_step(self) -> Callable[[int], np.ndarray]:
        """For the newest of so many tokens, what is added to its scores of all of them [H, n]."""
        table, of_distance, length = array(self.table), array(self.of_distance), self.length
        return lambda tokens: table[of_distance[length - tokens : length]].T


def sinusoids(length: int, width: int) -> Tensor:
    """Sines at even features and cosines at odd ones, the pairs' waves longer and longer [length, width]: Vaswani et
    al., "Attention Is All You Need", NeurIPS 2017."""
    angles, table = _angles(length, width), torch.zeros(length, width)
    table[:, ::2] = angles.sin()
    table[:, 1::2] = angles.cos()[:, : width // 2]
    return table


def _angles(length: int, width: int) -> Tensor:
    """Of each place and each pair of features [length, width / 2], in double precision: far places are large angles."""
    slower = SLOWEST ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    return torch.arange(length, dtype=torch.float64)[:, None] * slower


def distance_buckets(distances: Tensor, *, causal: bool, buckets: int, furthest: int) -> Tensor:
    """Buckets of distances, key minus query. Causal, all are for keys that lie back, and those ahead are as near as
    can be; otherwise the second half is for keys ahead."""
    begin = torch.zeros_like(distances)
    if causal:
        far = (-distances).clamp(min=0)
    else:
        buckets //= 2
        begin, far = (distances > 0) * buckets, distances.abs()
    exact = buckets // 2
    wide = (far.clamp(min=1).double() / exact).log() / math.log(furthest / exact) * (buckets - exact)
    # A rounding error must not put a power of the ratio into the bucket before its own.
    shared = (exact + (wide + 1e-9).floor().long()).clamp(max=buckets - 1)
    return begin + torch.where(far < exact, far, shared)
