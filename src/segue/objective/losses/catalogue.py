"""Losses over all candidates: the full softmax, scalable cross-entropy and LambdaRank."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from segue.kinds import Count
from segue.models.items.coded import CodeTable
from segue.models.similarity.dot import Dot
from segue.objective.losses.lambdarank import lambdarank
from segue.objective.losses.loss import LossInputs, LossSettings, tensor_of, zero_loss
from segue.objective.losses.sce import ITEMS, sce
from segue.objective.losses.softmax import coded_softmax, full_softmax
from segue.objective.tasks.examples import Examples

LEAST_CODED = 10_000  # with this many candidates, sums over codes are faster than products with vectors


class SoftmaxSettings(LossSettings, frozen=True, tag="softmax"):
    """Cross-entropy of the softmax over the whole catalogue."""

    def __call__(self, inputs: LossInputs) -> Tensor:
        states, items = _tempered(inputs), inputs.model.items
        if not len(inputs.targets):
            return zero_loss(states)
        if not isinstance(items, CodeTable) or inputs.parts.n_candidates < LEAST_CODED:
            vectors, columns = _candidates(inputs)
            members = inputs.model.members
            shares = zip(states.chunk(members, dim=1), vectors.chunk(members, dim=1), strict=True)
            losses = [
                full_softmax(queries.contiguous(), own.contiguous(), columns, inputs.weights) for queries, own in shares
            ]
            return inputs.shared(torch.stack(losses).mean() if members > 1 else losses[0])
        numbers, similarity = inputs.parts.candidates, inputs.model.similarity
        candidates = torch.arange(1, items.n_items + 1) if numbers is None else numbers
        candidates = candidates.to(states.device)
        columns = torch.searchsorted(candidates, inputs.targets)
        lengths = items.lengths(candidates) if isinstance(similarity, Dot) and similarity.normal else None
        tables, rows = items.tables(states), items.code_rows(candidates)
        return inputs.shared(coded_softmax(tables, rows, columns, inputs.weights, lengths=lengths))


class SCESettings(LossSettings, frozen=True, tag="sce"):
    """Scalable cross-entropy: the softmax over buckets of the hardest items."""

    whole_batch: ClassVar[bool] = True

    bucket_items: Count = ITEMS
    """Items of a bucket."""

    def __call__(self, inputs: LossInputs) -> Tensor:
        states = _tempered(inputs)
        if not len(inputs.targets):
            return zero_loss(states)
        vectors, columns = _candidates(inputs)
        return sce(states, vectors, columns, inputs.weights, generator=inputs.generator, items=self.bucket_items)


class LambdaRankSettings(LossSettings, frozen=True, tag="lambdarank"):
    """LambdaRank over the whole catalogue, for tasks with few states and several targets each."""

    def __call__(self, inputs: LossInputs) -> Tensor:
        positions = inputs.shard.own.positions
        assert positions is not None, "settings allow it only with a task that queries some of the states"
        _, first, owners = np.unique(positions, return_index=True, return_inverse=True)
        queries = inputs.queries(inputs.states[tensor_of(first, inputs.states)])
        rows, targets = tensor_of(owners, queries), inputs.targets
        loss = zero_loss(queries)
        if len(targets):
            vectors, columns = _candidates(inputs)
            scores = inputs.model.similarity.score(queries, vectors) / inputs.parts.temperature
            loss = inputs.shared(lambdarank(scores, rows, columns))
        return inputs.with_extra(loss, queries[rows], inputs.model.item_vectors(targets))

    def weight(self, examples: Examples) -> float:
        assert examples.positions is not None
        return len(np.unique(examples.positions))


def _tempered(inputs: LossInputs) -> Tensor:
    assert isinstance(inputs.model.similarity, Dot), "settings allow these losses only with inner products"
    queries, temperature = inputs.queries(), inputs.parts.temperature
    return queries if temperature == 1 else queries / temperature


def _candidates(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """The vectors of all candidates [C, I], and the targets' indices among them [M]."""
    targets, candidates = inputs.targets, inputs.parts.candidates
    if candidates is None:
        return inputs.model.item_vectors()[1:], targets - 1
    candidates = candidates.to(targets.device)
    return inputs.model.item_vectors(candidates), torch.searchsorted(candidates, targets)
