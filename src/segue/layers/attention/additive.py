"""Additive scores of every query against every key, in tiles: what is added up for all pairs is never all in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from segue.layers.padded import tracing

Activation = Literal["tanh", "hard-sigmoid"]

SLOPE, MIDDLE = 0.2, 0.5  # of the hard sigmoid, Theano's and so NARM's; torch's rises with one sixth
TILE = 1 << 17  # numbers of a tile: half a megabyte of float32, so that it stays in the cache between its passes


class _AdditiveScores(torch.autograd.Function):
    """The backward makes each tile anew, which takes less time than bringing it from memory."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        keys: Tensor,
        vector: Tensor,
        activation: Activation,
        back: bool,  # noqa: FBT001  # autograd passes by place
    ) -> Tensor:
        ctx.save_for_backward(queries, keys, vector)
        ctx.activation, ctx.back = activation, back
        scores = queries.new_zeros(*queries.shape[:2], keys.shape[1])
        for rows, reach in _tiles(queries, keys, back=back):
            tile = _together(queries[:, rows], keys[:, :reach])
            scores[:, rows, :reach] = (tile.tanh_() if activation == "tanh" else tile.clamp_(0, 1)) @ vector
        return scores

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        queries, keys, vector = ctx.saved_tensors
        d_queries, d_keys, d_vector = torch.empty_like(queries), torch.zeros_like(keys), torch.zeros_like(vector)
        ones = queries.new_ones(1, queries.shape[1])  # a sum over tiles' rows is faster as a product
        for rows, reach in _tiles(queries, keys, back=ctx.back):
            tile = _together(queries[:, rows], keys[:, :reach])  # [B, r, n, D]
            gradient = gradients[0][:, rows, :reach, None].expand_as(tile)
            if ctx.activation == "tanh":
                risen = torch.ops.aten.tanh_backward(gradient, tile.tanh_())
            else:
                risen = torch.ops.aten.hardtanh_backward(gradient, tile, 0, 1)
                tile.clamp_(0, 1)
            d_vector += gradients[0][:, rows, :reach].reshape(-1) @ tile.view(-1, tile.shape[-1])
            d_queries[:, rows] = risen.sum(2)
            d_keys[:, :reach] += (ones[:, : risen.shape[1]] @ risen.flatten(2)).view(len(keys), reach, -1)
        return d_queries * vector, d_keys * vector, d_vector, None, None


def additive_scores(
    queries: Tensor, keys: Tensor, vector: Tensor, activation: Activation, *, causal: bool = False
) -> Tensor:
    """vector · activation(query + key) for all pairs: [..., M, D] and [..., N, D] → [..., M, N].

    `causal`: queries and keys are of the same tokens, and scores of later keys are of no use: they may be
    anything.
    """
    if activation == "hard-sigmoid":
        queries, keys = SLOPE * queries + MIDDLE, SLOPE * keys
    if tracing():
        sums = queries[..., :, None, :] + keys[..., None, :, :]
        return (sums.tanh() if activation == "tanh" else sums.clamp(0, 1)) @ vector
    (m, n), width = (queries.shape[-2], keys.shape[-2]), keys.shape[-1]
    before = torch.broadcast_shapes(queries.shape[:-2], keys.shape[:-2])  # type: ignore[no-untyped-call]
    flat: Tensor = _AdditiveScores.apply(  # type: ignore[no-untyped-call]
        queries.expand(*before, m, width).reshape(-1, m, width),
        keys.expand(*before, n, width).reshape(-1, n, width),
        vector,
        activation,
        causal,
    )
    return flat.view(*before, m, n)


def _tiles(queries: Tensor, keys: Tensor, *, back: bool) -> Iterator[tuple[slice, int]]:
    """Queries at a time, and how many of the keys they are compared with."""
    m, n, pairs = queries.shape[1], keys.shape[1], TILE / (len(keys) * keys.shape[2])
    begin = 0
    while begin < m:
        rows = (math.sqrt(begin**2 + 4 * pairs) - begin) / 2 if back else pairs / n  # times what they reach: `pairs`
        end = min(m, begin + max(1, int(rows)))
        yield slice(begin, end), end if back else n
        begin = end


def _together(queries: Tensor, keys: Tensor) -> Tensor:
    """[B, r, D] and [B, n, D] → [B, r, n, D]."""
    return queries[:, :, None] + keys[:, None]
