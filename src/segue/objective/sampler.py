"""Samplers: negatives for the losses that do not look at every item, each with the log of its probability."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Negatives:
    """Item numbers and log q, the log-probability with which the sampler draws each."""

    items: Tensor  # [K] int64
    log_q: Tensor  # [K] float32


class Sampler(Protocol):
    """Draws items, and knows how likely any item is drawn."""

    def draw(self, count: int, generator: torch.Generator) -> Negatives: ...

    def log_q(self, items: Tensor) -> Tensor: ...


class UniformSampler:
    """Every item alike, with replacement."""

    def __init__(self, n_items: int) -> None:
        self.n_items = n_items

    def draw(self, count: int, generator: torch.Generator) -> Negatives:
        items = torch.randint(1, self.n_items + 1, (count,), generator=generator)
        return Negatives(items, self.log_q(items))

    def log_q(self, items: Tensor) -> Tensor:
        return torch.full(items.shape, -float(np.log(self.n_items)), dtype=torch.float32)


class PopularitySampler:
    """By training count to a power, with replacement. Items never trained on are never drawn."""

    def __init__(self, counts: np.ndarray, power: float) -> None:
        """`counts` [V + 1] int64, by item number; counts[0] is padding's."""
        weight = np.where(counts > 0, counts.astype(np.float64) ** power, 0.0)
        weight[0] = 0
        self._cumulative = torch.from_numpy(np.cumsum(weight / weight.sum()))
        with np.errstate(divide="ignore"):
            self._log_q = torch.from_numpy(np.log(weight / weight.sum()).astype(np.float32))

    def draw(self, count: int, generator: torch.Generator) -> Negatives:
        at = torch.rand(count, dtype=torch.float64, generator=generator) * self._cumulative[-1]
        items = torch.searchsorted(self._cumulative, at, right=True).clamp_(max=len(self._cumulative) - 1)
        return Negatives(items, self.log_q(items))

    def log_q(self, items: Tensor) -> Tensor:
        return self._log_q[items]
