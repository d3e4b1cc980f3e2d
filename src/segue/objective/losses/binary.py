"""Binary cross-entropy: is this item the answer, yes or no, asked of the answer and of each negative."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn.functional import logsigmoid

from segue.objective.losses.mean import weighted_mean


def gbce(positive: Tensor, negatives: Tensor, beta: float, weights: Tensor | None = None) -> Tensor:
    """Generalised binary cross-entropy: -(β log σ(s+) + Σ log(1 - σ(s-))) / (K + 1), weighted mean over the rows.

    gSASRec (Petrov and Macdonald 2023). Drawing K of the items makes every negative rarer than it is, so that plain
    binary cross-entropy is too sure of what it likes; β < 1 takes that back.

    Needs: a sampler, best a uniform one, which is what β from `gbce_beta` reckons with; scores without log q.
    Inputs: the answers' scores [M], the negatives' [M, K] with collisions at -inf, weights [M]. K counts a row's
    negatives without its collisions; a row that has no others keeps the answer's term.
    When to choose it: many negatives (256) and probabilities that are to mean something, or a catalogue too large for
    `full_softmax`.
    Relations: β = 1 is `bce`.
    """
    asked = (negatives != -math.inf).sum(1) + 1
    unlikely = logsigmoid(-negatives).sum(1)
    return weighted_mean(-(beta * logsigmoid(positive) + unlikely) / asked, weights)


def bce(positive: Tensor, negatives: Tensor, weights: Tensor | None = None) -> Tensor:
    """Binary cross-entropy: -(log σ(s+) + Σ log(1 - σ(s-))) / (K + 1), weighted mean over the rows.

    SASRec as it was published (Kang and McAuley 2018), there with one negative and the sum of both terms, twice this.

    Needs: a sampler; scores without log q.
    Inputs: as `gbce`.
    When to choose it: to reproduce 2018; every other loss here ranks better.
    Relations: `gbce` with β = 1, which is its calibration t = 0.
    """
    return gbce(positive, negatives, 1.0, weights)


def gbce_beta(n_items: int, negatives: int, t: float) -> float:
    """β for `gbce`: 1 at t = 0, the share of the other items that is drawn at t = 1, straight in between."""
    drawn = min(1.0, negatives / (n_items - 1))
    return 1 - t * (1 - drawn)
