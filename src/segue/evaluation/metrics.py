"""Ranks, and how often each item was shown → metrics with intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

GROUPS = 10_000  # with more users than this, groups of users are resampled
SAMPLES_AT_A_TIME = 4_000_000
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
    """Every metric at every depth for each case: name@k → [C]."""
    return {f"{name}@{k}": measure(ranks, k) for k in ks for name, measure in MEASURES.items()}


def summary(ranks: np.ndarray, ks: Sequence[int]) -> dict[str, float]:
    """Every metric at every depth, averaged over at least one case."""
    return {name: float(values.mean()) for name, values in case_values(ranks, ks).items()}


def times_shown(lists: np.ndarray, k: int, n_items: int) -> np.ndarray:
    """How often each item is among the first k of the lists [C, K] → [V + 1]; item 0 fills short lists."""
    shown = np.bincount(lists[:, :k].ravel(), minlength=n_items + 1)
    shown[0] = 0
    return shown


def coverage(shown: np.ndarray) -> float:
    """Share of the catalogue shown to anybody, by how often each item was shown [V + 1]."""
    return float((shown[1:] > 0).mean())


def mean_popularity(shown: np.ndarray, counts: np.ndarray) -> float:
    """Mean training events of the items shown."""
    return float(shown @ counts / max(1, shown.sum()))


def p90_coverage(shown: np.ndarray) -> float:
    """The smallest share of the catalogue that makes up 90 % of the items shown: near 0 if all users get the same."""
    most_first = np.sort(shown[1:])[::-1]
    so_far = np.cumsum(most_first)
    needed = int(np.searchsorted(10 * so_far, 9 * so_far[-1])) + 1 if so_far[-1] else 0  # integers: no rounding
    return needed / len(most_first)


def entropies(categories: np.ndarray) -> np.ndarray:
    """The entropy in nats of each row of categories [C, K] → [C]; 0 is no category, and empty rows have entropy 0."""
    row, column = np.nonzero(categories)
    most = int(categories.max(initial=0)) + 1
    pairs, times = np.unique(row * most + categories[row, column], return_counts=True)
    sizes = np.maximum(1, np.bincount(row, minlength=len(categories)))
    parts = np.bincount(pairs // most, weights=times * np.log(times), minlength=len(categories))
    return np.log(sizes) - parts / sizes


@dataclass(frozen=True, slots=True, eq=False)
class Totals:
    """Metrics summed over the cases of each group of users, which are resampled together."""

    names: tuple[str, ...]
    sums: np.ndarray  # [G, M]
    cases: np.ndarray  # [G]


def rank_totals(ranks: np.ndarray, ks: Sequence[int], users: np.ndarray) -> Totals:
    """Every metric at every depth, summed by user."""
    return user_totals(case_values(ranks, ks), users)


def user_totals(values: dict[str, np.ndarray], users: np.ndarray) -> Totals:
    """Values summed by user, as one user's cases are not independent; many users share GROUPS groups."""
    _, user = np.unique(users, return_inverse=True)
    group = user % GROUPS
    return Totals(
        names=tuple(values),
        sums=np.stack([np.bincount(group, weights=column) for column in values.values()], axis=1),
        cases=np.bincount(group).astype(np.float64),
    )


def resampled_means(totals: Totals, *, samples: int, rng: np.random.Generator) -> np.ndarray:
    """Means over the cases of groups sampled with replacement, as many as there are: [samples, M]."""
    n = len(totals.cases)
    parts, at_a_time = [], max(1, SAMPLES_AT_A_TIME // n)
    for begin in range(0, samples, at_a_time):
        size = min(at_a_time, samples - begin)
        sampled = rng.integers(0, n, size=(size, n)) + np.arange(size)[:, None] * n
        times = np.bincount(sampled.ravel(), minlength=size * n).reshape(size, n).astype(np.float64)  # [size, G]
        parts.append(times @ totals.sums / (times @ totals.cases)[:, None])
    return np.concatenate(parts)


def intervals(totals: Totals, *, samples: int, rng: np.random.Generator) -> dict[str, tuple[float, float]]:
    """95 % percentile intervals of every metric; none with 0 samples."""
    if not samples:
        return {}
    low, high = np.percentile(resampled_means(totals, samples=samples, rng=rng), TAILS, axis=0)
    return {name: (float(low[i]), float(high[i])) for i, name in enumerate(totals.names)}


class Difference(msgspec.Struct, frozen=True):
    """The paired difference of two means over the same cases, with its 95 % interval."""

    value: float
    low: float
    high: float
    p: float
    """Two-sided: how often resampled users show no difference, or one of the other sign."""


def differences(ours: Totals, theirs: Totals, *, samples: int, rng: np.random.Generator) -> dict[str, Difference]:
    """Ours minus theirs for every metric, by the paired bootstrap. Both must be totals of the same cases."""
    assert ours.names == theirs.names and np.array_equal(ours.cases, theirs.cases) and samples > 0
    paired = Totals(names=ours.names, sums=ours.sums - theirs.sums, cases=ours.cases)
    means = resampled_means(paired, samples=samples, rng=rng)  # [samples, M]
    low, high = np.percentile(means, TAILS, axis=0)
    value = paired.sums.sum(axis=0) / paired.cases.sum()
    tail = np.minimum((means <= 0).sum(axis=0), (means >= 0).sum(axis=0))
    p = np.minimum(1.0, 2 * (1 + tail) / (1 + samples))  # never 0: the log itself is one sample
    return {
        name: Difference(float(value[i]), float(low[i]), float(high[i]), float(p[i]))
        for i, name in enumerate(paired.names)
    }


class RelativeLoss(msgspec.Struct, frozen=True):
    """By which share one mean is below another over the same cases, with its 95 % interval; below 0 is a gain.

    All are None if the other mean is 0; the interval is None without samples.
    """

    value: float | None
    low: float | None
    high: float | None


def relative_losses(ours: Totals, theirs: Totals, *, samples: int, rng: np.random.Generator) -> dict[str, RelativeLoss]:
    """1 - ours / theirs for every metric, users resampled together. Both must be totals of the same cases."""
    assert ours.names == theirs.names and np.array_equal(ours.cases, theirs.cases)
    n, both = len(ours.names), np.concatenate((ours.sums, theirs.sums), axis=1)
    pair = Totals(ours.names + theirs.names, both, ours.cases)
    means = resampled_means(pair, samples=samples, rng=rng) if samples else np.empty((0, 2 * n))  # [samples, 2 M]
    sums = both.sum(axis=0)
    return {name: _loss(sums[i], sums[n + i], means[:, i], means[:, n + i]) for i, name in enumerate(ours.names)}


def _loss(ours: float, theirs: float, our_means: np.ndarray, their_means: np.ndarray) -> RelativeLoss:
    if theirs <= 0:
        return RelativeLoss(None, None, None)
    some = their_means > 0
    if not some.any():
        return RelativeLoss(float(1 - ours / theirs), None, None)
    low, high = np.percentile(1 - our_means[some] / their_means[some], TAILS)
    return RelativeLoss(float(1 - ours / theirs), float(low), float(high))
