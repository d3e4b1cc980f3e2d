"""Relative positions in attention: scores depend on the distance of two tokens."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from segue.layers.attention.scores import KeyScores
from segue.layers.incremental import array
from segue.layers.positions.embeddings import position_angles


class Rotary(nn.Module):
    """Rotate each pair of features of queries and keys by an angle that grows with the position, at a speed of its own,
    so that their inner product depends on their distance only.

    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
    """

    cosines: Tensor
    sines: Tensor

    def __init__(self, length: int, width: int) -> None:
        """`width`: of a head. Feature i of the first half is paired with feature i of the second half."""
        super().__init__()
        assert width % 2 == 0
        angles = position_angles(length, width)
        self.register_buffer("cosines", angles.cos().float().repeat(1, 2), persistent=False)
        self.register_buffer("sines", angles.sin().float().repeat(1, 2), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate features [B, H, N, d] at positions [N], the same for all users, or [B, N]."""
        cosines, sines = self.cosines[positions], self.sines[positions]  # [N, d] or [B, N, d]
        if positions.dim() == 2:
            cosines, sines = cosines[:, None], sines[:, None]
        left, right = x.chunk(2, dim=-1)
        return x * cosines + torch.cat((-right, left), dim=-1) * sines

    def token_step(self, score: KeyScores) -> KeyScores:
        """Scores of the newest token's query with all keys, after rotation."""
        cosines, sines = array(self.cosines), array(self.sines)

        def rotate(x: np.ndarray, positions: slice) -> np.ndarray:
            left, right = np.split(x, 2, axis=-1)
            result: np.ndarray = x * cosines[positions] + np.concatenate((-right, left), axis=-1) * sines[positions]
            return result

        def rotated_score(query: np.ndarray, keys: np.ndarray) -> np.ndarray:
            newest = slice(len(keys) - 1, len(keys))
            return score(rotate(query[None], newest)[0], rotate(keys, slice(len(keys))))

        return rotated_score


class RelativeBuckets(nn.Module):
    """Add a learned bias to scores, one for each head and each bucket of distances; longer distances share wider
    buckets: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", JMLR
    2020. There, all layers share one table; here, each layer has its own."""

    of_distance: Tensor

    def __init__(self, heads: int, length: int, *, causal: bool, buckets: int = 32, furthest: int = 128) -> None:
        """`length`: number of positions. `furthest`: distance from which on all share the last bucket."""
        super().__init__()
        self.length = length
        self.table = nn.Parameter(torch.zeros(buckets, heads))
        distances = torch.arange(1 - length, length)
        buckets_of = distance_buckets(distances, causal=causal, buckets=buckets, furthest=furthest)
        self.register_buffer("of_distance", buckets_of, persistent=False)

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The bias of queries at positions [M] or [B, M] and keys at positions [N] → [H, M, N] or [B, H, M, N]."""
        distances = keys - queries[..., None]  # [.., M, N]
        buckets = self.of_distance[distances + self.length - 1]
        return functional.embedding(buckets, self.table).transpose(-1, -2).transpose(-2, -3)

    def token_step(self) -> Callable[[int], np.ndarray]:
        """Number of tokens n → the bias of the newest one's scores with all of them [H, n]."""
        table, of_distance, length = array(self.table), array(self.of_distance), self.length
        return lambda tokens: table[of_distance[length - tokens : length]].T


def distance_buckets(distances: Tensor, *, causal: bool, buckets: int, furthest: int) -> Tensor:
    """Buckets of distances, key position minus query position. If causal, later keys share bucket 0; otherwise the
    second half of the buckets is for later keys."""
    begin = torch.zeros_like(distances)
    if causal:
        far = (-distances).clamp(min=0)
    else:
        buckets //= 2
        begin, far = (distances > 0) * buckets, distances.abs()
    exact = buckets // 2
    wide = (far.clamp(min=1).double() / exact).log() / math.log(furthest / exact) * (buckets - exact)
    # A rounding error must not move the lower edge of a bucket into the bucket before it.
    shared = (exact + (wide + 1e-9).floor().long()).clamp(max=buckets - 1)
    return begin + torch.where(far < exact, far, shared)
