"""Transformer blocks over packed tokens [T, D]."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from segue.layers.attention.multi_head import Attention, Relative
from segue.layers.attention.scores import ScoreKind
from segue.layers.dropout import Dropout
from segue.layers.incremental import TokenStep, VectorMap, numpy_map, sigmoid, silu
from segue.layers.packed import PackedBatch


class Block(Protocol):
    """One layer of an encoder."""

    def __call__(self, x: Tensor, batch: PackedBatch) -> Tensor:
        """[T, D] → [T, D]."""
        ...

    def newest(self, x: Tensor, batch: PackedBatch) -> Tensor:
        """The output at each user's newest token alone [B, D], which is all that an answer needs of the last block."""
        ...

    def attention_weights(self, x: Tensor, batch: PackedBatch) -> Tensor | None:
        """Who looks at whom [B, heads, N, N]; None in a block without attention."""
        ...


class WithoutAttention(nn.Module):
    """What is common to the blocks in which no token looks at others."""

    def attention_weights(self, x: Tensor, batch: PackedBatch) -> None:
        """There are none."""


class FeedForward(nn.Module):
    """Two linear maps with an activation and dropout between; the second has no activation."""

    def __init__(
        self, width: int, hidden: int, dropout: float, activation: Callable[[Tensor], Tensor] = functional.relu
    ) -> None:
        super().__init__()
        self.activation = activation
        self.inner = nn.Linear(width, hidden)
        self.outer = nn.Linear(hidden, width)
        self.drop = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.outer(self.drop(self.activation(self.inner(x))))
        return result

    def token_step(self) -> VectorMap:
        assert self.activation is functional.relu
        inner, outer = numpy_map(self.inner), numpy_map(self.outer)
        return lambda x: outer(np.maximum(inner(x), 0))


class _SiluGate(torch.autograd.Function):
    """silu(a) * b for the two halves [a | b] of the input, with a backward in few passes over memory."""

    @staticmethod
    def forward(ctx: Any, joined: Tensor) -> Tensor:
        ctx.save_for_backward(joined)
        a, b = joined.chunk(2, dim=-1)
        return functional.silu(a).mul_(b)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (joined,) = ctx.saved_tensors
        gradient = gradients[0]
        a, b = joined.chunk(2, dim=-1)
        result = torch.empty_like(joined)
        left, right = result.chunk(2, dim=-1)
        torch.mul(gradient, functional.silu(a), out=right)
        left.copy_(torch.ops.aten.silu_backward(gradient * b, a))
        return result


def silu_gate(joined: Tensor) -> Tensor:
    """silu(a) * b for the two halves [a | b] of the last dimension."""
    if not torch.is_grad_enabled():  # an answer has no backward to be prepared for
        a, b = joined.chunk(2, dim=-1)
        return functional.silu(a).mul_(b)
    result: Tensor = _SiluGate.apply(joined)  # type: ignore[no-untyped-call]
    return result


class SwiGLU(nn.Module):
    """W2 drop(silu(W1 x) * (W3 x)), without biases; W1 and W3 are one matrix product."""

    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 2 * hidden, bias=False)
        self.outer = nn.Linear(hidden, width, bias=False)
        self.drop = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.outer(self.drop(silu_gate(self.inner(x))))
        return result

    def token_step(self) -> VectorMap:
        inner, outer, hidden = numpy_map(self.inner), numpy_map(self.outer), self.outer.in_features

        def forward(x: np.ndarray) -> np.ndarray:
            joined = inner(x)
            return outer(silu(joined[:hidden]) * joined[hidden:])

        return forward


class SASRecBlock(nn.Module):
    """The block of the original SASRec: the query is normalised, keys and values are not, and the residuals
    are the normalised streams.

    In the original, attention has no output projection and the norms have weights of their own.
    """

    timed = False
    causal = True

    def __init__(
        self,
        width: int,
        heads: int,
        hidden: int,
        dropout: float,
        *,
        output: bool = False,
        weighted_norms: bool = True,
    ) -> None:
        super().__init__()
        self.norm_query = nn.LayerNorm(width, eps=1e-8, elementwise_affine=weighted_norms)
        self.attention = Attention(width, heads, output=output, causal=True)
        self.norm_forward = nn.LayerNorm(width, eps=1e-8, elementwise_affine=weighted_norms)
        self.feed_forward = FeedForward(width, hidden, dropout)
        self.drop = Dropout(dropout)

    def forward(self, x: Tensor, batch: PackedBatch) -> Tensor:
        query = self.norm_query(x)
        return self._fed_forward(query + self.attention(query, x, batch))

    def newest(self, x: Tensor, batch: PackedBatch) -> Tensor:
        query = self.norm_query(x[batch.last])
        return self._fed_forward(query + self.attention.newest(query, x, batch))

    def _fed_forward(self, attended: Tensor) -> Tensor:
        middle = self.norm_forward(attended)
        result: Tensor = middle + self.drop(self.feed_forward(middle))
        return result

    def keys_values(self, x: Tensor) -> Tensor:
        return self.attention.keys_values(x)

    def token_step(self) -> TokenStep:
        norm_query, attend = numpy_map(self.norm_query), self.attention.token_step()
        norm_forward, forward = numpy_map(self.norm_forward), self.feed_forward.token_step()

        def step(x: np.ndarray, kept: np.ndarray, _: np.ndarray | None) -> np.ndarray:
            query = norm_query(x)
            middle = norm_forward(query + attend(query, x, kept))
            return middle + forward(middle)

        return step

    def attention_weights(self, x: Tensor, batch: PackedBatch) -> Tensor:
        return self.attention.weights(self.norm_query(x), x, batch)


class _Gated(torch.autograd.Function):
    """The gated sum with a backward in few passes over memory."""

    @staticmethod
    def forward(ctx: Any, stream: Tensor, gate: Tensor, update: Tensor) -> Tensor:
        opened = torch.sigmoid(gate)
        ctx.save_for_backward(opened, update)
        return torch.addcmul(stream, opened, update)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        opened, update = ctx.saved_tensors
        gradient = gradients[0]
        return gradient, torch.ops.aten.sigmoid_backward(gradient * update, opened), gradient * opened


def gated(stream: Tensor, gate: Tensor, update: Tensor) -> Tensor:
    """stream + sigmoid(gate) * update."""
    if not torch.is_grad_enabled():
        return torch.addcmul(stream, torch.sigmoid(gate), update)
    result: Tensor = _Gated.apply(stream, gate, update)  # type: ignore[no-untyped-call]
    return result


class _NormedFirst(nn.Module):
    """What blocks share whose attention sees a normalised stream, which is updated as it was."""

    norm_attention: nn.LayerNorm
    attention: Attention

    def forward(self, x: Tensor, batch: PackedBatch) -> Tensor:
        normal = self.norm_attention(x)
        return self._updated(x, self.attention(normal, normal, batch))

    def newest(self, x: Tensor, batch: PackedBatch) -> Tensor:
        normal = self.norm_attention(x)
        return self._updated(x[batch.last], self.attention.newest(normal[batch.last], normal, batch))

    def keys_values(self, x: Tensor) -> Tensor:
        return self.attention.keys_values(self.norm_attention(x))

    def attention_weights(self, x: Tensor, batch: PackedBatch) -> Tensor:
        normal = self.norm_attention(x)
        return self.attention.weights(normal, normal, batch)

    def _updated(self, x: Tensor, attended: Tensor) -> Tensor:
        raise NotImplementedError


class GatedBlock(_NormedFirst):
    """The gated pre-norm block (LiGR): each update passes a sigmoid gate that reads the un-normalised stream."""

    timed = False
    causal = True

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width, eps=1e-5)
        self.attention = Attention(width, heads, output=True, causal=True)
        self.gate_attention = nn.Linear(width, width)
        self.norm_forward = nn.LayerNorm(width, eps=1e-5)
        self.feed_forward = SwiGLU(width, hidden, dropout)
        self.gate_forward = nn.Linear(width, width)
        self.drop = Dropout(dropout)

    def _updated(self, x: Tensor, attended: Tensor) -> Tensor:
        x = gated(x, self.gate_attention(x), self.drop(attended))
        return gated(x, self.gate_forward(x), self.drop(self.feed_forward(self.norm_forward(x))))

    def token_step(self) -> TokenStep:
        norm_attention, attend = numpy_map(self.norm_attention), self.attention.token_step()
        norm_forward, forward = numpy_map(self.norm_forward), self.feed_forward.token_step()
        gate_attention, gate_forward = numpy_map(self.gate_attention), numpy_map(self.gate_forward)

        def step(x: np.ndarray, kept: np.ndarray, _: np.ndarray | None) -> np.ndarray:
            normal = norm_attention(x)
            x = x + sigmoid(gate_attention(x)) * attend(normal, normal, kept)
            result: np.ndarray = x + sigmoid(gate_forward(x)) * forward(norm_forward(x))
            return result

        return step


class PreNormBlock(_NormedFirst):
    """A Transformer's block with its norms before its parts: the stream itself is never normalised."""

    timed = False

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

    @property
    def causal(self) -> bool:
        return self.attention.causal

    def _updated(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.drop(attended)
        result: Tensor = x + self.drop(self.feed_forward(self.norm_forward(x)))
        return result

    def token_step(self) -> TokenStep:
        norm_attention, attend = numpy_map(self.norm_attention), self.attention.token_step()
        norm_forward, forward = numpy_map(self.norm_forward), self.feed_forward.token_step()

        def step(x: np.ndarray, kept: np.ndarray, _: np.ndarray | None) -> np.ndarray:
            normal = norm_attention(x)
            x = x + attend(normal, normal, kept)
            return x + forward(norm_forward(x))

        return step


class PostNormBlock(nn.Module):
    """The original Transformer's block, and BERT's: each sum of the stream and its update is normalised."""

    timed = False

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

    @property
    def causal(self) -> bool:
        return self.attention.causal

    def forward(self, x: Tensor, batch: PackedBatch) -> Tensor:
        return self._updated(x, self.attention(x, x, batch))

    def newest(self, x: Tensor, batch: PackedBatch) -> Tensor:
        newest = x[batch.last]
        return self._updated(newest, self.attention.newest(newest, x, batch))

    def _updated(self, x: Tensor, attended: Tensor) -> Tensor:
        x = self.norm_attention(x + self.drop(attended))
        result: Tensor = self.norm_forward(x + self.drop(self.feed_forward(x)))
        return result

    def keys_values(self, x: Tensor) -> Tensor:
        return self.attention.keys_values(x)

    def token_step(self) -> TokenStep:
        norm_attention, attend = numpy_map(self.norm_attention), self.attention.token_step()
        norm_forward, forward = numpy_map(self.norm_forward), self.feed_forward.token_step()

        def step(x: np.ndarray, kept: np.ndarray, _: np.ndarray | None) -> np.ndarray:
            x = norm_attention(x + attend(x, x, kept))
            return norm_forward(x + forward(x))

        return step

    def attention_weights(self, x: Tensor, batch: PackedBatch) -> Tensor:
        return self.attention.weights(x, x, batch)


@dataclass(frozen=True, eq=False)
class Decoding:
    """What a decoder's block keeps between its steps."""

    memory: Tensor  # [B, N, 2, H, d]: of the tokens it looks across at
    may_attend: Tensor | None  # [B, 1, 1, N]: True at those, False at padding
    own: Tensor | None = None  # [B, m, 2, H, d]: of the tokens so far; None where there are none yet

    def rows(self, index: Tensor) -> Decoding:
        """Of these rows, in this order: a beam goes on from some of its rows, and from some more than once."""
        return Decoding(
            memory=self.memory[index],
            may_attend=None if self.may_attend is None else self.may_attend[index],
            own=None if self.own is None else self.own[index],
        )


class DecoderBlock(nn.Module):
    """A Transformer's decoder block over padded tokens: they look back at each other, then across at a memory, then
    through a feed-forward part; norms before each part or after each sum."""

    def __init__(
        self, width: int, heads: int, hidden: int, dropout: float, *, norm: Literal["pre", "post"] = "pre"
    ) -> None:
        super().__init__()
        self.pre = norm == "pre"
        self.norm_own, self.norm_across, self.norm_forward = (nn.LayerNorm(width, eps=1e-5) for _ in range(3))
        self.own = Attention(width, heads, output=True, causal=True)
        self.across = Attention(width, heads, output=True, causal=False)
        self.feed_forward = FeedForward(width, hidden, dropout=0.0)
        self.drop = Dropout(dropout)

    def forward(self, x: Tensor, memory: Tensor, may_attend: Tensor | None = None) -> Tensor:
        """Tokens [B, M, D] and a memory [B, N, D] → [B, M, D]; `may_attend` [B, 1, 1, N] is False at its padding."""
        return self._on(x, self.start(memory, may_attend))[0]

    def start(self, memory: Tensor, may_attend: Tensor | None = None) -> Decoding:
        """Before the first step: what is needed of the memory is made once."""
        return Decoding(self.across.keys_values(memory), may_attend)

    def step(self, x: Tensor, so_far: Decoding) -> tuple[Tensor, Decoding]:
        """One token more for each row [B, D] → [B, D], as `forward` has it at its place, and what is kept then."""
        x, so_far = self._on(x[:, None], so_far)
        return x[:, 0], so_far

    def attention_weights(self, x: Tensor, memory: Tensor, may_attend: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Who looked at whom: back [B, H, M, M], and across [B, H, M, N]; rows of padding are meaningless."""
        normal = self.norm_own(x) if self.pre else x
        update, own = self.own.attend_with_weights(normal, self.own.keys_values(normal))
        x = self._added(x, update, self.norm_own)
        normal = self.norm_across(x) if self.pre else x
        _, across = self.across.attend_with_weights(normal, self.across.keys_values(memory), may_attend)
        return own.weights, across.weights

    def _on(self, x: Tensor, so_far: Decoding) -> tuple[Tensor, Decoding]:
        """Tokens [B, M, D] that come after those so far."""
        normal = self.norm_own(x) if self.pre else x
        own = self.own.keys_values(normal)
        own = own if so_far.own is None else torch.cat((so_far.own, own), dim=1)
        x = self._added(x, self.own.attend(normal, own), self.norm_own)
        normal = self.norm_across(x) if self.pre else x
        x = self._added(x, self.across.attend(normal, so_far.memory, so_far.may_attend), self.norm_across)
        normal = self.norm_forward(x) if self.pre else x
        return self._added(x, self.feed_forward(normal), self.norm_forward), replace(so_far, own=own)

    def _added(self, x: Tensor, update: Tensor, norm: nn.LayerNorm) -> Tensor:
        x = x + self.drop(update)
        result: Tensor = x if self.pre else norm(x)
        return result
