"""Sequences → batches of packed tokens, without padding and without a Python loop over events."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from segue.data.sequences import Sequences
from segue.data.split import Cases
from segue.data.timestamps import MICROSECONDS

POOL_BATCHES = 50  # users of so many batches are sorted by length together: random batches with little padding


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The events of some users, one user after another, oldest first; user b has lengths[b] of them.

    Events after a history (`histories`) are the decoder's input (teacher forcing); `encode` then returns states only
    from the history's last event on.
    """

    items: np.ndarray  # [T] int64
    times: np.ndarray  # [T] int64, seconds
    lengths: np.ndarray  # [B] int64
    query_times: np.ndarray | None = None  # [B] int64, seconds, if known
    kinds: np.ndarray | None = None  # [T] int64
    values: np.ndarray | None = None  # [T] float32
    histories: np.ndarray | None = None  # [B] int64: events of the history, if others follow it
    users: np.ndarray | None = None  # [B] int64, if needed: a user may have several windows

    def tokens(
        self,
        index: np.ndarray | slice,
        lengths: np.ndarray,
        *,
        query_times: np.ndarray | None = None,
        users: np.ndarray | None = None,
    ) -> Batch:
        """The batch of the tokens at `index` (rows, a mask or a slice), `lengths` of each user."""
        return Batch(
            items=self.items[index],
            times=self.times[index],
            lengths=lengths,
            query_times=query_times,
            kinds=None if self.kinds is None else self.kinds[index],
            values=None if self.values is None else self.values[index],
            users=users,
        )


def ragged_rows(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The rows starts[i] .. starts[i] + lengths[i], one range after another."""
    first = np.cumsum(lengths) - lengths
    return np.asarray(np.arange(lengths.sum()) + np.repeat(starts - first, lengths))


def gather(
    sequences: Sequences,
    starts: np.ndarray,
    ends: np.ndarray,
    *,
    query_times: np.ndarray | None = None,
    users: np.ndarray | None = None,
) -> Batch:
    """The batch of the rows starts[b] .. ends[b] of each user b."""
    lengths = ends - starts
    rows = ragged_rows(starts, lengths)
    return Batch(
        items=sequences.items[rows].astype(np.int64),
        times=sequences.times[rows] // MICROSECONDS,
        lengths=lengths,
        query_times=None if query_times is None else query_times // MICROSECONDS,
        kinds=None if sequences.kinds is None else sequences.kinds[rows].astype(np.int64),
        values=None if sequences.values is None else sequences.values[rows],
        users=users,
    )


def window_starts(lengths: np.ndarray, length: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """The user of each window and its start in the history, for windows of `length` that together cover everything.

    The newest window ends with the history, each one before it starts `step` earlier, and the oldest starts at 0.
    A history no longer than `length` is one window.
    """
    beyond = np.maximum(0, lengths - length)
    steps = -(-beyond // step)  # rounded up: the last one, to 0, may be shorter
    owner = np.repeat(np.arange(len(lengths)), steps + 1)
    from_newest = ragged_rows(-steps, steps + 1)  # -steps … 0: steps from the newest window
    return owner, np.maximum(0, beyond[owner] + from_newest * step)


def cut_by_budget(lengths: np.ndarray, budget: int) -> list[np.ndarray]:
    """Consecutive groups of indices whose lengths sum to at most `budget`; a longer one is a group of its own."""
    ends = np.cumsum(lengths)
    groups, begin = [], 0
    while begin < len(lengths):
        before = ends[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, before + budget, side="right")))
        groups.append(np.arange(begin, end))
        begin = end
    return groups


def cut_evenly(lengths: np.ndarray, parts: int) -> np.ndarray:
    """The first index of consecutive groups of about equally many tokens, and the end of the last [parts + 1].

    Every index is in one group; with few indices, groups may be empty.
    """
    ends = np.cumsum(lengths)
    middles = 2 * ends - lengths  # twice: halves would be rounded
    group = np.minimum(middles * parts // (2 * max(1, int(lengths.sum()))), parts - 1)
    return np.asarray(np.searchsorted(group, np.arange(parts + 1)))


def epoch_batches(
    sequences: Sequences, starts: np.ndarray, ends: np.ndarray, *, tokens: int, rng: np.random.Generator
) -> Iterator[Batch]:
    """Each user once, in random order, in batches of at most `tokens` tokens of similar length."""
    lengths = ends - starts
    order = rng.permutation(len(starts))
    for pool in cut_by_budget(lengths[order], tokens * POOL_BATCHES):
        users = order[pool]
        users = users[np.argsort(lengths[users], kind="stable")]
        groups = cut_by_budget(lengths[users], tokens)
        for index in rng.permutation(len(groups)):
            rows = users[groups[index]]
            yield gather(sequences, starts[rows], ends[rows], users=sequences.owners(starts[rows]))


def case_batches(
    sequences: Sequences, cases: Cases, *, tokens: int, most_rows: int
) -> Iterator[tuple[np.ndarray, Batch]]:
    """Case indices and their whole histories, shortest first, with the time of each target as the query time."""
    lengths = cases.targets - cases.starts
    order = np.argsort(lengths, kind="stable")
    for group in cut_by_budget(lengths[order], tokens):
        for begin in range(0, len(group), most_rows):
            rows = order[group[begin : begin + most_rows]]
            starts, targets = cases.starts[rows], cases.targets[rows]
            yield rows, gather(sequences, starts, targets, query_times=sequences.times[targets])


def window_begins(lengths: np.ndarray, length: int, step: int) -> np.ndarray:
    """The start of a model's window of at most `length` events in histories of `lengths` events: 0 or a multiple of
    `step`, so it stays the same for `step` events."""
    return np.asarray(-(-np.maximum(0, lengths - length) // step) * step)


def newest(batch: Batch, length: int, step: int = 1) -> Batch:
    """The same users with at most `length` newest events each, from the start of their windows."""
    return take(batch, np.arange(len(batch.lengths)), length, step)


def take(batch: Batch, rows: np.ndarray, length: int | None = None, step: int = 1) -> Batch:
    """The users `rows` of a batch, in this order; with `length`, only their newest events, as by `newest`."""
    whole = length is None or not len(batch.lengths) or int(batch.lengths.max()) <= length
    if whole and np.array_equal(rows, np.arange(len(batch.lengths))):
        return batch
    lengths = batch.lengths[rows]
    if length is not None:
        lengths = lengths - window_begins(lengths, length, step)
    tokens = ragged_rows(np.cumsum(batch.lengths)[rows] - lengths, lengths)
    query_times, users = (None if one is None else one[rows] for one in (batch.query_times, batch.users))
    part = batch.tokens(tokens, lengths, query_times=query_times, users=users)
    return part if length is not None or batch.histories is None else replace(part, histories=batch.histories[rows])
