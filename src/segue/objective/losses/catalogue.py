"""Losses over all candidates: the full softmax, scalable cross-entropy and LambdaRank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from segue.kinds import Count
from segue.models.items.coded import CodeTable
from segue.models.sequence import SequenceModel
from segue.models.similarity.dot import Dot
from segue.objective.losses.lambdarank import lambdarank
from segue.objective.losses.loss import Loss, LossInputs, LossParts, LossSettings, tensor_of, zero_loss
from segue.objective.losses.sce import ITEMS, sce
from segue.objective.losses.softmax import coded_softmax, full_softmax
from segue.objective.tasks.examples import Examples

LEAST_CODED = 10_000  # with this many candidates, sums over codes are faster than products with vectors


class SoftmaxSettings(LossSettings, frozen=True, tag="softmax"):
    """Cross-entropy of the softmax over the whole catalogue."""

    def loss(self, parts: LossParts) -> Loss:
        return _FullSoftmax(parts)


class SCESettings(LossSettings, frozen=True, tag="sce"):
    """Scalable cross-entropy: the softmax over buckets of the hardest items."""

    whole_batch: ClassVar[bool] = True

    bucket_items: Count = ITEMS
    """Items of a bucket."""

    def loss(self, parts: LossParts) -> Loss:
        return _ScalableCrossEntropy(parts, self.bucket_items)


class LambdaRankSettings(LossSettings, frozen=True, tag="lambdarank"):
    """LambdaRank over the whole catalogue, for tasks with few states and several targets each."""

    def loss(self, parts: LossParts) -> Loss:
        return _LambdaRank(parts)

    def weight(self, examples: Examples) -> float:
        assert examples.positions is not None
        return len(np.unique(examples.positions))


@dataclass(frozen=True, slots=True, eq=False)
class _FullSoftmax:
    parts: LossParts

    def __call__(self, inputs: LossInputs) -> Tensor:
        states, targets, items = _tempered(inputs, self.parts), inputs.targets, inputs.model.items
        if not len(targets):
            return zero_loss(states)
        if isinstance(items, CodeTable) and self.parts.n_candidates >= LEAST_CODED:
            return inputs.shared(self._coded(items, states, targets, inputs))
        vectors, columns = _candidates(inputs.model, targets, self.parts)
        return inputs.shared(full_softmax(states, vectors, columns, inputs.weights))

    def _coded(self, items: CodeTable, states: Tensor, targets: Tensor, inputs: LossInputs) -> Tensor:
        """The full softmax without any item's vector."""
        candidates, columns = torch.arange(1, items.n_items + 1, device=states.device), targets - 1
        if self.parts.candidates is not None:
            candidates = self.parts.candidates.to(states.device)
            columns = torch.searchsorted(candidates, targets)
        similarity = inputs.model.similarity
        assert isinstance(similarity, Dot)
        lengths = items.lengths(candidates) if similarity.normal else None
        return coded_softmax(items.tables(states), items.places(candidates), columns, inputs.weights, lengths=lengths)


@dataclass(frozen=True, slots=True, eq=False)
class _ScalableCrossEntropy:
    parts: LossParts
    bucket_items: int

    def __call__(self, inputs: LossInputs) -> Tensor:
        states, targets = _tempered(inputs, self.parts), inputs.targets
        if not len(targets):
            return zero_loss(states)
        vectors, columns = _candidates(inputs.model, targets, self.parts)
        return sce(states, vectors, columns, inputs.weights, generator=inputs.generator, items=self.bucket_items)


@dataclass(frozen=True, slots=True, eq=False)
class _LambdaRank:
    parts: LossParts

    def __call__(self, inputs: LossInputs) -> Tensor:
        positions = inputs.shard.own.positions
        assert positions is not None, "settings allow it only with a task that queries some of the states"
        _, first, owners = np.unique(positions, return_index=True, return_inverse=True)
        queries = inputs.queries(inputs.states[tensor_of(first, inputs.states)])
        rows, targets = tensor_of(owners, queries), inputs.targets
        loss = zero_loss(queries)
        if len(targets):
            vectors, columns = _candidates(inputs.model, targets, self.parts)
            scores = inputs.model.similarity.score(queries, vectors) / self.parts.temperature
            loss = inputs.shared(lambdarank(scores, rows, columns))
        return inputs.with_extra(loss, queries[rows], inputs.model.item_vectors(targets))


def _tempered(inputs: LossInputs, parts: LossParts) -> Tensor:
    assert isinstance(inputs.model.similarity, Dot), "settings allow these losses only with inner products"
    queries = inputs.queries()
    return queries if parts.temperature == 1 else queries / parts.temperature


def _candidates(model: SequenceModel, targets: Tensor, parts: LossParts) -> tuple[Tensor, Tensor]:
    """The vectors of all candidates [C, I], and the targets' indices among them [M]."""
    if parts.candidates is None:
        return model.item_vectors()[1:], targets - 1
    candidates = parts.candidates.to(targets.device)
    return model.item_vectors(candidates), torch.searchsorted(candidates, targets)
