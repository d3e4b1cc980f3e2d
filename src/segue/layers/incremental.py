"""Blocks in numpy for one token appended to a history, whose keys and values are cached.

A new event then costs one token instead of its whole history. For one token, a call of torch takes several times as
long as the work of numpy. There is no dropout: this is inference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast, runtime_checkable

import numpy as np
from torch import Tensor, nn

VectorMap = Callable[[np.ndarray], np.ndarray]
"""[D] → [D']."""

TokenStep = Callable[[np.ndarray, np.ndarray, np.ndarray | None], np.ndarray]
"""A token [D], the keys and values of the n tokens up to it [2, H, n, d] and, for `timed` blocks, the buckets of the
time since each of them [n] → the token's output [D]. The token's own keys and values, the last, are written here."""


@runtime_checkable
class Timed(Protocol):
    """A block that tells whether it uses times."""

    timed: bool


@runtime_checkable
class Incremental(Timed, Protocol):
    """A block that can encode one more token from cached keys and values, if it is causal."""

    @property
    def causal(self) -> bool:
        """Whether no token attends to a later one."""
        ...

    def keys_values(self, x: Tensor) -> Tensor:
        """Keys and values of tokens [T, D] → [T, 2, H, d]."""
        ...

    def token_step(self) -> TokenStep:
        """The block for one more token; it shares the memory of the block's weights."""
        ...


def array(parameter: Tensor) -> np.ndarray:
    """View a parameter as an array, without a copy."""
    numbers: np.ndarray = parameter.detach().numpy()
    return numbers


def numpy_map(part: nn.Module) -> VectorMap:
    """Convert a linear map, a layer norm or the identity to numpy, for one token."""
    match part:
        case nn.Linear():
            weight, parameter = array(part.weight), cast(Tensor | None, part.bias)
            if parameter is None:
                return weight.dot
            bias = array(parameter)
            return lambda x: weight.dot(x) + bias
        case nn.LayerNorm():
            affine = (array(part.weight), array(part.bias)) if part.elementwise_affine else ()
            return numpy_layer_norm(part.normalized_shape[0], part.eps, *affine)
        case nn.Identity():
            return lambda x: x
    raise AssertionError(part)


def numpy_layer_norm(
    width: int, eps: float, weight: np.ndarray | None = None, bias: np.ndarray | None = None
) -> VectorMap:
    """A layer norm over `width` features."""
    mean = np.full(width, 1 / width, dtype=np.float32)

    def norm(x: np.ndarray) -> np.ndarray:
        centred: np.ndarray = x - mean.dot(x)
        centred *= (centred.dot(centred) / width + eps) ** -0.5
        if weight is not None:
            centred *= weight
            centred += bias
        return centred

    return norm


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x))."""
    result: np.ndarray = 1 / (1 + np.exp(-x))
    return result


def silu(x: np.ndarray) -> np.ndarray:
    """x * sigmoid(x)."""
    result: np.ndarray = x / (1 + np.exp(-x))
    return result
