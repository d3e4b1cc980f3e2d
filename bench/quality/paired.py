"""Metrics of several seeds over the same users → means, differences and relative losses, with intervals.

Values are averaged over the seeds first, user by user; then users are resampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from segue.evaluation.metrics import TAILS, Difference, Totals, differences, intervals, resampled_means, user_totals

SAMPLES = 2000
NAME = "value"

Verdict = Literal["as in the paper", "against the paper", "undecided"]


def averaged(seeds: Sequence[np.ndarray]) -> np.ndarray:
    """The mean of several trainings, case by case [C]."""
    return np.asarray(np.mean(np.stack(seeds), axis=0))


def mean_interval(values: np.ndarray, users: np.ndarray) -> tuple[float, float]:
    """95 % of the mean of the cases, users resampled."""
    return intervals(user_totals({NAME: values}, users), samples=SAMPLES, rng=_rng())[NAME]


def difference(ours: np.ndarray, theirs: np.ndarray, users: np.ndarray) -> Difference:
    """Ours minus theirs over the same cases."""
    sides = [user_totals({NAME: values}, users) for values in (ours, theirs)]
    return differences(*sides, samples=SAMPLES, rng=_rng())[NAME]


def difference_of_losses(
    ours: tuple[np.ndarray, np.ndarray], theirs: tuple[np.ndarray, np.ndarray], users: np.ndarray
) -> Difference:
    """How much more of its mean one side loses than the other, each from its first values to its second.

    Relative losses are ratios of means, so all four means are taken of the same resampled users.
    """
    columns = dict(zip(("our first", "our second", "their first", "their second"), (*ours, *theirs), strict=True))
    totals = user_totals(columns, users)
    whole = Totals(totals.names, totals.sums.sum(axis=0, keepdims=True), totals.cases.sum(keepdims=True))
    value = float(_loss_differences(whole.sums / whole.cases[:, None])[0])
    resampled = _loss_differences(resampled_means(totals, samples=SAMPLES, rng=_rng()))
    low, high = np.percentile(resampled, TAILS)
    tail = min(int((resampled <= 0).sum()), int((resampled >= 0).sum()))
    return Difference(value, float(low), float(high), min(1.0, 2 * (1 + tail) / (1 + SAMPLES)))


def _loss_differences(means: np.ndarray) -> np.ndarray:
    """(our first, our second, their first, their second) [S, 4] → our relative loss minus theirs [S]."""
    return np.asarray(means[:, 3] / means[:, 2] - means[:, 1] / means[:, 0])


def verdict(change: Difference, *, paper: Literal["more", "less"]) -> Verdict:
    """Whether the interval lies on the paper's side of 0, on the other, or includes 0."""
    if change.low <= 0 <= change.high:
        return "undecided"
    return "as in the paper" if (change.value > 0) == (paper == "more") else "against the paper"


def _rng() -> np.random.Generator:
    """The same resamples each time, so that a table is reproducible."""
    return np.random.default_rng(0)
