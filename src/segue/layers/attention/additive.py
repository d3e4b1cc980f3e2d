"""Additive scores of every query and key, in tiles: the sums of all pairs are never in memory at once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from segue.layers.padded import tracing

Activation = Literal["tanh", "hard-sigmoid"]

SLOPE, MIDDLE = 0.2, 0.5  # of Theano's hard sigmoid, which NARM uses; the slope of torch's is one sixth
TILE = 1 << 17  # numbers in a tile: half a megabyte of float32 stays in the processor's cache


class _AdditiveScores(torch.autograd.Function):
    """Additive scores; the backward pass computes each tile again, which is faster than reading it from memory."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        keys: Tensor,
        vector: Tensor,
        activation: Activation,
        causal: bool,  # noqa: FBT001  # autograd passes arguments by position
    ) -> Tensor:
        ctx.save_for_backward(queries, keys, vector)
        ctx.activation, ctx.causal = activation, causal
        scores = queries.new_zeros(*queries.shape[:2], keys.shape[1])
        for rows, n_keys in _tiles(queries, keys, causal=causal):
            tile = _pair_sums(queries[:, rows], keys[:, :n_keys])
            scores[:, rows, :n_keys] = (tile.tanh_() if activation == "tanh" else tile.clamp_(0, 1)) @ vector
        return scores

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        queries, keys, vector = ctx.saved_tensors
        d_queries, d_keys, d_vector = torch.empty_like(queries), torch.zeros_like(keys), torch.zeros_like(vector)
        ones = queries.new_ones(1, queries.shape[1])  # a matrix product is the faster sum over rows
        for rows, n_keys in _tiles(queries, keys, causal=ctx.causal):
            tile = _pair_sums(queries[:, rows], keys[:, :n_keys])  # [B, r, n, D]
            gradient = gradients[0][:, rows, :n_keys, None].expand_as(tile)
            if ctx.activation == "tanh":
                d_sums = torch.ops.aten.tanh_backward(gradient, tile.tanh_())
            else:
                d_sums = torch.ops.aten.hardtanh_backward(gradient, tile, 0, 1)
                tile.clamp_(0, 1)
            d_vector += gradients[0][:, rows, :n_keys].reshape(-1) @ tile.view(-1, tile.shape[-1])
            d_queries[:, rows] = d_sums.sum(2)
            d_keys[:, :n_keys] += (ones[:, : d_sums.shape[1]] @ d_sums.flatten(2)).view(len(keys), n_keys, -1)
        return d_queries * vector, d_keys * vector, d_vector, None, None


def additive_scores(
    queries: Tensor, keys: Tensor, vector: Tensor, activation: Activation, *, causal: bool = False
) -> Tensor:
    """vector · activation(query + key) for all pairs: [..., M, D] and [..., N, D] → [..., M, N]. If `causal`, queries
    and keys are of the same tokens, and scores of later keys may be anything."""
    if activation == "hard-sigmoid":
        queries, keys = SLOPE * queries + MIDDLE, SLOPE * keys
    if tracing():
        sums = queries[..., :, None, :] + keys[..., None, :, :]
        return (sums.tanh() if activation == "tanh" else sums.clamp(0, 1)) @ vector
    (m, n), width = (queries.shape[-2], keys.shape[-2]), keys.shape[-1]
    leading = torch.broadcast_shapes(queries.shape[:-2], keys.shape[:-2])  # type: ignore[no-untyped-call]
    flat: Tensor = _AdditiveScores.apply(  # type: ignore[no-untyped-call]
        queries.expand(*leading, m, width).reshape(-1, m, width),
        keys.expand(*leading, n, width).reshape(-1, n, width),
        vector,
        activation,
        causal,
    )
    return flat.view(*leading, m, n)


def _tiles(queries: Tensor, keys: Tensor, *, causal: bool) -> Iterator[tuple[slice, int]]:
    """Ranges of queries, and the number of keys that each is scored with."""
    m, n, pairs = queries.shape[1], keys.shape[1], TILE / (len(keys) * keys.shape[2])
    begin = 0
    while begin < m:
        rows = (math.sqrt(begin**2 + 4 * pairs) - begin) / 2 if causal else pairs / n  # rows * keys is about `pairs`
        end = min(m, begin + max(1, int(rows)))
        yield slice(begin, end), end if causal else n
        begin = end


def _pair_sums(queries: Tensor, keys: Tensor) -> Tensor:
    """[B, r, D] and [B, n, D] → [B, r, n, D]."""
    return queries[:, :, None] + keys[:, None]
