"""Pairwise losses: by how much does the answer beat its negatives."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn.functional import logsigmoid

from segue.objective.losses.mean import weighted_mean


def bpr(positive: Tensor, negatives: Tensor, weights: Tensor | None = None) -> Tensor:
    """Bayesian personalised ranking: the mean over a row's negatives of -log σ(s+ - s-), weighted mean over the rows.

    Rendle and others 2009. Collisions are not counted in a row's mean; a row that has nothing else costs nothing.

    Needs: a sampler; scores without log q.
    Inputs: the answers' scores [M], the negatives' [M, K] with collisions at -inf, weights [M].
    When to choose it: few negatives and only the order matters; with many, most of them are beaten already and teach
    nothing, which `bpr_max` repairs.
    Relations: one negative is `sampled_softmax` with one negative.
    """
    real = (negatives != -math.inf).sum(1).clamp(min=1)
    return weighted_mean(-logsigmoid(positive[:, None] - negatives).sum(1) / real, weights)


def bpr_max(positive: Tensor, negatives: Tensor, regularisation: float = 0.0, weights: Tensor | None = None) -> Tensor:
    """BPR against the hardest negative, softly: -log Σ p σ(s+ - s-) + regularisation · Σ p s-², where p is the softmax
    of a row's negatives; weighted mean over the rows.

    GRU4Rec's second paper (Hidasi and Karatzoglou 2018). A row where everything collides costs nothing.

    Needs: a sampler; scores without log q, which p and the regularisation would take for the model's.
    Inputs: the answers' scores [M], the negatives' [M, K] with collisions at -inf, weights [M].
    When to choose it: hundreds to thousands of negatives, session data; regularisation near 1 keeps scores small.
    Relations: one negative and no regularisation is `bpr`.
    """
    p, scores, empty = _hardness(negatives)
    beaten = (p.log_softmax(1) + logsigmoid(positive[:, None] - scores)).logsumexp(1)
    size = (p.softmax(1) * scores.square()).sum(1)
    return weighted_mean((regularisation * size - beaten).masked_fill(empty, 0), weights)


def top1(positive: Tensor, negatives: Tensor, weights: Tensor | None = None) -> Tensor:
    """TOP1: the mean over a row's negatives of σ(s- - s+) + σ(s-²), weighted mean over the rows.

    GRU4Rec's first paper (Hidasi and others 2016). Its program takes the answer for one of its own negatives and takes
    that back; here it is none. Collisions are not counted in a row's mean; a row that has nothing else costs nothing.

    Needs: a sampler; scores without log q.
    Inputs: the answers' scores [M], the negatives' [M, K] with collisions at -inf, weights [M].
    When to choose it: to reproduce GRU4Rec; with many negatives, most of them are beaten already and teach nothing,
    which `top1_max` repairs.
    Relations: one negative is `top1_max` with one negative.
    """
    collides = negatives == -math.inf
    scores = negatives.masked_fill(collides, 0)  # (-∞)² would cost one, and its gradient be NaN
    terms = ((scores - positive[:, None]).sigmoid() + scores.square().sigmoid()).masked_fill(collides, 0)
    return weighted_mean(terms.sum(1) / (~collides).sum(1).clamp(min=1), weights)


def top1_max(positive: Tensor, negatives: Tensor, weights: Tensor | None = None) -> Tensor:
    """TOP1 against the hardest negative, softly: Σ p (σ(s- - s+) + σ(s-²)), where p is the softmax of a row's
    negatives; weighted mean over the rows.

    GRU4Rec's second paper, as `bpr_max`. A row where everything collides costs nothing.

    Needs: a sampler; scores without log q.
    Inputs: the answers' scores [M], the negatives' [M, K] with collisions at -inf, weights [M].
    When to choose it: to reproduce GRU4Rec; `bpr_max` is better behaved, as this one is flat where the answer is far
    behind.
    Relations: one negative is `top1`. The second term holds the negatives near 0, as the regularisation of `bpr_max`
    does.
    """
    p, scores, empty = _hardness(negatives)
    terms = (scores - positive[:, None]).sigmoid() + scores.square().sigmoid()
    return weighted_mean((p.softmax(1) * terms).sum(1).masked_fill(empty, 0), weights)


def _hardness(negatives: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of p, scores that are finite everywhere, and the rows without a negative.

    A softmax of nothing is NaN, and so is 0 · ∞: where a number would be infinite it is 0 instead, and has no say.
    """
    collides = negatives == -math.inf
    empty = collides.all(1)
    return negatives.masked_fill(empty[:, None], 0), negatives.masked_fill(collides, 0), empty
