"""Pairwise losses: functions of the difference between the target's score and each negative's."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn.functional import logsigmoid

from segue.objective.losses.mean import weighted_mean


def bpr(positive: Tensor, negatives: Tensor, weights: Tensor | None = None) -> Tensor:
    """Bayesian personalised ranking: the mean over a row's negatives of -log σ(s+ - s-), weighted mean over the rows.

    Rendle and others 2009. A row's mean leaves out collisions; if all negatives collide, the loss is 0.

    Needs: a sampler; scores without log q.
    Inputs: scores of the targets [M] and of the negatives [M, K] with collisions at -inf, weights [M].
    When to choose it: few negatives. With many, most already score below the target and have almost no gradient, which
    `bpr_max` corrects.
    Relations: one negative is `sampled_softmax` with one negative.
    """
    real = (negatives != -math.inf).sum(1).clamp(min=1)
    return weighted_mean(-logsigmoid(positive[:, None] - negatives).sum(1) / real, weights)


def bpr_max(positive: Tensor, negatives: Tensor, regularisation: float = 0.0, weights: Tensor | None = None) -> Tensor:
    """BPR against the hardest negative, softly: -log Σ p σ(s+ - s-) + regularisation · Σ p s-², where p is the softmax
    of a row's negatives; weighted mean over the rows.

    GRU4Rec's second paper (Hidasi and Karatzoglou 2018). If all negatives of a row collide, its loss is 0.

    Needs: a sampler; scores without log q, because p and the regularisation are functions of the model's own scores.
    Inputs: scores of the targets [M] and of the negatives [M, K] with collisions at -inf, weights [M].
    When to choose it: hundreds to thousands of negatives, session data; regularisation near 1 keeps scores small.
    Relations: one negative and no regularisation is `bpr`.
    """
    p, scores, empty = _hardness(negatives)
    log_wins = (p.log_softmax(1) + logsigmoid(positive[:, None] - scores)).logsumexp(1)
    size = (p.softmax(1) * scores.square()).sum(1)
    return weighted_mean((regularisation * size - log_wins).masked_fill(empty, 0), weights)


def top1(positive: Tensor, negatives: Tensor, weights: Tensor | None = None) -> Tensor:
    """TOP1: the mean over a row's negatives of σ(s- - s+) + σ(s-²), weighted mean over the rows.

    GRU4Rec's first paper (Hidasi and others 2016). Its code counts the target as a negative and subtracts that
    term again; here it is not counted. A row's mean leaves out collisions; if all negatives collide, the loss is 0.

    Needs: a sampler; scores without log q.
    Inputs: scores of the targets [M] and of the negatives [M, K] with collisions at -inf, weights [M].
    When to choose it: to reproduce GRU4Rec. With many negatives `top1_max` is better, as `bpr_max` is than `bpr`.
    Relations: one negative is `top1_max` with one negative.
    """
    collides = negatives == -math.inf
    scores = negatives.masked_fill(collides, 0)  # σ((-∞)²) is 1, with a NaN gradient
    terms = ((scores - positive[:, None]).sigmoid() + scores.square().sigmoid()).masked_fill(collides, 0)
    return weighted_mean(terms.sum(1) / (~collides).sum(1).clamp(min=1), weights)


def top1_max(positive: Tensor, negatives: Tensor, weights: Tensor | None = None) -> Tensor:
    """TOP1 against the hardest negative, softly: Σ p (σ(s- - s+) + σ(s-²)), where p is the softmax of a row's
    negatives; weighted mean over the rows.

    GRU4Rec's second paper, as `bpr_max`. If all negatives of a row collide, its loss is 0.

    Needs: a sampler; scores without log q.
    Inputs: scores of the targets [M] and of the negatives [M, K] with collisions at -inf, weights [M].
    When to choose it: to reproduce GRU4Rec; its gradient vanishes if the target scores far below the negatives, that of
    `bpr_max` does not.
    Relations: one negative is `top1`. The second term keeps negatives near 0, like the regularisation of `bpr_max`.
    """
    p, scores, empty = _hardness(negatives)
    terms = (scores - positive[:, None]).sigmoid() + scores.square().sigmoid()
    return weighted_mean((p.softmax(1) * terms).sum(1).masked_fill(empty, 0), weights)


def _hardness(negatives: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of p, finite scores, and the rows without a negative.

    The softmax of a row of -inf is NaN, and so is 0 · ∞: such scores are replaced by 0 and have no effect on the loss.
    """
    collides = negatives == -math.inf
    empty = collides.all(1)
    return negatives.masked_fill(empty[:, None], 0), negatives.masked_fill(collides, 0), empty
