"""Users' training events → sparse matrices of how often items met each other.

Rows of events are sorted by item once and counted in blocks of items, a frequent item in several parts, so that memory
grows with the events, not with their pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce

import numpy as np

from segue.data.batch import cut_by_budget, ragged_rows
from segue.data.sequences import Sequences

MOST_PAIRS = 1_000_000  # pairs counted at a time, about
LARGEST = np.iinfo(np.int64).max


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
    return _count(_Log(sequences, np.asarray(ends), n_items), _Window(lag, lag), limits, by_user=False)


def count_companions(
    sequences: Sequences, ends: np.ndarray, n_items: int, *, window: int, limits: PairLimits
) -> Neighbours:
    """How many users have items a and b at most `window` events apart before `ends` [U]."""
    return _count(_Log(sequences, np.asarray(ends), n_items), _Window(-window, window), limits, by_user=True)


def users_of_items(sequences: Sequences, ends: np.ndarray, n_items: int) -> np.ndarray:
    """How many users have each item before `ends` [U] → [V + 1] int64."""
    log, users = _Log(sequences, np.asarray(ends), n_items), np.zeros(n_items + 1, dtype=np.int64)
    for block in log.blocks(MOST_PAIRS):
        owners = sequences.owners(block.rows)  # ascending in an item
        first = _changes(block.index) | _changes(owners)
        users[block.names] = np.bincount(block.index[first], minlength=len(block.names))
    return users


@dataclass(frozen=True, slots=True)
class _Window:
    """The distances of b from a that count: first .. last events later."""

    first: int
    last: int

    @property
    def size(self) -> int:
        return self.last - self.first + 1


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """All rows of some items, or a part of the rows of one item."""

    names: np.ndarray  # [n] int64: the items, ascending
    rows: np.ndarray  # [N] int64, sorted by item, then by row
    index: np.ndarray  # [N] int64: the index of each row's item in `names`


@dataclass(frozen=True, slots=True, eq=False)
class _Log:
    sequences: Sequences
    ends: np.ndarray
    n_items: int

    def blocks(self, most: int) -> Iterator[_Block]:
        """The rows before `ends` in blocks of at most `most`; an item with more is a block of its own."""
        keys, events = self._sorted_keys(), max(1, self.sequences.n_events)
        bounds = np.searchsorted(keys, np.arange(self.n_items + 2) * events)
        sizes = np.diff(bounds)
        # A pair of a block is one number (a, b, user), so a block has so many items at most.
        most_names = LARGEST // ((self.n_items + 1) * self.sequences.n_users + 1)
        for group in cut_by_budget(np.where(sizes, np.maximum(sizes, -(-most // most_names)), 0), most):
            names = group[sizes[group] > 0]
            if len(names):
                index = np.repeat(np.arange(len(names)), sizes[names])
                yield _Block(names, keys[bounds[group[0]] : bounds[group[-1] + 1]] - names[index] * events, index)

    def _sorted_keys(self) -> np.ndarray:
        """(item, row) of the rows before `ends`, each as one number, sorted: much faster than sorting rows by item."""
        begins, items = np.asarray(self.sequences.offsets)[:-1], self.sequences.items
        lengths = self.ends - begins
        keys, done = np.empty(lengths.sum(), dtype=np.int64), 0
        for users in cut_by_budget(lengths, MOST_PAIRS):
            rows = ragged_rows(begins[users], lengths[users])
            keys[done : done + len(rows)] = np.asarray(items[rows], dtype=np.int64) * len(items) + rows
            done += len(rows)
        keys.sort()
        return keys

    def parts(self, block: _Block, most: int) -> Iterator[_Block]:
        """A block in parts of about `most` rows; all rows of a user are in one part."""
        if len(block.rows) <= most:
            yield block
            return
        owners = self.sequences.owners(block.rows)  # ascending: so large a block is of one item
        cuts = np.unique(np.searchsorted(owners, owners[::most]))
        for begin, end in zip(cuts, np.append(cuts[1:], len(owners)), strict=True):
            yield _Block(block.names, block.rows[begin:end], block.index[begin:end])

    def tally(self, block: _Block, window: _Window, *, by_user: bool) -> _Tally:
        """The pairs of a block. `by_user`: without pairs of an item with itself."""
        users, width = self.sequences.owners(block.rows), self.n_items + 1
        begins, ends = np.asarray(self.sequences.offsets)[users], self.ends[users]
        starts, stops = (np.clip(block.rows + to, begins, ends) for to in (window.first, window.last + 1))
        lengths = stops - starts
        after = self.sequences.items[ragged_rows(starts, lengths)].astype(np.int64)
        keys = np.repeat(block.index * width * self.sequences.n_users + users, lengths) + after * self.sequences.n_users
        if by_user:
            keys = keys[after != np.repeat(block.names[block.index], lengths)]
        keys.sort()
        return _Tally.of(keys, self.sequences.n_users)


@dataclass(frozen=True, slots=True, eq=False)
class _Tally:
    """How many users have each pair, and how often."""

    pairs: np.ndarray  # [N] int64, ascending: (index of a in the block's names, b)
    users: np.ndarray  # [N] int64
    times: np.ndarray  # [N] int64

    @staticmethod
    def of(keys: np.ndarray, n_users: int) -> _Tally:
        """The tally of sorted keys (pair, user)."""
        distinct = np.flatnonzero(_changes(keys))
        pairs = keys[distinct] // n_users
        first = np.flatnonzero(_changes(pairs))
        users = np.diff(np.append(first, len(pairs)))
        return _Tally(pairs[first], users, np.diff(np.append(distinct[first], len(keys))))

    def plus(self, other: _Tally) -> _Tally:
        """The sum of two tallies without a common user."""
        pairs = np.concatenate((self.pairs, other.pairs))
        order = np.argsort(pairs, kind="stable")
        first = np.flatnonzero(_changes(pairs[order]))
        users, times = (
            np.add.reduceat(np.concatenate(each)[order], first) if len(first) else first
            for each in ((self.users, other.users), (self.times, other.times))
        )
        return _Tally(pairs[order][first], users, times)


def _changes(values: np.ndarray) -> np.ndarray:
    """Where a value differs from the one before it; the first always does."""
    return np.append(True, values[1:] != values[:-1])[: len(values)]


def _count(log: _Log, window: _Window, limits: PairLimits, *, by_user: bool) -> Neighbours:
    """The pairs within this window; with `by_user`, counts are users instead of events."""
    most, sizes, none = max(1, MOST_PAIRS // window.size), np.zeros(log.n_items + 1, dtype=np.int64), np.zeros(0, "i4")
    parts = [(none, none)]
    for block in log.blocks(most):
        tally = reduce(_Tally.plus, (log.tally(part, window, by_user=by_user) for part in log.parts(block, most)))
        index, after, counts = _best_pairs(tally, log.n_items + 1, limits, by_user=by_user)
        sizes[block.names] = np.bincount(index, minlength=len(block.names))
        parts.append((after.astype(np.int32), counts.astype(np.int32)))
    after, counts = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Neighbours(np.concatenate(([0], np.cumsum(sizes))), after, counts)


def _best_pairs(
    tally: _Tally, width: int, limits: PairLimits, *, by_user: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The index of a, b and the count of the pairs within the limits, by a and b. Of equal counts, the lower number is
    kept."""
    kept = tally.users >= limits.least_users
    before, after = np.divmod(tally.pairs[kept], width)
    counts = (tally.users if by_user else tally.times)[kept]
    best = np.lexsort((after, -counts, before))
    position = np.arange(len(best)) - np.searchsorted(before, before)  # `before` is sorted, and stays so under `best`
    best = np.sort(best[position < limits.most])
    return before[best], after[best], counts[best]
