"""Users' training events → sparse matrices of how often items met each other.

Rows of events are sorted by item once and counted in blocks of items, so that memory grows with the events, not with
their pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from segue.data.batch import cut_by_budget, ragged_rows
from segue.data.sequences import Sequences

MOST_PAIRS = 8_000_000  # pairs counted at a time, about; an item with more is a block of its own


@dataclass(frozen=True, slots=True, eq=False)
class Neighbours:
    """A sparse matrix of counts: item a's neighbours are items[offsets[a] : offsets[a + 1]], ascending."""

    offsets: np.ndarray  # [V + 2] int64
    items: np.ndarray  # [N] int32
    counts: np.ndarray  # [N] int32

    def entries(self, items: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The entries of some items [n], one item after another: the index of each entry's item in `items`, and the
        entry's index in the matrix. An item that is beyond the matrix has none."""
        inside = items < len(self.offsets) - 1
        rows = np.where(inside, items, 0)  # padding has no neighbours
        lengths = self.offsets[rows + 1] - self.offsets[rows]
        return np.repeat(np.arange(len(items)), lengths), ragged_rows(self.offsets[rows], lengths)

    def count(self, item: int, neighbour: int) -> int:
        """The count of one pair."""
        if item >= len(self.offsets) - 1:
            return 0
        own = slice(int(self.offsets[item]), int(self.offsets[item + 1]))
        return int(self.counts[own][self.items[own] == neighbour].sum())


@dataclass(frozen=True, slots=True)
class PairLimits:
    """Which pairs of items are kept."""

    least_users: int
    """Users who must have a pair. A pair that one user alone has is part of that user's history."""
    most: int
    """Neighbours of an item: those with the highest counts."""


def count_followers(
    sequences: Sequences, ends: np.ndarray, n_items: int, *, lag: int, limits: PairLimits
) -> Neighbours:
    """How often item b came `lag` events after item a, in each user's events before `ends` [U]."""
    return _count(_Log(sequences, np.asarray(ends), n_items), (lag,), limits, by_user=False)


def count_companions(
    sequences: Sequences, ends: np.ndarray, n_items: int, *, window: int, limits: PairLimits
) -> Neighbours:
    """How many users have items a and b at most `window` events apart before `ends` [U]."""
    distances = [*range(-window, 0), *range(1, window + 1)]
    return _count(_Log(sequences, np.asarray(ends), n_items), distances, limits, by_user=True)


def users_of_items(sequences: Sequences, ends: np.ndarray, n_items: int) -> np.ndarray:
    """How many users have each item before `ends` [U] → [V + 1] int64."""
    log, users = _Log(sequences, np.asarray(ends), n_items), np.zeros(n_items + 1, dtype=np.int64)
    for rows in log.blocks(distances=1):
        items = np.asarray(sequences.items)[rows].astype(np.int64)
        pairs = np.unique(items * sequences.n_users + sequences.owners(rows))
        users += np.bincount(pairs // sequences.n_users, minlength=n_items + 1)
    return users


@dataclass(frozen=True, slots=True, eq=False)
class _Log:
    sequences: Sequences
    ends: np.ndarray
    n_items: int

    def blocks(self, *, distances: int) -> Iterator[np.ndarray]:
        """The rows before `ends` in blocks, sorted by item; all rows of an item are in one block."""
        begins = np.asarray(self.sequences.offsets)[:-1]
        rows = ragged_rows(begins, self.ends - begins)
        items = np.asarray(self.sequences.items)[rows]
        rows, sizes = rows[np.argsort(items, kind="stable")], np.bincount(items)
        bounds = np.concatenate(([0], np.cumsum(sizes)))
        for group in cut_by_budget(sizes, max(1, MOST_PAIRS // distances)):
            if bounds[group[0]] < bounds[group[-1] + 1]:
                yield rows[bounds[group[0]] : bounds[group[-1] + 1]]

    def pairs(self, rows: np.ndarray, names: np.ndarray, distances: Sequence[int], *, by_user: bool) -> np.ndarray:
        """The pairs of some rows as sorted keys: (index of a in `names`, b, user). `by_user`: without pairs of an item
        with itself."""
        items, users = np.asarray(self.sequences.items), self.sequences.owners(rows)
        begins, ends = np.asarray(self.sequences.offsets)[users], self.ends[users]
        before = np.searchsorted(names, items[rows])
        keys = []
        for distance in distances:
            others = rows + distance
            inside = (others >= begins) & (others < ends)
            after = items[others[inside]].astype(np.int64)
            key = (before[inside] * (self.n_items + 1) + after) * self.sequences.n_users + users[inside]
            keys.append(key[names[before[inside]] != after] if by_user else key)
        return np.sort(np.concatenate(keys))


def _count(log: _Log, distances: Sequence[int], limits: PairLimits, *, by_user: bool) -> Neighbours:
    """The pairs at these distances; with `by_user`, counts are users instead of events."""
    none = np.zeros(0, dtype=np.int64)
    parts = [(none, none, none)]
    for rows in log.blocks(distances=len(distances)):
        names = np.unique(np.asarray(log.sequences.items)[rows])
        keys = log.pairs(rows, names, distances, by_user=by_user)
        before, after, counts = _best_pairs(keys, log, limits, by_user=by_user)
        parts.append((names[before].astype(np.int64), after, counts))
    before, after, counts = (np.concatenate(column) for column in zip(*parts, strict=True))
    offsets = np.concatenate(([0], np.cumsum(np.bincount(before, minlength=log.n_items + 1))))
    return Neighbours(offsets, after.astype(np.int32), counts.astype(np.int32))


def _best_pairs(
    keys: np.ndarray, log: _Log, limits: PairLimits, *, by_user: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sorted keys of pairs → a, b and the count of those within the limits, by a and b. Of equal counts, the lower
    number is kept."""
    pair = keys // log.sequences.n_users
    first = np.flatnonzero(np.append(True, pair[1:] != pair[:-1])[: len(pair)])
    if not len(first):
        return first, first, first
    users = np.add.reduceat(np.append(True, keys[1:] != keys[:-1]).astype(np.int64), first)
    counts = users if by_user else np.diff(np.append(first, len(pair)))
    kept = users >= limits.least_users
    before, after = np.divmod(pair[first][kept], log.n_items + 1)
    counts = counts[kept]
    best = np.lexsort((after, -counts, before))
    place = np.arange(len(best)) - np.searchsorted(before, before)  # `before` is sorted, and stays so under `best`
    best = np.sort(best[place < limits.most])
    return before[best], after[best], counts[best]
