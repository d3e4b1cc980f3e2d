"""Blocks for one token that comes after others: a new event costs one token, and not its history once more.

A block needs of earlier tokens a row each, which is kept. All is in numpy: for one token torch takes several times as
long to begin as numpy takes to finish. Nothing is dropped out, as in every answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
from torch import Tensor, nn

VectorMap = Callable[[np.ndarray], np.ndarray]
"""[D] → [D']."""

TokenStep = Callable[[np.ndarray, np.ndarray, np.ndarray | None], np.ndarray]
"""A token [D]; what is kept of the n tokens up to it [2, H, n, d], of which the last, its own, is written here; how
much time lies between each and the moment it looks back from, in buckets [n], for blocks that are `timed` → [D]."""


@runtime_checkable
class Timed(Protocol):
    """A block that says whether it looks at times."""

    timed: bool


@runtime_checkable
class Incremental(Timed, Protocol):
    """A block that can take one token more, where its tokens look back only."""

    @property
    def causal(self) -> bool:
        """Whether no token looks at a later one."""
        ...

    def keys_values(self, x: Tensor) -> Tensor:
        """What tokens that come later need of these [T, D] → [T, 2, H, d]."""
        ...

    def token_step(self) -> TokenStep:
        """The block for one token more, with its weights as they are now, or will be where they are changed in
        place."""
        ...


def array(parameter: Tensor) -> np.ndarray:
    """The numbers of a parameter, not a copy."""
    numbers: np.ndarray = parameter.detach().numpy()
    return numbers


def numpy_map(part: nn.Module) -> VectorMap:
    """A linear map, a layer norm or nothing at all, for one token."""
    match part:
        case nn.Linear():
            bias: Tensor | None = part.bias
            return _linear(array(part.weight), None if bias is None else array(bias))
        case nn.LayerNorm(elementwise_affine=True):
            return numpy_layer_norm(part.normalized_shape[0], part.eps, array(part.weight), array(part.bias))
        case nn.LayerNorm():
            return numpy_layer_norm(part.normalized_shape[0], part.eps)
        case nn.Identity():
            return lambda x: x
    raise AssertionError(part)


def _linear(weight: np.ndarray, bias: np.ndarray | None) -> VectorMap:
    if bias is None:
        return weight.dot

    def linear(x: np.ndarray) -> np.ndarray:
        result: np.ndarray = weight.dot(x)
        result += bias
        return result

    return linear


def numpy_layer_norm(
    width: int, eps: float, weight: np.ndarray | None = None, bias: np.ndarray | None = None
) -> VectorMap:
    """A layer norm."""
    mean = np.full(width, 1 / width, dtype=np.float32)

    def norm(x: np.ndarray) -> np.ndarray:
        centred: np.ndarray = x - mean.dot(x)
        centred *= (centred.dot(centred) / width + eps) ** -0.5
        if weight is not None:
            centred *= weight
            centred += bias
        return centred

    return norm


def sigmoid(gate: np.ndarray) -> np.ndarray:
    """The sigmoid."""
    result: np.ndarray = 1 / (1 + np.exp(-gate))
    return result


def silu(x: np.ndarray) -> np.ndarray:
    """x * sigmoid(x)."""
    result: np.ndarray = x / (1 + np.exp(-x))
    return result
