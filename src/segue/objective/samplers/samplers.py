"""Samplers: negatives for the losses that do not look at every item, each with the log of its probability.

All draw with replacement and every draw alike, so that any cut of the draws (a row's of [M, K]) is one of its own.
`present` [P] are the item numbers of the batch, inputs and answers, with repeats and special tokens; for samplers that
take negatives from the batch. For those that take them from its answers it holds the answers alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from segue.objective.samplers.count_min import CountMin


@dataclass(frozen=True, slots=True, eq=False)
class Negatives:
    """Item numbers and log q, the log-probability with which the sampler draws each."""

    items: Tensor  # [K] int64
    log_q: Tensor  # [K] float32

    def of(self, questions: Tensor, each: int) -> Negatives:
        """Those of some questions, where every question has so many of its own."""
        return Negatives(self.items.view(-1, each)[questions].flatten(), self.log_q.view(-1, each)[questions].flatten())


class Sampler(Protocol):
    """SampledAttention items, and knows how likely any item is drawn."""

    def draw(self, count: int, generator: torch.Generator, present: Tensor) -> Negatives: ...

    def log_q(self, items: Tensor, present: Tensor) -> Tensor: ...


class UniformSampler:
    """Every item alike; with `candidates`, item numbers, every one of these, and others never."""

    def __init__(self, n_items: int, candidates: Tensor | None = None) -> None:
        self._candidates = candidates
        self._count = n_items if candidates is None else len(candidates)
        self._drawn = torch.ones(n_items + 1, dtype=torch.bool)  # a byte an item, which may be very many
        self._drawn[0] = False
        if candidates is not None:
            self._drawn.zero_()[candidates] = True

    def draw(self, count: int, generator: torch.Generator, present: Tensor) -> Negatives:
        places = torch.randint(self._count, (count,), generator=generator)
        items = places + 1 if self._candidates is None else self._candidates[places]
        return Negatives(items, self.log_q(items, present))

    def log_q(self, items: Tensor, present: Tensor) -> Tensor:  # noqa: ARG002  # the batch changes nothing
        return torch.where(self._drawn[items], -float(np.log(self._count)), -torch.inf)


class PopularitySampler:
    """By training count to a power. Items never trained on are never drawn."""

    def __init__(self, counts: np.ndarray, power: float) -> None:
        """`counts` [V + 1] int64, by item number; counts[0] is padding's."""
        trained = counts > 0
        trained[0] = False
        logs = power * np.log(np.where(trained, counts, 1).astype(np.float64))
        weight = np.where(trained, np.exp(logs - logs[trained].max()), 0.0)  # none overflows, whatever the power
        self._cumulative = torch.from_numpy(np.cumsum(weight / weight.sum()))
        with np.errstate(divide="ignore"):
            self._log_q = torch.from_numpy(np.log(weight / weight.sum()).astype(np.float32))

    def draw(self, count: int, generator: torch.Generator, present: Tensor) -> Negatives:
        at = torch.rand(count, dtype=torch.float64, generator=generator) * self._cumulative[-1]
        items = torch.searchsorted(self._cumulative, at, right=True).clamp_(max=len(self._cumulative) - 1)
        return Negatives(items, self.log_q(items, present))

    def log_q(self, items: Tensor, present: Tensor) -> Tensor:  # noqa: ARG002  # the batch changes nothing
        return self._log_q[items]


class InBatchSampler:
    """The items of the batch, every one alike however often it occurs; others are never drawn (log q is -inf).

    Their vectors are at hand, and negatives follow popularity, weakened: a popular item is in more batches.
    """

    def __init__(self, n_items: int) -> None:
        self.n_items = n_items

    def draw(self, count: int, generator: torch.Generator, present: Tensor) -> Negatives:
        pool = self._pool(present)
        items = pool[torch.randint(len(pool), (count,), generator=generator)]
        return Negatives(items, torch.full((count,), -float(np.log(len(pool))), dtype=torch.float32))

    def log_q(self, items: Tensor, present: Tensor) -> Tensor:
        pool = self._pool(present)
        return (torch.isin(items, pool) / len(pool)).log()

    def _pool(self, present: Tensor) -> Tensor:
        """The distinct items, without padding (0) and a mask token (beyond the catalogue)."""
        pool: Tensor = torch.unique(present[(present >= 1) & (present <= self.n_items)])
        return pool


class AnswerSampler:
    """The answers of the batch, each as often as it is one; others are never drawn.

    Negatives then follow popularity in full. What is taken back is how often an item is an answer at all, and not how
    often it happens to be one in this batch: q is its share of the answers that were observed so far, this batch's
    among them. They are counted in bounded memory, so that q may be a little too large and is never too small.
    """

    def __init__(self, n_items: int) -> None:
        self.n_items = n_items
        self.counted = CountMin(epsilon=np.e / min(MOST_COUNTERS, max(LEAST_COUNTERS, 4 * n_items)), delta=0.01)

    def observe(self, present: Tensor) -> None:
        """Count a batch. Due before negatives are drawn from it."""
        self.counted.add(self._pool(present))

    def draw(self, count: int, generator: torch.Generator, present: Tensor) -> Negatives:
        pool = self._pool(present)
        items = pool[torch.randint(len(pool), (count,), generator=generator)]
        return Negatives(items, self.log_q(items, present))

    def log_q(self, items: Tensor, present: Tensor) -> Tensor:  # noqa: ARG002  # all batches so far count
        return (self.counted.estimate(items).double() / self.counted.total).log().float()

    def _pool(self, present: Tensor) -> Tensor:
        return present[(present >= 1) & (present <= self.n_items)]


LEAST_COUNTERS, MOST_COUNTERS = 1 << 10, 1 << 20  # of a row; there are five, so that at most 42 MB are kept


class MixedSampler:
    """Each draw from the batch with the probability `share`, else from the whole catalogue.

    q is that of the mixture whichever side an item came from: share · q of the batch + (1 - share) / V.
    """

    def __init__(
        self, n_items: int, share: float, candidates: Tensor | None = None, *, batch: Sampler | None = None
    ) -> None:
        """`batch` draws from the batch: by default its distinct items."""
        self.share = share
        self._catalogue, self._batch = UniformSampler(n_items, candidates), batch or InBatchSampler(n_items)

    def draw(self, count: int, generator: torch.Generator, present: Tensor) -> Negatives:
        near = self._batch.draw(count, generator, present).items
        far = self._catalogue.draw(count, generator, present).items
        items = torch.where(torch.rand(count, generator=generator) < self.share, near, far)
        return Negatives(items, self.log_q(items, present))

    def log_q(self, items: Tensor, present: Tensor) -> Tensor:
        near, far = self._batch.log_q(items, present).exp(), self._catalogue.log_q(items, present).exp()
        return (self.share * near + (1 - self.share) * far).log()
