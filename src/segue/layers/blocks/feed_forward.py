"""Feed-forward networks of Transformer blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from segue.layers.dropout import Dropout
from segue.layers.incremental import VectorMap, numpy_map, silu


class FeedForward(nn.Module):
    """Two linear maps, with an activation and dropout between them."""

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
    """silu(a) * b for the two halves [a | b] of the input; the backward makes few passes over memory."""

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
    if not torch.is_grad_enabled():  # no need to prepare a backward pass
        a, b = joined.chunk(2, dim=-1)
        return functional.silu(a).mul_(b)
    result: Tensor = _SiluGate.apply(joined)  # type: ignore[no-untyped-call]
    return result


class SwiGLU(nn.Module):
    """W2 drop(silu(W1 x) * (W3 x)); W1 and W3 are one matrix product."""

    def __init__(self, width: int, hidden: int, dropout: float, *, out: int = 0, bias: bool = False) -> None:
        """`out`: features of the result; 0: `width`."""
        super().__init__()
        self.inner = nn.Linear(width, 2 * hidden, bias=bias)
        self.outer = nn.Linear(hidden, out or width, bias=bias)
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
