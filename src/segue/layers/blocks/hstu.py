"""The layer of HSTU: one gated, pointwise attention in the place of attention and feed-forward."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from segue.layers.attention.pointwise import causal_mask, position_bias, silu_attention, time_bias
from segue.layers.dropout import Dropout
from segue.layers.incremental import TokenStep, array, numpy_layer_norm, numpy_map, silu
from segue.layers.packed import PackedBatch, pack, pad
from segue.layers.positions.time_buckets import BUCKETS

EPS = 1e-6


class RelativeBias(nn.Module):
    """What is added to a product by how many tokens and by how much time lie between the two.

    `target_time`: a row stands at the moment of the event after it, which for the newest is the moment of the
    question; otherwise at its own.
    """

    def __init__(self, length: int, *, target_time: bool) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(length))
        self.times = nn.Parameter(torch.zeros(BUCKETS))
        self.target_time = target_time

    def buckets(self, batch: PackedBatch) -> Tensor:
        """Of every pair of a user's tokens [B, N, N] int32; computed once a batch."""
        return batch.buckets_at_next if self.target_time else batch.buckets_at_own

    def newest(self, batch: PackedBatch) -> Tensor:
        """The bias of each user's newest row [B, N]; columns of padding mean nothing."""
        positions = (batch.lengths[:, None] - 1 - torch.arange(batch.longest, device=self.positions.device)).clamp_(
            min=0
        )
        buckets = batch.newest_buckets_at_next if self.target_time else batch.newest_buckets_at_own
        return self.positions[positions] + time_bias(self.times, buckets)


class HSTUBlock(nn.Module):
    """x + W drop(u * norm(attention)), where the gate u, queries, values and keys are one product of the normalised
    stream, in this order, through SiLU."""

    timed = True
    causal = True

    def __init__(self, width: int, heads: int, dropout: float, *, length: int, target_time: bool) -> None:
        """`length`: what weights are divided by, and the longest distance that has a bias of its own."""
        super().__init__()
        assert width % heads == 0
        self.heads = heads
        self.length = length
        self.inner = nn.Linear(width, 4 * width, bias=False)
        self.bias = RelativeBias(length, target_time=target_time)
        self.outer = nn.Linear(width, width)
        self.drop = Dropout(dropout)

    def forward(self, x: Tensor, batch: PackedBatch) -> Tensor:
        u, q, v, k = self._all(x, batch)
        mixed = silu_attention(
            q,
            k,
            v,
            positions=self.bias.positions,
            times=self.bias.times,
            buckets=self.bias.buckets(batch),
            length=self.length,
        )
        together = mixed.transpose(1, 2).reshape(batch.size, batch.longest, -1)
        return self._updated(x, u, pack(together, batch))

    def newest(self, x: Tensor, batch: PackedBatch) -> Tensor:
        """The row of the newest token alone: of the others only keys and values are made."""
        last = x[batch.last]
        weight = self.inner.weight.view(2, 2 * x.shape[1], -1)  # of gate and queries, of values and keys
        u, q = functional.silu(functional.linear(self._normal(last), weight[0])).chunk(2, dim=1)
        kept = pad(functional.silu(functional.linear(self._normal(x), weight[1])), batch)  # [B, N, 2D]
        v, k = kept.view(batch.size, batch.longest, 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        products = q.view(batch.size, self.heads, 1, -1) @ k.transpose(-1, -2)
        weights = functional.silu(products + self.bias.newest(batch)[:, None, None]) / self.length  # [B, H, 1, N]
        if batch.may_attend is not None:
            weights = weights * batch.may_attend
        return self._updated(last, u, (weights @ v).flatten(1))

    def keys_values(self, x: Tensor) -> Tensor:
        """Values and keys."""
        joined = functional.silu(functional.linear(self._normal(x), self.inner.weight[2 * x.shape[1] :]))
        return joined.view(len(x), 2, self.heads, -1)

    def token_step(self) -> TokenStep:
        inner, outer, width, heads = numpy_map(self.inner), numpy_map(self.outer), self.outer.in_features, self.heads
        normal, length = numpy_layer_norm(width, EPS), np.float32(self.length)
        positions, times = array(self.bias.positions)[::-1], array(self.bias.times)  # as tokens are: the newest last

        def step(x: np.ndarray, kept: np.ndarray, buckets: np.ndarray | None) -> np.ndarray:
            assert buckets is not None
            joined = silu(inner(normal(x)))
            kept[:, :, -1] = joined[2 * width :].reshape(2, heads, -1)
            v, k = kept
            weights = (k @ joined[width : 2 * width].reshape(heads, -1, 1))[:, :, 0]  # [H, n]
            weights += times.take(buckets) + positions[-len(buckets) :]
            weights = silu(weights)
            weights /= length
            return x + outer(joined[:width] * normal((weights[:, None] @ v).reshape(-1)))

        return step

    def attention_weights(self, x: Tensor, batch: PackedBatch) -> Tensor:
        _, q, _, k = self._all(x, batch)
        bias = time_bias(self.bias.times, self.bias.buckets(batch)) + position_bias(self.bias.positions, batch.longest)
        products = q @ k.transpose(-1, -2) + bias[:, None]
        return functional.silu(products) * causal_mask(q, self.length)

    def _all(self, x: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """u [T, D]; q, v and k [B, H, N, d]."""
        joined = functional.silu(self.inner(self._normal(x)))  # [T, 4D]
        u, rest = joined.tensor_split((self.outer.in_features,), dim=1)
        padded = pad(rest, batch).view(batch.size, batch.longest, 3, self.heads, -1)
        q, v, k = padded.permute(2, 0, 3, 1, 4)
        return u, q, v, k

    def _normal(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, (self.outer.in_features,), eps=EPS)

    def _updated(self, x: Tensor, u: Tensor, mixed: Tensor) -> Tensor:
        result: Tensor = x + self.outer(self.drop(u * self._normal(mixed)))
        return result
