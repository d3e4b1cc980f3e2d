"""Models that sample their attention and learn with REINFORCE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class SampledAttention:
    """The samples that some states were computed with."""

    log_probability: Tensor  # [M]
    entropy: Tensor  # [M]: of the distributions sampled from
    bonus: float
    """Reward of a unit of entropy."""


@runtime_checkable
class SamplingModel(Protocol):
    """A model whose states may depend on samples, each state on its own."""

    def sampled_attention(self, states: Tensor) -> SampledAttention | None:
        """The samples of states [M, D] that `encode` returned; None if nothing was sampled."""
        ...
