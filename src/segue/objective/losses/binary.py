"""Binary cross-entropy: the target and each negative are classified on their own, as target or not."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn.functional import logsigmoid

from segue.objective.losses.mean import weighted_mean


def gbce(positive: Tensor, negatives: Tensor, beta: float, weights: Tensor | None = None) -> Tensor:
    """Generalised binary cross-entropy: -(β log σ(s+) + Σ log(1 - σ(s-))) / (K + 1), weighted mean over the rows.

    gSASRec (Petrov and Macdonald 2023). With only K sampled negatives, plain binary cross-entropy sees too few
    negatives and is overconfident in high scores; β < 1 corrects that.

    Needs: a sampler, best a uniform one, which `gbce_beta` assumes; scores without log q.
    Inputs: scores of the targets [M] and of the negatives [M, K] with collisions at -inf, weights [M]. K counts a row's
    negatives without its collisions; if all collide, only the target's term is left.
    When to choose it: many negatives (256) and calibrated probabilities, or a catalogue too large for `full_softmax`.
    Relations: β = 1 is `bce`.
    """
    terms = (negatives != -math.inf).sum(1) + 1
    log_negatives = logsigmoid(-negatives).sum(1)
    return weighted_mean(-(beta * logsigmoid(positive) + log_negatives) / terms, weights)


def bce(positive: Tensor, negatives: Tensor, weights: Tensor | None = None) -> Tensor:
    """Binary cross-entropy: -(log σ(s+) + Σ log(1 - σ(s-))) / (K + 1), weighted mean over the rows.

    SASRec as published (Kang and McAuley 2018); there with one negative and the sum of both terms, twice this value.

    Needs: a sampler; scores without log q.
    Inputs: as `gbce`.
    When to choose it: to reproduce the paper; every other loss here ranks better.
    Relations: `gbce` with β = 1, which is its calibration t = 0.
    """
    return gbce(positive, negatives, 1.0, weights)


def gbce_beta(n_items: int, negatives: int, t: float) -> float:
    """β for `gbce`: 1 at t = 0, the sampling rate of negatives at t = 1, linear in between."""
    rate = min(1.0, negatives / (n_items - 1))
    return 1 - t * (1 - rate)
