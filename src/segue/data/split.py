"""The split of events into training, validation and test.

Two boundaries a user, as rows of the flat arrays: train is [offset, train_end), validation targets are
[train_end, valid_end), test targets [valid_end, next offset). A target's history is every earlier event,
so at test it includes the validation events. Users with fewer than three events only train (`last`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from segue.data.sequences import Sequences
from segue.errors import InputError

SplitPart = Literal["valid", "test"]
Target = Literal["each", "first", "last"]


@dataclass(frozen=True, slots=True, eq=False)
class Cases:
    """Histories with a known target: rows starts[i] .. targets[i], and the item at targets[i]."""

    users: np.ndarray  # [C] int64
    starts: np.ndarray  # [C] int64, the first row of the user's history
    targets: np.ndarray  # [C] int64, the row of the target; the history ends before it

    def __len__(self) -> int:
        return len(self.users)

    def spread(self, most: int) -> Cases:
        """At most `most` of the cases, evenly spread, the same ones every time."""
        rows = np.unique(np.linspace(0, len(self) - 1, min(most, len(self))).astype(np.int64))
        return Cases(users=self.users[rows], starts=self.starts[rows], targets=self.targets[rows])


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """The two boundaries of every user."""

    offsets: np.ndarray  # [U + 1]
    train_end: np.ndarray  # [U]
    valid_end: np.ndarray  # [U]
    boundaries: tuple[int, int] | None = None
    """The first times of validation and of test in microseconds, if all users share them."""

    def cases(self, part: SplitPart, target: Target = "each") -> Cases:
        """The cases of one part; with `first` or `last`, one per user."""
        begin, end = (self.train_end, self.valid_end) if part == "valid" else (self.valid_end, self.offsets[1:])
        begin, end = np.asarray(begin, dtype=np.int64), np.asarray(end, dtype=np.int64)
        if target == "first":
            end = np.minimum(end, begin + 1)
        elif target == "last":
            begin = np.maximum(begin, end - 1)
        counts = end - begin
        users = np.repeat(np.arange(len(counts)), counts)
        first = np.cumsum(counts) - counts
        targets = np.arange(counts.sum()) + np.repeat(begin - first, counts)
        return Cases(users=users, starts=np.asarray(self.offsets, dtype=np.int64)[users], targets=targets)


def split_last(sequences: Sequences) -> Split:
    """Hold out the last event for test and the one before it for validation."""
    offsets = np.asarray(sequences.offsets)
    ends = offsets[1:]
    held_out = np.where(np.diff(offsets) >= 3, 1, 0)
    return Split(offsets=offsets, train_end=ends - 2 * held_out, valid_end=ends - held_out)


def split_time(sequences: Sequences, *, valid_from: int, test_from: int) -> Split:
    """Split all users at the same two times (microseconds); events are sorted by time within a user."""
    return Split(
        offsets=np.asarray(sequences.offsets),
        train_end=first_at(sequences, valid_from),
        valid_end=first_at(sequences, test_from),
        boundaries=(valid_from, test_from),
    )


def first_at(sequences: Sequences, time: int) -> np.ndarray:
    """Each user's first row at or after a time: a binary search for all users at once, without a copy."""
    offsets = np.asarray(sequences.offsets)
    low, high = offsets[:-1].copy(), offsets[1:].copy()
    while len(open_users := np.flatnonzero(low < high)):
        middle = (low[open_users] + high[open_users]) // 2
        earlier = np.asarray(sequences.times[middle]) < time
        low[open_users[earlier]] = middle[earlier] + 1
        high[open_users[~earlier]] = middle[~earlier]
    return low


def validation_start(sequences: Sequences, *, test_from: int) -> int:
    """The start of validation, so that about as many events lie from it to `test_from` as in the test."""
    times = np.asarray(sequences.times)
    earlier = times[times < test_from]
    n_test = len(times) - len(earlier)
    if n_test == 0:
        raise InputError(
            "No event is at or after the time of --split time:…, so there is no test; choose an earlier time."
        )
    if n_test * 2 >= len(times):
        raise InputError(
            f"{n_test} of {len(times)} events are at or after the time of --split time:…; "
            "validation needs as many before it and training the rest: choose a later time."
        )
    earlier.partition(len(earlier) - n_test)
    start = int(earlier[len(earlier) - n_test])
    if start == int(times.min()):
        raise InputError("Validation would take every event before the time of --split time:…; choose a later time.")
    return start
