"""Losses that compare targets with sampled negatives, and their settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from segue.kinds import NonNegative, Share
from segue.models.similarity.dot import Dot
from segue.objective.losses.binary import bce, gbce, gbce_beta
from segue.objective.losses.loss import Loss, LossInputs, LossParts, LossSettings, tensor_of, zero_loss
from segue.objective.losses.pairwise import bpr, bpr_max, top1, top1_max
from segue.objective.losses.scores import own_scores, shared_scores
from segue.objective.losses.softmax import sampled_softmax, shared_softmax
from segue.objective.samplers.collisions import Own, shared_collisions
from segue.objective.tasks.examples import Examples

Compare = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Scores of the targets [M] and negatives [M, K], collisions at -inf, and weights [M] → the weighted mean loss."""


class SampledLossSettings(LossSettings, frozen=True):
    """Losses that compare a target with sampled negatives."""

    def loss(self, parts: LossParts) -> Loss:
        return SampledLoss(parts, self.compare(parts))

    def compare(self, parts: LossParts) -> Compare:
        raise NotImplementedError


class SampledSoftmaxSettings(SampledLossSettings, frozen=True, tag="sampled-softmax"):
    """Cross-entropy of the softmax over the target and its negatives."""

    log_q: bool = True
    """Whether scores are corrected by the log-probability with which an item is sampled."""

    def loss(self, parts: LossParts) -> Loss:
        return SampledLoss(parts, sampled_softmax, log_q=self.log_q, fused=True)


class BCESettings(SampledLossSettings, frozen=True, tag="bce"):
    """Binary cross-entropy."""

    offset: float = 0.0
    """Added to every score; log(1 / negatives) if there are many negatives. Almost every score must then be far below
    0, and without the offset a model first learns to reject every item and hardly recovers."""

    def compare(self, parts: LossParts) -> Compare:  # noqa: ARG002
        return lambda positive, negatives, weights: bce(positive + self.offset, negatives + self.offset, weights)


class GBCESettings(BCESettings, frozen=True, tag="gbce"):
    """Generalised binary cross-entropy (gSASRec), which corrects the overconfidence of sampled negatives."""

    calibration: Share = 0.75
    """How much of the overconfidence is corrected: 0 is `bce`, 1 all of it."""

    def compare(self, parts: LossParts) -> Compare:
        beta = gbce_beta(parts.n_candidates, parts.negatives, self.calibration)
        return lambda positive, negatives, weights: gbce(positive + self.offset, negatives + self.offset, beta, weights)


class BPRSettings(SampledLossSettings, frozen=True, tag="bpr"):
    """Bayesian personalised ranking."""

    def compare(self, parts: LossParts) -> Compare:  # noqa: ARG002
        return bpr


class BPRMaxSettings(SampledLossSettings, frozen=True, tag="bpr-max"):
    """BPR against the hardest negatives (GRU4Rec's second paper)."""

    regularisation: NonNegative = 0.0
    """Weight of the negatives' squared scores."""

    def compare(self, parts: LossParts) -> Compare:  # noqa: ARG002
        return lambda positive, negatives, weights: bpr_max(positive, negatives, self.regularisation, weights)


class TOP1Settings(SampledLossSettings, frozen=True, tag="top1"):
    """TOP1 (GRU4Rec's first paper)."""

    def compare(self, parts: LossParts) -> Compare:  # noqa: ARG002
        return top1


class TOP1MaxSettings(SampledLossSettings, frozen=True, tag="top1-max"):
    """TOP1 against the hardest negatives."""

    def compare(self, parts: LossParts) -> Compare:  # noqa: ARG002
        return top1_max


@dataclass(frozen=True, slots=True, eq=False)
class SampledLoss:
    """Samples negatives for the whole batch, the same in all processes; each shard uses those of its queries."""

    parts: LossParts
    compare: Compare
    log_q: bool = False
    fused: bool = False
    """Whether `shared_softmax` is used if negatives are shared and scores are inner products."""

    def __call__(self, inputs: LossInputs) -> Tensor:
        parts, shard, sampler = self.parts, inputs.shard, inputs.sampler
        assert sampler is not None, "settings refuse a sampled loss without a sampler"
        queries, targets, model = inputs.queries(), inputs.targets, inputs.model
        whole = shard.whole
        present = sampler.observe(torch.from_numpy(whole.inputs.items), torch.from_numpy(whole.targets))
        count = parts.negatives if parts.shared else parts.negatives * len(whole.targets)
        sample = sampler.sample(count, inputs.generator, present)
        if not parts.shared and shard.group.size > 1:
            sample = sample.rows(torch.from_numpy(shard.own_rows), parts.negatives)
        vectors, target_vectors = model.item_vectors(sample.items.to(queries.device)), model.item_vectors(targets)
        loss = zero_loss(queries)
        if len(targets):
            log_q = None
            if self.log_q:
                target_log_q = sampler.log_q(torch.from_numpy(shard.own.targets), present)
                log_q = target_log_q.to(queries.device), sample.log_q.to(queries.device)
            items = sample.items.to(queries.device)
            loss = inputs.shared(self._mean(inputs, queries, targets, target_vectors, items, vectors, log_q))
        return inputs.with_extra(loss, queries, target_vectors)

    def _mean(
        self,
        inputs: LossInputs,
        queries: Tensor,
        targets: Tensor,
        target_vectors: Tensor,
        items: Tensor,
        vectors: Tensor,
        log_q: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """The mean loss of the shard's queries; `items` and `vectors` are those of the negatives."""
        parts, similarity = self.parts, inputs.model.similarity
        groups, own = _groups(inputs.shard.own, targets)
        if self.fused and parts.shared and isinstance(similarity, Dot):
            collisions, queries = shared_collisions(targets, items, groups, own), queries / parts.temperature
            return shared_softmax(queries, target_vectors, vectors, collisions, inputs.weights, log_q=log_q)
        scores = shared_scores
        if not parts.shared:
            rows = len(targets), parts.negatives
            items, vectors, scores = items.view(rows), vectors.view(*rows, -1), own_scores
            log_q = None if log_q is None else (log_q[0], log_q[1].view(rows))
        positive, negatives = scores(
            similarity,
            queries,
            target_vectors,
            vectors,
            targets,
            items,
            temperature=parts.temperature,
            log_q=log_q,
            groups=groups,
            own=own,
        )
        return self.compare(positive, negatives, inputs.weights)


def _groups(examples: Examples, like: Tensor) -> tuple[Tensor | None, Own | None]:
    """`groups` and `own` of `collisions.py`."""
    if examples.own is not None:
        users, items = examples.own
        return tensor_of(examples.users, like), (tensor_of(users, like), tensor_of(items, like))
    if examples.grouped and examples.positions is not None:
        return tensor_of(examples.positions, like), None
    return None, None
