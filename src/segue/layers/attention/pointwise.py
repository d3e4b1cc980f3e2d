"""Pointwise attention: weights are SiLUs of biased products, divided by a fixed length, and need not add up to one.

Weights of users are independent, so a few users are computed at a time and intermediate results stay in the cache. The
products are saved for the backward pass; the weights are computed from them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from segue.layers.padded import tracing
from segue.layers.positions.time_buckets import BUCKETS

MAX_WEIGHTS = 1 << 18  # of the users computed together


class _SiluAttention(torch.autograd.Function):
    """Outputs [B, H, N, d], with gradients of queries, keys, values and both biases."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, times: Tensor, buckets: Tensor, length: int
    ) -> Tensor:
        mask, bias = causal_mask(q, length), position_bias(positions, q.shape[2])
        products = q.new_empty(*q.shape[:3], q.shape[2])  # [B, H, N, N]
        mixed = torch.empty_like(v)
        for users in _user_chunks(q):
            scores = torch.matmul(q[users], k[users].transpose(-1, -2), out=products[users])
            scores += time_bias(times, buckets[users]).add_(bias)[:, None]
            mixed[users] = functional.silu(scores).mul_(mask) @ v[users]
        ctx.save_for_backward(q, k, v, products, buckets)
        ctx.length, ctx.positions = length, len(positions)
        return mixed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, products, buckets = ctx.saved_tensors
        gradient = gradients[0]
        mask = causal_mask(q, ctx.length)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        by_pair, by_bucket = q.new_zeros(q.shape[2], q.shape[2]), q.new_zeros(BUCKETS)
        for users in _user_chunks(q):
            scores, d_mixed = products[users], gradient[users]
            dv[users] = functional.silu(scores).mul_(mask).transpose(-1, -2) @ d_mixed
            d_scores = (d_mixed @ v[users].transpose(-1, -2)).mul_(mask)
            d_scores = torch.ops.aten.silu_backward(d_scores, scores)
            dq[users] = d_scores @ k[users]
            dk[users] = d_scores.transpose(-1, -2) @ q[users]
            shared = d_scores.sum(1)  # heads share the bias
            by_pair += shared.sum(0)
            by_bucket += torch.bincount(buckets[users].flatten(), weights=shared.flatten(), minlength=BUCKETS)
        by_distance = q.new_zeros(ctx.positions).index_add_(
            0, _distances(q.shape[2], q.device).flatten(), by_pair.flatten()
        )
        return dq, dk, dv, by_distance, by_bucket, None, None


def silu_attention(
    q: Tensor, k: Tensor, v: Tensor, *, positions: Tensor, times: Tensor, buckets: Tensor, length: int
) -> Tensor:
    """Each token attends to itself and those before it [B, H, N, d]; padding on the right needs no mask.

    The weight of token j at token i is silu(q_i · k_j + positions[i - j] + times[buckets[i, j]]) / length; `buckets`
    [B, N, N] int32."""
    if tracing():
        products = q @ k.transpose(-1, -2) + (time_bias(times, buckets) + position_bias(positions, q.shape[2]))[:, None]
        return (functional.silu(products) * causal_mask(q, length)) @ v
    mixed: Tensor = _SiluAttention.apply(q, k, v, positions, times, buckets, length)  # type: ignore[no-untyped-call]
    return mixed


def causal_mask(like: Tensor, length: int) -> Tensor:
    """1 / length where the column is not later than the row, 0 elsewhere [N, N]."""
    return like.new_full((like.shape[2], like.shape[2]), 1 / length).tril_()


def position_bias(positions: Tensor, tokens: int) -> Tensor:
    """Bias of the distance of row and column [N, N]."""
    return positions[_distances(tokens, positions.device)]


def time_bias(times: Tensor, buckets: Tensor) -> Tensor:
    """Bias of each time bucket, in the shape of the buckets."""
    return times.index_select(0, buckets.flatten()).view(buckets.shape)


def _distances(tokens: int, device: torch.device) -> Tensor:
    """Row minus column [N, N]; 0 for later columns."""
    index = torch.arange(tokens, device=device)
    return (index[:, None] - index).clamp_(min=0)


def _user_chunks(q: Tensor) -> Iterator[slice]:
    """Ranges of users whose weights fit the cache together."""
    step = max(1, MAX_WEIGHTS // (q.shape[1] * q.shape[2] ** 2))
    for first in range(0, len(q), step):
        yield slice(first, first + step)
