"""Losses that compare targets with sampled negatives, and their settings."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from segue.kinds import NonNegative, Share
from segue.models.similarity.dot import Dot, Similarity
from segue.objective.losses.binary import bce, gbce, gbce_beta
from segue.objective.losses.loss import LossInputs, LossSettings, tensor_of, zero_loss
from segue.objective.losses.pairwise import bpr, bpr_max, top1, top1_max
from segue.objective.losses.softmax import sampled_softmax, shared_softmax
from segue.objective.samplers.collisions import Groups, own_collisions, shared_collisions
from segue.objective.tasks.examples import Examples


@dataclass(frozen=True, slots=True, eq=False)
class SampledQueries:
    """Queries, their targets, and sampled items: [K], which all queries share, or [M, K], those of each query."""

    similarity: Similarity
    queries: Tensor  # [M, Q]
    target_vectors: Tensor  # [M, I]
    vectors: Tensor  # of the sampled items [K, I] or [M, K, I]
    targets: Tensor  # [M]
    items: Tensor  # [K] or [M, K]
    temperature: float = 1.0
    log_q: tuple[Tensor, Tensor] | None = None  # of the targets [M] and of the sampled items
    groups: Groups | None = None

    def scores(self) -> tuple[Tensor, Tensor]:
        """Scores of the targets [M] and of the sampled items [M, K], divided by the temperature, minus log q. Sampled
        items that are no negatives (see `collisions.py`) have -inf."""
        similarity, targets, items = self.similarity, self.targets, self.items
        score = similarity.score if items.dim() == 1 else similarity.own
        if isinstance(similarity, Dot):
            queries = self.queries / self.temperature  # fewer numbers than the scores
            positive, negatives = (queries * self.target_vectors).sum(1), score(queries, self.vectors)
        else:
            positive = similarity.own(self.queries, self.target_vectors[:, None])[:, 0] / self.temperature
            negatives = score(self.queries, self.vectors) / self.temperature
        if self.log_q is not None:
            positive, negatives = positive - self.log_q[0], negatives - self.log_q[1]
        if items.dim() == 1:
            negatives[shared_collisions(targets, items, self.groups).pairs(slice(0, len(targets)))] = -math.inf
            return positive, negatives
        return positive, negatives.masked_fill(own_collisions(targets, items, self.groups), -math.inf)


class SampledLossSettings(LossSettings, frozen=True):
    """Losses that compare a target with sampled negatives.

    Negatives are sampled for the whole batch, the same in all processes; each shard uses those of its queries.
    """

    def __call__(self, inputs: LossInputs) -> Tensor:
        parts, shard, sampler, model = inputs.parts, inputs.shard, inputs.sampler, inputs.model
        assert sampler is not None, "settings refuse a sampled loss without a sampler"
        queries, targets, whole = inputs.queries(), inputs.targets, shard.whole
        present = sampler.observe(torch.from_numpy(whole.inputs.items), torch.from_numpy(whole.targets))
        count = parts.negatives if parts.shared else parts.negatives * len(whole.targets)
        items = sampler.sample(count, inputs.generator, present)
        if not parts.shared:
            items = items.view(-1, parts.negatives)
            items = items if shard.group.size == 1 else items[torch.from_numpy(shard.own_rows)]
        vectors = model.item_vectors(items.flatten().to(queries.device))
        target_vectors = model.item_vectors(targets)
        loss = zero_loss(queries)
        if len(targets):
            log_q = None
            if isinstance(self, SampledSoftmaxSettings) and self.log_q:
                own, others = (sampler.log_q(some, present) for some in (torch.from_numpy(shard.own.targets), items))
                log_q = own.to(queries.device), others.to(queries.device)
            sampled = SampledQueries(
                similarity=model.similarity,
                queries=queries,
                target_vectors=target_vectors,
                vectors=vectors.view(*items.shape, -1),
                targets=targets,
                items=items.to(queries.device),
                temperature=parts.temperature,
                log_q=log_q,
                groups=_groups(shard.own, targets),
            )
            loss = inputs.shared(self.mean(sampled, inputs))
        return inputs.with_extra(loss, queries, target_vectors)

    def mean(self, sampled: SampledQueries, inputs: LossInputs) -> Tensor:
        """The mean loss of the shard's queries."""
        raise NotImplementedError


def _groups(examples: Examples, targets: Tensor) -> Groups | None:
    """`groups` of `collisions.py`."""
    if examples.own is not None:
        owners, items = (tensor_of(array, targets) for array in examples.own)
        return Groups(tensor_of(examples.users, targets), owners, items)
    if examples.grouped and examples.positions is not None:
        rows = tensor_of(examples.positions, targets)
        return Groups(rows, rows, targets)
    return None


class SampledSoftmaxSettings(SampledLossSettings, frozen=True, tag="sampled-softmax"):
    """Cross-entropy of the softmax over the target and its negatives."""

    log_q: bool = True
    """Whether scores are corrected by the log-probability with which an item is sampled."""

    def mean(self, sampled: SampledQueries, inputs: LossInputs) -> Tensor:
        if not inputs.parts.shared or not isinstance(sampled.similarity, Dot):
            return sampled_softmax(*sampled.scores(), inputs.weights)
        collisions = shared_collisions(sampled.targets, sampled.items, sampled.groups)
        queries, vectors = sampled.queries / sampled.temperature, (sampled.target_vectors, sampled.vectors)
        return shared_softmax(queries, *vectors, collisions, inputs.weights, log_q=sampled.log_q)


class BCESettings(SampledLossSettings, frozen=True, tag="bce"):
    """Binary cross-entropy."""

    offset: float = 0.0
    """Added to every score; log(1 / negatives) if there are many negatives. Almost every score must then be far below
    0, and without the offset a model first learns to reject every item and hardly recovers."""

    def mean(self, sampled: SampledQueries, inputs: LossInputs) -> Tensor:
        positive, negatives = sampled.scores()
        return bce(positive + self.offset, negatives + self.offset, inputs.weights)


class GBCESettings(BCESettings, frozen=True, tag="gbce"):
    """Generalised binary cross-entropy (gSASRec), which corrects the overconfidence of sampled negatives."""

    calibration: Share = 0.75
    """How much of the overconfidence is corrected: 0 is `bce`, 1 all of it."""

    def mean(self, sampled: SampledQueries, inputs: LossInputs) -> Tensor:
        beta = gbce_beta(inputs.parts.n_candidates, inputs.parts.negatives, self.calibration)
        positive, negatives = sampled.scores()
        return gbce(positive + self.offset, negatives + self.offset, beta, inputs.weights)


class BPRSettings(SampledLossSettings, frozen=True, tag="bpr"):
    """Bayesian personalised ranking."""

    def mean(self, sampled: SampledQueries, inputs: LossInputs) -> Tensor:
        return bpr(*sampled.scores(), inputs.weights)


class BPRMaxSettings(SampledLossSettings, frozen=True, tag="bpr-max"):
    """BPR against the hardest negatives (GRU4Rec's second paper)."""

    regularisation: NonNegative = 0.0
    """Weight of the negatives' squared scores."""

    def mean(self, sampled: SampledQueries, inputs: LossInputs) -> Tensor:
        return bpr_max(*sampled.scores(), self.regularisation, inputs.weights)


class TOP1Settings(SampledLossSettings, frozen=True, tag="top1"):
    """TOP1 (GRU4Rec's first paper)."""

    def mean(self, sampled: SampledQueries, inputs: LossInputs) -> Tensor:
        return top1(*sampled.scores(), inputs.weights)


class TOP1MaxSettings(SampledLossSettings, frozen=True, tag="top1-max"):
    """TOP1 against the hardest negatives."""

    def mean(self, sampled: SampledQueries, inputs: LossInputs) -> Tensor:
        return top1_max(*sampled.scores(), inputs.weights)
