"""The inputs of every loss, and the interface of its settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from segue.kinds import Kind
from segue.models.sequence import SequenceModel
from segue.models.similarity.dot import Dot
from segue.objective.batch_shard import BatchShard
from segue.objective.samplers.samplers import Sampler
from segue.objective.tasks.examples import Examples


@dataclass(frozen=True, slots=True, eq=False)
class LossParts:
    """The settings and candidates of a loss."""

    n_items: int
    candidates: Tensor | None  # [C] int64 item numbers, ascending; None: all items
    negatives: int
    shared: bool
    temperature: float

    @property
    def n_candidates(self) -> int:
        return self.n_items if self.candidates is None else len(self.candidates)


@dataclass(frozen=True, slots=True, eq=False)
class LossInputs:
    """The states of the queries, with their targets and weights."""

    parts: LossParts
    model: SequenceModel
    states: Tensor  # [m, D]
    weights: Tensor | None  # [m]; None: equal
    shard: BatchShard
    share: float
    """Weight of the shard's queries in the mean over all."""
    generator: torch.Generator
    sampler: Sampler | None = None

    @property
    def targets(self) -> Tensor:
        """Item numbers [m]."""
        return tensor_of(self.shard.own.targets, self.states)

    def queries(self, states: Tensor | None = None) -> Tensor:
        """The queries [., Q] of the states, or of other ones, divided by the similarity's learned temperature."""
        queries = self.model.head(self.states if states is None else states)
        similarity = self.model.similarity
        return similarity.tempered(queries) if isinstance(similarity, Dot) else queries

    def shared(self, mean: Tensor) -> Tensor:
        """A mean over the shard's queries → its share of the mean over all."""
        return mean if self.share == 1 else mean * self.share

    def with_extra(self, loss: Tensor, queries: Tensor, targets: Tensor) -> Tensor:
        """The loss plus the similarity's extra loss for all queries and their targets' vectors."""
        similarity, shard = self.model.similarity, self.shard
        if shard.group.size > 1 and not isinstance(similarity, Dot):
            queries = shard.gather(queries)
            targets = self.model.item_vectors(tensor_of(shard.whole.targets, queries))
        extra = similarity.extra_loss(queries, targets)
        return loss if extra is None else loss + extra / shard.group.size


class LossSettings(Kind, frozen=True):
    """A loss with its settings."""

    whole_batch: ClassVar[bool] = False
    """Whether the loss of a query depends on the states of all other queries."""

    def __call__(self, inputs: LossInputs) -> Tensor:
        """The shard's share of a batch's mean loss."""
        raise NotImplementedError

    def weight(self, examples: Examples) -> float:
        """Weight of the mean over these examples in a mean over several batches."""
        return len(examples.targets) if examples.weights is None else float(examples.weights.sum())


def tensor_of(array: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(array).to(like.device)


def zero_loss(states: Tensor) -> Tensor:
    """The loss of a process without queries in this batch: all of its parameters still get gradients, of 0."""
    return states.sum() * 0
