"""A log and a window of time → the users and targets of that window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from segue.data.batch import Batch, gather
from segue.data.sequences import Sequences
from segue.data.split import Split, first_at
from segue.data.timestamps import MICROSECONDS, iso_text
from segue.errors import InputError, SettingsError
from segue.evaluation.settings import MOST_DAYS

DAY = 86_400 * MICROSECONDS

Positive = Callable[[Batch], np.ndarray]
"""A batch → the mask of the events that are targets [T]."""


@dataclass(frozen=True, slots=True, eq=False)
class WindowCases:
    """Users with a history before a time and with targets after it."""

    time: int  # microseconds
    users: np.ndarray  # [C] int64
    starts: np.ndarray  # [C] int64, the first row of the user
    ends: np.ndarray  # [C] int64, the user's first row at or after `time`
    owner: np.ndarray  # [N] int64, the case of each target, in order
    targets: np.ndarray  # [N] int64, items, each once in a case

    def __len__(self) -> int:
        return len(self.users)

    @property
    def sizes(self) -> np.ndarray:
        """Targets of each case [C]."""
        return np.bincount(self.owner, minlength=len(self))

    def only(self, which: np.ndarray) -> WindowCases:
        """Some of the targets [N] bool, and the users who have any of them."""
        cases, owner = np.unique(self.owner[which], return_inverse=True)
        starts, ends = self.starts[cases], self.ends[cases]
        return WindowCases(self.time, self.users[cases], starts, ends, owner, self.targets[which])


def window_cases(
    sequences: Sequences, *, time: int, until: int, oldest: int | None = None, positive: Positive | None = None
) -> WindowCases:
    """Users with an event before `oldest` (by default `time`) and one in (time, until], in microseconds.

    `positive` selects the events that are targets; by default all are.
    """
    offsets = np.asarray(sequences.offsets, dtype=np.int64)
    begins, beyond = first_at(sequences, time + 1), first_at(sequences, until + 1)
    with_history = first_at(sequences, time if oldest is None else oldest) > offsets[:-1]
    counts = np.where(with_history, beyond - begins, 0)
    window, user = gather(sequences, begins, begins + counts), np.repeat(np.arange(len(counts)), counts)
    is_target = np.ones(len(user), dtype=bool) if positive is None else positive(window)
    n_numbers = int(window.items.max(initial=0)) + 1
    pairs = np.unique(user[is_target] * n_numbers + window.items[is_target])
    users, owner = np.unique(pairs // n_numbers, return_inverse=True)
    return WindowCases(
        time=time,
        users=users,
        starts=offsets[users],
        ends=np.asarray(first_at(sequences, time), dtype=np.int64)[users],
        owner=owner,
        targets=pairs % n_numbers,
    )


def split_window(split: Split, days: float) -> tuple[int, int, int]:
    """(the end of training, the time of the split, the end of the window), in microseconds."""
    if not 0 < days <= MOST_DAYS:
        raise SettingsError(f"--days takes a number of days above 0 and at most {MOST_DAYS}, got {days:g}.")
    assert split.boundaries is not None, "the caller refuses --split last, which has no time"
    valid_from, test_from = split.boundaries
    return valid_from, test_from, test_from + round(days * DAY)


def held_out_window(
    sequences: Sequences, split: Split, days: float, *, age: float, positive: Positive | None
) -> WindowCases:
    """The cases of the test part, of the users with a history `age` days before it."""
    _, time, until = split_window(split, days)
    oldest = time - round(age * DAY)
    return _not_empty(window_cases(sequences, time=time, until=until, oldest=oldest, positive=positive), oldest, days)


def validation_window(sequences: Sequences, split: Split, days: float, positive: Positive | None = None) -> WindowCases:
    """The cases that choose an epoch: the first days of validation, without any event of the test part."""
    valid_from, test_from, _ = split_window(split, days)
    until = min(valid_from + round(days * DAY), test_from - 1)
    return _not_empty(window_cases(sequences, time=valid_from, until=until, positive=positive), valid_from, days)


def _not_empty(cases: WindowCases, oldest: int, days: float) -> WindowCases:
    if not len(cases):
        raise InputError(
            f"Nobody with an event before {iso_text(oldest)} has a positive one in the {days:g} days after "
            f"{iso_text(cases.time)}, so there is nothing to measure: give more days, or smaller --ages."
        )
    return cases
