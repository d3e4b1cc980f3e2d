"""What trainings with several seeds did for the same users → their means, differences and falls, with intervals.

A seed is no user: values are averaged over the seeds first, user by user, and then users are resampled.
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


def difference_of_falls(
    ours: tuple[np.ndarray, np.ndarray], theirs: tuple[np.ndarray, np.ndarray], users: np.ndarray
) -> Difference:
    """How much more of its mean one loses than the other, each from its first values to its second.

    Falls are ratios of means, so all four means are taken of the same resampled users.
    """
    columns = dict(zip(("our first", "our second", "their first", "their second"), (*ours, *theirs), strict=True))
    totals = user_totals(columns, users)
    whole = Totals(totals.names, totals.sums.sum(axis=0, keepdims=True), totals.cases.sum(keepdims=True))
    value = float(_falls_apart(whole.sums / whole.cases[:, None])[0])
    drawn = _falls_apart(resampled_means(totals, samples=SAMPLES, rng=_rng()))
    low, high = np.percentile(drawn, TAILS)
    tail = min(int((drawn <= 0).sum()), int((drawn >= 0).sum()))
    return Difference(value, float(low), float(high), min(1.0, 2 * (1 + tail) / (1 + SAMPLES)))


def _falls_apart(means: np.ndarray) -> np.ndarray:
    """(our first, our second, their first, their second) [S, 4] → our fall minus theirs [S]."""
    return np.asarray(means[:, 3] / means[:, 2] - means[:, 1] / means[:, 0])


def verdict(found: Difference, *, paper: Literal["more", "less"]) -> Verdict:
    """Whether the interval lies on the paper's side of 0, on the other, or on both."""
    if found.low <= 0 <= found.high:
        return "undecided"
    return "as in the paper" if (found.value > 0) == (paper == "more") else "against the paper"


def _rng() -> np.random.Generator:
    """The same resamples for everyone, so that a table made twice is the same."""
    return np.random.default_rng(0)
