"""The HSTU layer: one gated pointwise attention instead of attention and feed-forward."""

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
    """A learned bias of the distance and of the time between two tokens. With `target_time`, time is measured up to the
    event after the query's token, or to the query time after the newest; otherwise up to the token itself."""

    def __init__(self, length: int, *, target_time: bool) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(length))
        self.times = nn.Parameter(torch.zeros(BUCKETS))
        self.target_time = target_time

    def buckets(self, batch: PackedBatch) -> Tensor:
        """Time buckets of all pairs of a user's tokens [B, N, N] int32; computed once per batch."""
        return batch.buckets_at_next if self.target_time else batch.buckets_at_own

    def newest(self, batch: PackedBatch) -> Tensor:
        """The bias of each user's newest token [B, N]; columns of padding are meaningless."""
        newest, index = batch.lengths[:, None] - 1, torch.arange(batch.longest, device=self.positions.device)
        buckets = batch.newest_buckets(at_next=self.target_time)
        return self.positions[(newest - index).clamp_(min=0)] + time_bias(self.times, buckets)


class HSTUBlock(nn.Module):
    """x + W drop(u * norm(attention)), where the gate u, queries, values and keys are, in this order, the SiLU of
    one product of the normalised stream."""

    timed = True
    causal = True

    def __init__(self, width: int, heads: int, dropout: float, *, length: int, target_time: bool) -> None:
        """`length`: divisor of the weights, and number of distances that have a bias."""
        super().__init__()
        assert width % heads == 0
        self.heads = heads
        self.length = length
        self.inner = nn.Linear(width, 4 * width, bias=False)
        self.bias = RelativeBias(length, target_time=target_time)
        self.outer = nn.Linear(width, width)
        self.drop = Dropout(dropout)

    def forward(self, x: Tensor, batch: PackedBatch) -> Tensor:
        u, q, v, k = self._project(x, batch)
        bias, buckets = self.bias, self.bias.buckets(batch)
        mixed = silu_attention(q, k, v, positions=bias.positions, times=bias.times, buckets=buckets, length=self.length)
        joined = mixed.transpose(1, 2).reshape(batch.size, batch.longest, -1)
        return self._update(x, u, pack(joined, batch))

    def newest(self, x: Tensor, batch: PackedBatch) -> Tensor:
        """The output of the newest token only; other tokens need keys and values only."""
        last = x[batch.last]
        weight = self.inner.weight.view(2, 2 * x.shape[1], -1)  # gate and queries; values and keys
        u, q = functional.silu(functional.linear(self._normal(last), weight[0])).chunk(2, dim=1)
        kv = pad(functional.silu(functional.linear(self._normal(x), weight[1])), batch)  # [B, N, 2D]
        v, k = kv.view(batch.size, batch.longest, 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        products = q.view(batch.size, self.heads, 1, -1) @ k.transpose(-1, -2)
        weights = functional.silu(products + self.bias.newest(batch)[:, None, None]) / self.length  # [B, H, 1, N]
        if batch.may_attend is not None:
            weights = weights * batch.may_attend
        return self._update(last, u, (weights @ v).flatten(1))

    def keys_values(self, x: Tensor) -> Tensor:
        """Values and keys, in this order."""
        joined = functional.silu(functional.linear(self._normal(x), self.inner.weight[2 * x.shape[1] :]))
        return joined.view(len(x), 2, self.heads, -1)

    def token_step(self) -> TokenStep:
        inner, outer, width, heads = numpy_map(self.inner), numpy_map(self.outer), self.outer.in_features, self.heads
        normal, length = numpy_layer_norm(width, EPS), np.float32(self.length)
        positions, times = array(self.bias.positions)[::-1], array(self.bias.times)  # distance 0 last

        def step(x: np.ndarray, kv: np.ndarray, buckets: np.ndarray | None) -> np.ndarray:
            assert buckets is not None
            joined = silu(inner(normal(x)))
            kv[:, :, -1] = joined[2 * width :].reshape(2, heads, -1)
            v, k = kv
            weights = (k @ joined[width : 2 * width].reshape(heads, -1, 1))[:, :, 0]  # [H, n]
            weights += times.take(buckets) + positions[-len(buckets) :]
            weights = silu(weights)
            weights /= length
            return x + outer(joined[:width] * normal((weights[:, None] @ v).reshape(-1)))

        return step

    def attention_weights(self, x: Tensor, batch: PackedBatch) -> Tensor:
        _, q, _, k = self._project(x, batch)
        bias = time_bias(self.bias.times, self.bias.buckets(batch)) + position_bias(self.bias.positions, batch.longest)
        products = q @ k.transpose(-1, -2) + bias[:, None]
        return functional.silu(products) * causal_mask(q, self.length)

    def _project(self, x: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """u [T, D]; q, v and k [B, H, N, d]."""
        joined = functional.silu(self.inner(self._normal(x)))  # [T, 4D]
        u, rest = joined.tensor_split((self.outer.in_features,), dim=1)
        padded = pad(rest, batch).view(batch.size, batch.longest, 3, self.heads, -1)
        q, v, k = padded.permute(2, 0, 3, 1, 4)
        return u, q, v, k

    def _normal(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, (self.outer.in_features,), eps=EPS)

    def _update(self, x: Tensor, u: Tensor, mixed: Tensor) -> Tensor:
        result: Tensor = x + self.outer(self.drop(u * self._normal(mixed)))
        return result
