"""Samplers: negatives for the losses that do not score every item, and the log of their probabilities.

All samplers sample independently and with replacement, so each row of samples [M, K] is a sample of its own.
`present` [P] are the items of the batch that may be sampled, as `observe` returns them.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from segue.kinds import Count, Kind, ProperShare


class Sampler:
    """Samples items, and computes the log-probability of any item."""

    @property
    def state(self) -> dict[str, Tensor]:
        """Counts from training, by name, to be saved with the training state."""
        return {}

    def observe(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The items `present` in a batch, with repeats and special tokens. Called first, once per batch."""
        return torch.cat((inputs, targets))

    def sample(self, count: int, generator: torch.Generator, present: Tensor) -> Tensor:
        """Item numbers [count] int64."""
        raise NotImplementedError

    def log_q(self, items: Tensor, present: Tensor) -> Tensor:
        """The log-probability of each item, float32, in the shape of `items`."""
        raise NotImplementedError


class UniformSampler(Sampler):
    """Every item with the same probability; with `candidates`, item numbers, only these."""

    def __init__(self, n_items: int, candidates: Tensor | None = None) -> None:
        self._candidates = candidates
        self._count = n_items if candidates is None else len(candidates)
        self._possible = torch.ones(n_items + 1, dtype=torch.bool)  # one byte per item: catalogues may be large
        self._possible[0] = False
        if candidates is not None:
            self._possible.zero_()[candidates] = True

    def sample(self, count: int, generator: torch.Generator, present: Tensor) -> Tensor:  # noqa: ARG002
        rows = torch.randint(self._count, (count,), generator=generator)
        return rows + 1 if self._candidates is None else self._candidates[rows]

    def log_q(self, items: Tensor, present: Tensor) -> Tensor:  # noqa: ARG002  # the batch changes nothing
        return torch.where(self._possible[items], -math.log(self._count), -torch.inf)


class PopularitySampler(Sampler):
    """By training count to a power. Items unseen in training are never sampled."""

    def __init__(self, counts: np.ndarray, power: float) -> None:
        """`counts` [V + 1] int64, by item number; counts[0] is padding's."""
        trained = counts > 0
        trained[0] = False
        logs = power * np.log(np.where(trained, counts, 1).astype(np.float64))
        weight = np.where(trained, np.exp(logs - logs[trained].max()), 0.0)  # does not overflow, whatever the power
        self._cumulative = torch.from_numpy(np.cumsum(weight / weight.sum()))
        with np.errstate(divide="ignore"):
            self._log_q = torch.from_numpy(np.log(weight / weight.sum()).astype(np.float32))

    def sample(self, count: int, generator: torch.Generator, present: Tensor) -> Tensor:  # noqa: ARG002
        thresholds = torch.rand(count, dtype=torch.float64, generator=generator) * self._cumulative[-1]
        return torch.searchsorted(self._cumulative, thresholds, right=True).clamp_(max=len(self._cumulative) - 1)

    def log_q(self, items: Tensor, present: Tensor) -> Tensor:  # noqa: ARG002  # the batch changes nothing
        return self._log_q[items]


class InBatchSampler(Sampler):
    """The distinct items of the batch, all with the same probability.

    Over many batches negatives follow popularity, weakly: a popular item is in more batches.
    """

    def __init__(self, n_items: int) -> None:
        self.n_items = n_items

    def sample(self, count: int, generator: torch.Generator, present: Tensor) -> Tensor:
        pool = self._pool(present)
        return pool[torch.randint(len(pool), (count,), generator=generator)]

    def log_q(self, items: Tensor, present: Tensor) -> Tensor:
        pool = self._pool(present)
        return (torch.isin(items, pool) / len(pool)).log()

    def _pool(self, present: Tensor) -> Tensor:
        """The distinct items."""
        pool: Tensor = torch.unique(_items(present, self.n_items))
        return pool


class TargetSampler(Sampler):
    """The targets of the batch, each as often as it occurs, so that negatives follow popularity.

    q is an item's share of all targets so far in training, this batch included, and not of this batch alone.
    """

    def __init__(self, n_items: int) -> None:
        self.n_items = n_items
        self.counts = torch.zeros(n_items + 1, dtype=torch.int64)

    @property
    def state(self) -> dict[str, Tensor]:
        return {"target_counts": self.counts}

    def observe(self, inputs: Tensor, targets: Tensor) -> Tensor:  # noqa: ARG002  # targets alone are negatives
        items = _items(targets, self.n_items)
        self.counts.index_add_(0, items, torch.ones_like(items))
        return targets

    def sample(self, count: int, generator: torch.Generator, present: Tensor) -> Tensor:
        pool = _items(present, self.n_items)
        return pool[torch.randint(len(pool), (count,), generator=generator)]

    def log_q(self, items: Tensor, present: Tensor) -> Tensor:  # noqa: ARG002  # all batches so far count
        return (self.counts[items].double() / self.counts.sum()).log().float()


class MixedSampler(Sampler):
    """From the batch with probability `share`, else from the whole catalogue.

    q is that of the mixture, share · q of the batch + (1 - share) / V, whichever part an item was sampled from.
    """

    def __init__(self, share: float, batch: Sampler, catalogue: Sampler) -> None:
        self.share = share
        self._catalogue, self._batch = catalogue, batch

    @property
    def state(self) -> dict[str, Tensor]:
        return self._batch.state

    def observe(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self._batch.observe(inputs, targets)

    def sample(self, count: int, generator: torch.Generator, present: Tensor) -> Tensor:
        from_batch = self._batch.sample(count, generator, present)
        from_catalogue = self._catalogue.sample(count, generator, present)
        return torch.where(torch.rand(count, generator=generator) < self.share, from_batch, from_catalogue)

    def log_q(self, items: Tensor, present: Tensor) -> Tensor:
        q_batch, q_catalogue = (part.log_q(items, present).exp() for part in (self._batch, self._catalogue))
        return (self.share * q_batch + (1 - self.share) * q_catalogue).log()


def _items(numbers: Tensor, n_items: int) -> Tensor:
    """The numbers that are items: not padding (0) and not the mask token (beyond the catalogue)."""
    return numbers[(numbers >= 1) & (numbers <= n_items)]


class NoSamplerSettings(Kind, frozen=True, tag="none"):
    """No sampler: the loss scores every item, or selects its negatives itself."""


class SamplerSettings(Kind, frozen=True):
    """Settings of every sampler."""

    negatives: Count = 256
    """Negatives of a target."""
    shared: bool = True
    """Whether negatives are sampled once a batch and shared by all targets, or anew for each target."""

    def sampler(self, counts: np.ndarray, candidates: Tensor | None) -> Sampler:
        """Build the sampler from the items' training counts [V + 1] and the candidates; None: all items."""
        raise NotImplementedError


class UniformSettings(SamplerSettings, frozen=True, tag="uniform"):
    """Every item with the same probability."""

    def sampler(self, counts: np.ndarray, candidates: Tensor | None) -> Sampler:
        return UniformSampler(len(counts) - 1, candidates)


class PopularitySettings(SamplerSettings, frozen=True, tag="popularity"):
    """By training count to a power."""

    power: float = 1.0
    """The exponent; 0 would be `uniform`."""

    def sampler(self, counts: np.ndarray, candidates: Tensor | None) -> Sampler:  # noqa: ARG002
        return PopularitySampler(counts, self.power)


class InBatchSettings(SamplerSettings, frozen=True, tag="in-batch"):
    """The distinct items of the batch."""

    def sampler(self, counts: np.ndarray, candidates: Tensor | None) -> Sampler:  # noqa: ARG002
        return InBatchSampler(len(counts) - 1)


class MixedSettings(SamplerSettings, frozen=True, tag="mixed"):
    """Partly the distinct items of the batch, partly every item."""

    batch_sampler: ClassVar[type[InBatchSampler | TargetSampler]] = InBatchSampler

    in_batch: ProperShare = 0.5
    """Probability of an item of the batch."""

    def sampler(self, counts: np.ndarray, candidates: Tensor | None) -> Sampler:
        n_items = len(counts) - 1
        return MixedSampler(self.in_batch, self.batch_sampler(n_items), UniformSampler(n_items, candidates))


class TargetsSettings(SamplerSettings, frozen=True, tag="targets"):
    """The targets of the batch, as often as they occur."""

    def sampler(self, counts: np.ndarray, candidates: Tensor | None) -> Sampler:  # noqa: ARG002
        return TargetSampler(len(counts) - 1)


class TargetsUniformSettings(MixedSettings, frozen=True, tag="targets+uniform"):
    """Partly the targets of the batch, as often as they occur, partly every item."""

    batch_sampler: ClassVar[type[InBatchSampler | TargetSampler]] = TargetSampler
