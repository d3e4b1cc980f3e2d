"""Transformer blocks: SASRec's, gated (LiGR), pre-norm and post-norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from segue.layers.attention.multi_head import Attention, Relative
from segue.layers.attention.scores import ScoreKind
from segue.layers.blocks.feed_forward import FeedForward, SwiGLU
from segue.layers.dropout import Dropout
from segue.layers.incremental import TokenStep, numpy_map, sigmoid
from segue.layers.packed import PackedBatch


class _AttentionBlock(nn.Module):
    """The common part of all blocks: attention between queries and keys of the stream, and an update of the stream."""

    timed = False
    adds_to_queries = True
    """Whether the output of attention is added to the stream of the queries, or to the block's input."""
    attention: Attention

    @property
    def causal(self) -> bool:
        return self.attention.causal

    def forward(self, x: Tensor, batch: PackedBatch) -> Tensor:
        keys = self._keys(x)
        queries = self._queries(keys)
        return self._update(queries if self.adds_to_queries else x, self.attention(queries, keys, batch))

    def newest(self, x: Tensor, batch: PackedBatch) -> Tensor:
        keys = self._keys(x)
        queries = self._queries(keys[batch.last])
        attended = self.attention.newest(queries, keys, batch)
        return self._update(queries if self.adds_to_queries else x[batch.last], attended)

    def keys_values(self, x: Tensor) -> Tensor:
        return self.attention.keys_values(self._keys(x))

    def attention_weights(self, x: Tensor, batch: PackedBatch) -> Tensor:
        keys = self._keys(x)
        return self.attention.weights(self._queries(keys), keys, batch)

    def _keys(self, x: Tensor) -> Tensor:
        """The stream that keys and values are computed from."""
        return x

    def _queries(self, keys: Tensor) -> Tensor:
        """The stream that queries are computed from, for tokens with these keys."""
        return keys

    def _update(self, x: Tensor, attended: Tensor) -> Tensor:
        """The output of a block whose attention returned `attended`; `x` starts the residual connections."""
        raise NotImplementedError


class SASRecBlock(_AttentionBlock):
    """The block of the original SASRec: queries are normalised, keys and values are not, and the residual connections
    start from the normalised streams. The original has no `output` projection in attention, and its norms have
    weights."""

    def __init__(
        self, width: int, heads: int, hidden: int, dropout: float, *, output: bool = False, weighted_norms: bool = True
    ) -> None:
        super().__init__()
        self.norm_query = nn.LayerNorm(width, eps=1e-8, elementwise_affine=weighted_norms)
        self.attention = Attention(width, heads, output=output, causal=True)
        self.norm_forward = nn.LayerNorm(width, eps=1e-8, elementwise_affine=weighted_norms)
        self.feed_forward = FeedForward(width, hidden, dropout)
        self.drop = Dropout(dropout)

    def _queries(self, keys: Tensor) -> Tensor:
        queries: Tensor = self.norm_query(keys)
        return queries

    def _update(self, x: Tensor, attended: Tensor) -> Tensor:
        middle = self.norm_forward(x + attended)
        result: Tensor = middle + self.drop(self.feed_forward(middle))
        return result

    def token_step(self) -> TokenStep:
        norm_query, attend = numpy_map(self.norm_query), self.attention.token_step()
        norm_forward, forward = numpy_map(self.norm_forward), self.feed_forward.token_step()

        def step(x: np.ndarray, kv: np.ndarray, _: np.ndarray | None) -> np.ndarray:
            query = norm_query(x)
            middle = norm_forward(query + attend(query, x, kv))
            return middle + forward(middle)

        return step


class _Gated(torch.autograd.Function):
    """stream + sigmoid(gate) * update; the backward makes few passes over memory."""

    @staticmethod
    def forward(ctx: Any, stream: Tensor, gate: Tensor, update: Tensor) -> Tensor:
        weight = torch.sigmoid(gate)
        ctx.save_for_backward(weight, update)
        return torch.addcmul(stream, weight, update)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weight, update = ctx.saved_tensors
        gradient = gradients[0]
        return gradient, torch.ops.aten.sigmoid_backward(gradient * update, weight), gradient * weight


def gated(stream: Tensor, gate: Tensor, update: Tensor) -> Tensor:
    """stream + sigmoid(gate) * update."""
    if not torch.is_grad_enabled():
        return torch.addcmul(stream, torch.sigmoid(gate), update)
    result: Tensor = _Gated.apply(stream, gate, update)  # type: ignore[no-untyped-call]
    return result


class _PreNorm(_AttentionBlock):
    """The common part of pre-norm blocks: attention reads the normalised stream, and updates are added to the input."""

    adds_to_queries = False
    norm_attention: nn.LayerNorm

    def _keys(self, x: Tensor) -> Tensor:
        keys: Tensor = self.norm_attention(x)
        return keys


class GatedBlock(_PreNorm):
    """The gated pre-norm block (LiGR): each update is multiplied by a sigmoid gate of the un-normalised stream."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width, eps=1e-5)
        self.attention = Attention(width, heads, output=True, causal=True)
        self.gate_attention = nn.Linear(width, width)
        self.norm_forward = nn.LayerNorm(width, eps=1e-5)
        self.feed_forward = SwiGLU(width, hidden, dropout)
        self.gate_forward = nn.Linear(width, width)
        self.drop = Dropout(dropout)

    def _update(self, x: Tensor, attended: Tensor) -> Tensor:
        x = gated(x, self.gate_attention(x), self.drop(attended))
        return gated(x, self.gate_forward(x), self.drop(self.feed_forward(self.norm_forward(x))))

    def token_step(self) -> TokenStep:
        norm_attention, attend = numpy_map(self.norm_attention), self.attention.token_step()
        norm_forward, forward = numpy_map(self.norm_forward), self.feed_forward.token_step()
        gate_attention, gate_forward = numpy_map(self.gate_attention), numpy_map(self.gate_forward)

        def step(x: np.ndarray, kv: np.ndarray, _: np.ndarray | None) -> np.ndarray:
            normal = norm_attention(x)
            x = x + sigmoid(gate_attention(x)) * attend(normal, normal, kv)
            result: np.ndarray = x + sigmoid(gate_forward(x)) * forward(norm_forward(x))
            return result

        return step


class PreNormBlock(_PreNorm):
    """A pre-norm Transformer block: each part reads a normalised stream; the stream itself is not normalised."""

    def __init__(
        self,
        width: int,
        heads: int,
        hidden: int,
        dropout: float,
        *,
        causal: bool = True,
        scores: ScoreKind = "scaled-dot",
        relative: Relative | None = None,
    ) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width, eps=1e-5)
        self.attention = Attention(width, heads, output=True, causal=causal, scores=scores, relative=relative)
        self.norm_forward = nn.LayerNorm(width, eps=1e-5)
        self.feed_forward = FeedForward(width, hidden, dropout=0.0)
        self.drop = Dropout(dropout)

    def _update(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.drop(attended)
        result: Tensor = x + self.drop(self.feed_forward(self.norm_forward(x)))
        return result

    def token_step(self) -> TokenStep:
        norm_attention, attend = numpy_map(self.norm_attention), self.attention.token_step()
        norm_forward, forward = numpy_map(self.norm_forward), self.feed_forward.token_step()

        def step(x: np.ndarray, kv: np.ndarray, _: np.ndarray | None) -> np.ndarray:
            normal = norm_attention(x)
            x = x + attend(normal, normal, kv)
            return x + forward(norm_forward(x))

        return step


class PostNormBlock(_AttentionBlock):
    """A post-norm Transformer block, as in the original Transformer and BERT: each residual sum is normalised."""

    def __init__(
        self,
        width: int,
        heads: int,
        hidden: int,
        dropout: float,
        *,
        causal: bool = True,
        scores: ScoreKind = "scaled-dot",
        relative: Relative | None = None,
        activation: Callable[[Tensor], Tensor] = functional.relu,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.attention = Attention(width, heads, output=True, causal=causal, scores=scores, relative=relative)
        self.norm_attention = nn.LayerNorm(width, eps=eps)
        self.feed_forward = FeedForward(width, hidden, dropout=0.0, activation=activation)
        self.norm_forward = nn.LayerNorm(width, eps=eps)
        self.drop = Dropout(dropout)

    def _update(self, x: Tensor, attended: Tensor) -> Tensor:
        x = self.norm_attention(x + self.drop(attended))
        result: Tensor = self.norm_forward(x + self.drop(self.feed_forward(x)))
        return result

    def token_step(self) -> TokenStep:
        norm_attention, attend = numpy_map(self.norm_attention), self.attention.token_step()
        norm_forward, forward = numpy_map(self.norm_forward), self.feed_forward.token_step()

        def step(x: np.ndarray, kv: np.ndarray, _: np.ndarray | None) -> np.ndarray:
            x = norm_attention(x + attend(x, x, kv))
            return norm_forward(x + forward(x))

        return step
