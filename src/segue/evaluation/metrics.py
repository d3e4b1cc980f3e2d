"""Ranks → metrics, with intervals. Everything is a function of ranks, or of how often each item was shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

GROUPS = 10_000  # more users than this are resampled in so many groups
DRAWS_AT_A_TIME = 4_000_000
TAILS = (2.5, 97.5)  # percentiles of a 95 % interval


def hit(ranks: np.ndarray, k: int) -> np.ndarray:
    """1 where the target is among the first k [C]."""
    return (ranks <= k).astype(np.float64)


def ndcg(ranks: np.ndarray, k: int) -> np.ndarray:
    """1 / log2(rank + 1) where the target is among the first k, else 0 [C]."""
    return np.where(ranks <= k, 1 / np.log2(ranks + 1.0), 0.0)


def mrr(ranks: np.ndarray, k: int) -> np.ndarray:
    """1 / rank where the target is among the first k, else 0 [C]."""
    return np.where(ranks <= k, 1 / np.asarray(ranks, dtype=np.float64), 0.0)


MEASURES: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {"hit": hit, "ndcg": ndcg, "mrr": mrr}


def case_values(ranks: np.ndarray, ks: Sequence[int]) -> dict[str, np.ndarray]:
    """Every measure at every depth, for each case: name@k → [C]."""
    return {f"{name}@{k}": measure(ranks, k) for k in ks for name, measure in MEASURES.items()}


def summary(ranks: np.ndarray, ks: Sequence[int]) -> dict[str, float]:
    """Every measure at every depth, over at least one case."""
    return {name: float(values.mean()) for name, values in case_values(ranks, ks).items()}


def shown(lists: np.ndarray, k: int, n_items: int) -> np.ndarray:
    """How often each item is among the first k of the lists [C, K] → [V + 1]; number 0 fills short lists."""
    times = np.bincount(lists[:, :k].ravel(), minlength=n_items + 1)
    times[0] = 0
    return times


def coverage(times_shown: np.ndarray) -> float:
    """Share of the catalogue shown to anybody; padding is no item."""
    return float((times_shown[1:] > 0).mean())


def mean_popularity(times_shown: np.ndarray, counts: np.ndarray) -> float:
    """Training events of what is shown, on average over everything shown."""
    return float(times_shown @ counts / max(1, times_shown.sum()))


@dataclass(frozen=True, slots=True, eq=False)
class Totals:
    """Measures added up over the cases of each group of users, which are resampled together."""

    names: tuple[str, ...]
    sums: np.ndarray  # [G, M]
    cases: np.ndarray  # [G]


def p90_coverage(times_shown: np.ndarray) -> float:
    """The smallest share of the catalogue that makes up 90 % of everything shown: near 0 where all get the same."""
    most_first = np.sort(times_shown[1:])[::-1]
    so_far = np.cumsum(most_first)
    needed = int(np.searchsorted(10 * so_far, 9 * so_far[-1])) + 1 if so_far[-1] else 0  # whole numbers: no rounding
    return needed / len(most_first)


def entropies(kinds: np.ndarray) -> np.ndarray:
    """The entropy in nats of each row of kinds [C, K] → [C]; 0 is no kind, and a row without any has entropy 0."""
    row, place = np.nonzero(kinds)
    most = int(kinds.max(initial=0)) + 1
    pairs, times = np.unique(row * most + kinds[row, place], return_counts=True)
    whole = np.bincount(row, minlength=len(kinds))
    parts = np.bincount(pairs // most, weights=times * np.log(times), minlength=len(kinds))
    filled = np.maximum(1, whole)
    return np.log(filled) - parts / filled


def totals(ranks: np.ndarray, ks: Sequence[int], users: np.ndarray) -> Totals:
    """Every measure at every depth, added up by user."""
    return added_up(case_values(ranks, ks), users)


def added_up(values: dict[str, np.ndarray], users: np.ndarray) -> Totals:
    """Add up by user, since one user's cases are no independent evidence; many users share GROUPS groups."""
    _, user = np.unique(users, return_inverse=True)
    group = user % GROUPS
    return Totals(
        names=tuple(values),
        sums=np.stack([np.bincount(group, weights=column) for column in values.values()], axis=1),
        cases=np.bincount(group).astype(np.float64),
    )


def resampled_means(totals: Totals, *, samples: int, rng: np.random.Generator) -> np.ndarray:
    """Means over the cases of groups drawn with replacement, as many as there are: [samples, M]."""
    n = len(totals.cases)
    parts, at_a_time = [], max(1, DRAWS_AT_A_TIME // n)
    for begin in range(0, samples, at_a_time):
        size = min(at_a_time, samples - begin)
        drawn = rng.integers(0, n, size=(size, n)) + np.arange(size)[:, None] * n
        times = np.bincount(drawn.ravel(), minlength=size * n).reshape(size, n).astype(np.float64)  # [size, G]
        parts.append(times @ totals.sums / (times @ totals.cases)[:, None])
    return np.concatenate(parts)


def intervals(totals: Totals, *, samples: int, rng: np.random.Generator) -> dict[str, tuple[float, float]]:
    """95 % percentile intervals of every measure; none where samples is 0."""
    if not samples:
        return {}
    low, high = np.percentile(resampled_means(totals, samples=samples, rng=rng), TAILS, axis=0)
    return {name: (float(low[i]), float(high[i])) for i, name in enumerate(totals.names)}


class Difference(msgspec.Struct, frozen=True):
    """How much more one has than the other over the same cases, and whether chance could do it."""

    value: float
    low: float
    high: float
    p: float
    """Two-sided: how often resampled users would show no difference, or one of the other sign."""


def differences(ours: Totals, theirs: Totals, *, samples: int, rng: np.random.Generator) -> dict[str, Difference]:
    """Ours minus theirs in every measure by the paired bootstrap; both must be totals of the same cases."""
    assert ours.names == theirs.names and np.array_equal(ours.cases, theirs.cases) and samples > 0
    paired = Totals(names=ours.names, sums=ours.sums - theirs.sums, cases=ours.cases)
    drawn = resampled_means(paired, samples=samples, rng=rng)  # [samples, M]
    low, high = np.percentile(drawn, TAILS, axis=0)
    value = paired.sums.sum(axis=0) / paired.cases.sum()
    tail = np.minimum((drawn <= 0).sum(axis=0), (drawn >= 0).sum(axis=0))
    p = np.minimum(1.0, 2 * (1 + tail) / (1 + samples))  # never 0: the sample seen is one of them
    return {
        name: Difference(float(value[i]), float(low[i]), float(high[i]), float(p[i]))
        for i, name in enumerate(paired.names)
    }


class Loss(msgspec.Struct, frozen=True):
    """The share of the other's mean that one lacks over the same cases, with its 95 % interval; below 0 is a gain.

    None where the other has nothing to lose, and in the interval also where nothing was resampled.
    """

    value: float | None
    low: float | None
    high: float | None


def relative_losses(ours: Totals, theirs: Totals, *, samples: int, rng: np.random.Generator) -> dict[str, Loss]:
    """1 - ours / theirs in every measure, users resampled together; both must be totals of the same cases."""
    assert ours.names == theirs.names and np.array_equal(ours.cases, theirs.cases)
    n, both = len(ours.names), np.concatenate((ours.sums, theirs.sums), axis=1)
    whole = both.sum(axis=0)
    pair = Totals(ours.names + theirs.names, both, ours.cases)
    drawn = resampled_means(pair, samples=samples, rng=rng) if samples else np.empty((0, 2 * n))  # [samples, 2 M]
    return {name: _loss(whole[i], whole[n + i], drawn[:, i], drawn[:, n + i]) for i, name in enumerate(ours.names)}


def _loss(ours: float, theirs: float, drawn_ours: np.ndarray, drawn_theirs: np.ndarray) -> Loss:
    some = drawn_theirs > 0
    if theirs <= 0:
        return Loss(None, None, None)
    if not some.any():
        return Loss(float(1 - ours / theirs), None, None)
    low, high = np.percentile(1 - drawn_ours[some] / drawn_theirs[some], TAILS)
    return Loss(float(1 - ours / theirs), float(low), float(high))
