"""Sequences → batches of packed tokens: nothing is padded, no event passes through a Python loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from segue.data.sequences import Sequences
from segue.data.split import Cases
from segue.data.timestamps import MICROSECONDS

POOL_BATCHES = 50  # users of about this many batches are sorted by length together: random, yet little padding


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Some users' events one after another, oldest first; user b has lengths[b] of them."""

    items: np.ndarray  # [T] int64
    times: np.ndarray  # [T] int64, seconds
    lengths: np.ndarray  # [B] int64
    query_times: np.ndarray | None = None  # [B] int64, seconds: the moment of the question, where it is known
    kinds: np.ndarray | None = None  # [T] int64
    values: np.ndarray | None = None  # [T] float32
    histories: np.ndarray | None = None  # [B] int64: events that are history, where those after them continue it
    users: np.ndarray | None = None  # [B] int64: whose they are, where it matters: a user may have several windows

    def tokens(
        self,
        chosen: np.ndarray,
        lengths: np.ndarray,
        *,
        query_times: np.ndarray | None = None,
        users: np.ndarray | None = None,
    ) -> Batch:
        """The tokens `chosen` (rows, or a mask), of which each user then has `lengths`."""
        return Batch(
            items=self.items[chosen],
            times=self.times[chosen],
            lengths=lengths,
            query_times=query_times,
            kinds=None if self.kinds is None else self.kinds[chosen],
            values=None if self.values is None else self.values[chosen],
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
    """Pack the rows starts[b] .. ends[b] of each b."""
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
    """Whose each window is, and where in that history it starts, for windows of `length` that together see everything.

    The newest window ends with the history, each one before it starts `step` earlier, and the oldest starts at 0.
    A history no longer than `length` is one window.
    """
    beyond = np.maximum(0, lengths - length)
    steps = -(-beyond // step)  # upwards: the last one, to 0, may be shorter
    owner = np.repeat(np.arange(len(lengths)), steps + 1)
    left = ragged_rows(-steps, steps + 1)  # -steps … 0: steps from the newest window
    return owner, np.maximum(0, beyond[owner] + left * step)


def cut_by_budget(lengths: np.ndarray, budget: int) -> list[np.ndarray]:
    """Consecutive groups of indexes whose lengths add up to at most `budget` (one longer than it stands alone)."""
    ends = np.cumsum(lengths)
    groups, begin = [], 0
    while begin < len(lengths):
        taken = ends[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, taken + budget, side="right")))
        groups.append(np.arange(begin, end))
        begin = end
    return groups


def cut_evenly(lengths: np.ndarray, parts: int) -> np.ndarray:
    """Where consecutive groups of about as many tokens begin, and where the last one ends [parts + 1]. Every index is
    in one group; where indexes are few, groups may be empty."""
    ends = np.cumsum(lengths)
    middles = 2 * ends - lengths  # twice: halves would be rounded
    group = np.minimum(middles * parts // (2 * max(1, int(lengths.sum()))), parts - 1)
    return np.asarray(np.searchsorted(group, np.arange(parts + 1)))


def epoch_batches(
    sequences: Sequences, starts: np.ndarray, ends: np.ndarray, *, tokens: int, rng: np.random.Generator
) -> Iterator[Batch]:
    """Each user once, in an order drawn from `rng`, in batches of at most `tokens` tokens of similar length."""
    lengths = ends - starts
    order = rng.permutation(len(starts))
    for pool in cut_by_budget(lengths[order], tokens * POOL_BATCHES):
        users = order[pool]
        users = users[np.argsort(lengths[users], kind="stable")]
        groups = cut_by_budget(lengths[users], tokens)
        for index in rng.permutation(len(groups)):
            chosen = users[groups[index]]
            yield gather(sequences, starts[chosen], ends[chosen], users=sequences.owners(starts[chosen]))


def case_batches(
    sequences: Sequences, cases: Cases, *, tokens: int, most_rows: int
) -> Iterator[tuple[np.ndarray, Batch]]:
    """(case indexes, their whole histories), shortest first, with the time of each answer as the time asked."""
    lengths = cases.targets - cases.starts
    order = np.argsort(lengths, kind="stable")
    for group in cut_by_budget(lengths[order], tokens):
        for begin in range(0, len(group), most_rows):
            chosen = order[group[begin : begin + most_rows]]
            yield (
                chosen,
                gather(
                    sequences,
                    cases.starts[chosen],
                    cases.targets[chosen],
                    query_times=sequences.times[cases.targets[chosen]],
                ),
            )


def window_begins(lengths: np.ndarray, length: int, step: int) -> np.ndarray:
    """Where the window that a model looks at begins in histories of `lengths` events, so that it holds at most
    `length`: at 0, then at multiples of `step`. It depends on nothing else, and stays for `step` events."""
    return np.asarray(-(-np.maximum(0, lengths - length) // step) * step)


def newest(batch: Batch, length: int, step: int = 1) -> Batch:
    """The same users with at most `length` newest events each, from where their windows begin."""
    if not len(batch.lengths) or int(batch.lengths.max()) <= length:
        return batch
    ends = np.cumsum(batch.lengths)
    kept = batch.lengths - window_begins(batch.lengths, length, step)
    return batch.tokens(ragged_rows(ends - kept, kept), kept, query_times=batch.query_times, users=batch.users)


def take(batch: Batch, rows: np.ndarray, length: int | None = None, step: int = 1) -> Batch:
    """These users of a batch, in this order; whole, or as `newest` has them."""
    if np.array_equal(rows, np.arange(len(batch.lengths))):
        return batch if length is None else newest(batch, length, step)
    lengths = batch.lengths[rows]
    kept = lengths if length is None else lengths - window_begins(lengths, length, step)
    chosen = ragged_rows(np.cumsum(batch.lengths)[rows] - kept, kept)
    query_times, users = (None if one is None else one[rows] for one in (batch.query_times, batch.users))
    taken = batch.tokens(chosen, kept, query_times=query_times, users=users)
    return taken if length is not None or batch.histories is None else replace(taken, histories=batch.histories[rows])
