"""A history → the candidates that counts reach, with a value for each feature.

- `after-1`, `after-2`, `after-3`: log(1 + how often the candidate came one, two, three events after the history's item
  at that distance from its end);
- `together`: the sum over the newest items of .8 ** age · cosine, where the cosine of two items is the number of users
  who have both close together, over the root of the product of their users;
- `repeated`: log(1 + how often the candidate is in the history); `gap`: log(51 / the events since it was last
  there); `newest`: 1 if it is the newest item. These three are empty if seen items are excluded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from segue.counts.neighbours import Neighbours, PairLimits, count_companions, count_followers, users_of_items
from segue.data.batch import Batch, cut_by_budget
from segue.data.sequences import Sequences

LAGS = 3
WINDOW = 30  # events between two items that count as close together
NEWEST, DECAY = 10, 0.8  # items of the history that `together` reads, and the weight that each event of age takes
AT_A_TIME = 1_000_000  # pairs whose cosines are computed together
HORIZON = 50  # newest events of the history in which repeats are looked for
FEATURES = (*(f"after-{lag}" for lag in range(1, LAGS + 1)), "together", "repeated", "gap", "newest")
TOGETHER, REPEATED, GAP, LAST = range(LAGS, LAGS + 4)


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """Some entries of one feature: the value of candidate items[i] for history rows[i]."""

    feature: int
    rows: np.ndarray  # [N] int64
    items: np.ndarray  # [N] int64
    values: np.ndarray  # [N] float32


@dataclass(frozen=True, eq=False)
class ItemCounts:
    """The counts of a log's training part. It has no users: only pairs of items, and how many have them."""

    followers: tuple[Neighbours, ...]
    """By lag, from 1."""
    companions: Neighbours
    users: np.ndarray  # [V + 1] int64: users of each item

    @staticmethod
    def of(sequences: Sequences, ends: np.ndarray, n_items: int, limits: PairLimits) -> ItemCounts:
        """The counts of each user's events before `ends` [U]."""
        return ItemCounts(
            followers=tuple(
                count_followers(sequences, ends, n_items, lag=lag, limits=limits) for lag in range(1, LAGS + 1)
            ),
            companions=count_companions(sequences, ends, n_items, window=WINDOW, limits=limits),
            users=users_of_items(sequences, ends, n_items),
        )

    @cached_property
    def logarithms(self) -> tuple[np.ndarray, ...]:
        """log(1 + count) of each pair, by lag."""
        return tuple(np.log1p(pairs.counts).astype(np.float32) for pairs in self.followers)

    @cached_property
    def cosines(self) -> np.ndarray:
        """The cosine of each pair of companions [N] float32."""
        pairs, sizes = self.companions, np.diff(self.companions.offsets)
        values = np.empty(len(pairs.items), dtype=np.float32)
        for group in cut_by_budget(sizes, AT_A_TIME):
            own = slice(int(pairs.offsets[group[0]]), int(pairs.offsets[group[-1] + 1]))
            owners = np.repeat(group, sizes[group])
            values[own] = cosine(pairs.counts[own], self.users[owners], self.users[pairs.items[own]])
        return values

    def terms(self, histories: Batch, features: frozenset[int]) -> list[Terms]:
        """The entries of these features. A candidate may have several entries of one feature, which add up."""
        ends, terms = np.cumsum(histories.lengths), []
        for lag, (pairs, values) in enumerate(zip(self.followers, self.logarithms, strict=True), start=1):
            if lag - 1 in features:
                rows, _, entries = _entries(pairs, histories, ends, np.array([lag]))
                terms.append(Terms(lag - 1, rows, pairs.items[entries].astype(np.int64), values[entries]))
        if TOGETHER in features:
            ages = np.arange(NEWEST)
            rows, age, entries = _entries(self.companions, histories, ends, ages + 1)
            values = self.cosines[entries] * (DECAY**ages).astype(np.float32)[age]
            terms.append(Terms(TOGETHER, rows, self.companions.items[entries].astype(np.int64), values))
        return [*terms, *_repeats(histories, ends, features)]


def cosine(both: np.ndarray, users: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Users who have both items, over the root of the product of each item's users."""
    return np.asarray(both / np.sqrt(np.maximum(1, users) * np.maximum(1, others)))


def _entries(
    pairs: Neighbours, histories: Batch, ends: np.ndarray, distances: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The entries of the items at these distances [n] from the end of each history that has so many events: the row of
    each entry's history, the index of its distance, and the entry's index in the matrix."""
    rows, which = np.nonzero(histories.lengths[:, None] >= distances)
    of, entries = pairs.entries(histories.items[ends[rows] - distances[which]])
    return rows[of], which[of], entries


def _repeats(histories: Batch, ends: np.ndarray, features: frozenset[int]) -> list[Terms]:
    """The items of the newest HORIZON events, each once."""
    if not features & {REPEATED, GAP, LAST}:
        return []
    owners = np.repeat(np.arange(len(histories.lengths)), histories.lengths)
    gaps = ends[owners] - np.arange(len(owners))  # 1 is the newest event
    recent = gaps <= HORIZON
    owners, items, gaps = owners[recent], histories.items[recent], gaps[recent]
    order = np.lexsort((gaps, items, owners))
    owners, items, gaps = owners[order], items[order], gaps[order]
    new = np.append(True, (owners[1:] != owners[:-1]) | (items[1:] != items[:-1]))[: len(owners)]
    first = np.flatnonzero(new)
    times = np.diff(np.append(first, len(owners)))
    rows, items, gaps = owners[first], items[first], gaps[first]
    values = {REPEATED: np.log1p(times), GAP: np.log((HORIZON + 1) / gaps), LAST: (gaps == 1).astype(np.float32)}
    return [
        Terms(feature, rows, items, value.astype(np.float32))
        for feature, value in values.items()
        if feature in features
    ]
