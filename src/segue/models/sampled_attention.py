"""Models that draw what they look at, and learn from how well it went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class SampledAttention:
    """What was drawn to make some states."""

    log_probability: Tensor  # [M]
    entropy: Tensor  # [M]: of what it was drawn from
    bonus: float
    """What a unit of entropy is worth."""


@runtime_checkable
class SamplingModel(Protocol):
    """A model whose states may depend on draws, each state on its own."""

    def sampled_attention(self, states: Tensor) -> SampledAttention | None:
        """Of states that `encode` gave [M, D], or of some of them; None where nothing was drawn."""
        ...
