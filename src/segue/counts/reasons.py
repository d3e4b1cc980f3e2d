"""One history and one candidate → the counts behind what is added to the candidate's score."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from segue.counts.counts import Counts
from segue.counts.features import DECAY, GAP, HORIZON, LAST, NEWEST, REPEATED, TOGETHER, cosine


@dataclass(frozen=True, slots=True)
class Reason:
    """One count, and what it adds to the score."""

    feature: int
    """REPEATED stands for all three features of repeats."""
    source: int
    """The item of the history that it stems from: the candidate itself, if it is repeated."""
    distance: int
    """Events from the newest such item to the end of the history: 1 is the newest event."""
    count: int
    """How often the candidate came after the item, how many users have both, or how often it is in the history."""
    score: float


def reasons(counts: Counts, items: np.ndarray, candidate: int) -> list[Reason]:
    """What adds to the score of a candidate after a history [n], oldest first; the largest addition first."""
    newest = items[::-1]
    found = [*_followed(counts, newest, candidate), *_together(counts, newest, candidate)]
    found += _repeated(counts, newest, candidate)
    return sorted((reason for reason in found if reason.score), key=lambda reason: -abs(reason.score))


def _followed(counts: Counts, newest: np.ndarray, candidate: int) -> Iterator[Reason]:
    for feature, (pairs, source) in enumerate(zip(counts.pairs.followers, newest.tolist(), strict=False)):
        if times := pairs.count(source, candidate):
            yield Reason(feature, source, feature + 1, times, counts.weights[feature] * float(np.log1p(times)))


def _together(counts: Counts, newest: np.ndarray, candidate: int) -> Iterator[Reason]:
    """One reason for each item, however often it is among the newest ones."""
    pairs, read = counts.pairs, newest[:NEWEST]
    for source in dict.fromkeys(read.tolist()):
        if both := pairs.companions.count(source, candidate):
            ages = np.flatnonzero(read == source)
            value = (DECAY**ages).sum() * cosine(np.array(both), pairs.users[source], pairs.users[candidate])
            yield Reason(TOGETHER, source, int(ages[0]) + 1, both, counts.weights[TOGETHER] * float(value))


def _repeated(counts: Counts, newest: np.ndarray, candidate: int) -> Iterator[Reason]:
    gaps = np.flatnonzero(newest[:HORIZON] == candidate) + 1
    if len(gaps):
        gap, weights = int(gaps[0]), counts.weights
        score = weights[REPEATED] * np.log1p(len(gaps)) + weights[LAST] * (gap == 1)
        score += weights[GAP] * np.log((HORIZON + 1) / gap)
        yield Reason(REPEATED, candidate, gap, len(gaps), float(score))
