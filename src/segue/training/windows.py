"""Users' histories → the windows that training reads, in batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from segue.data.batch import Batch, cut_by_budget, epoch_batches, gather, window_starts
from segue.data.sequences import Sequences
from segue.errors import TrainingError


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """Window i is rows starts[i] .. ends[i] of one user, at least two of them."""

    sequences: Sequences
    starts: np.ndarray
    ends: np.ndarray

    @property
    def events(self) -> int:
        """Events of an epoch: all but the first of each window, which is no target."""
        return int((self.ends - self.starts - 1).sum())

    def epoch_events(self, wanted: int) -> int:
        """Events of an epoch of about so many; 0 is every event once."""
        return wanted if 0 < wanted < self.events else self.events * self._passes(wanted)

    def _passes(self, wanted: int) -> int:
        return max(1, round(wanted / self.events))

    def batches(self, tokens: int, rng: np.random.Generator, *, events: int = 0) -> Iterator[Batch]:
        """The windows of an epoch of about so many events (see `epoch_events`), in random order."""
        if 0 < events < self.events:
            order = rng.permutation(len(self.starts))
            sizes = np.cumsum((self.ends - self.starts - 1)[order])
            some = order[: max(1, int(np.searchsorted(sizes, events, side="right")))]
            yield from epoch_batches(self.sequences, self.starts[some], self.ends[some], tokens=tokens, rng=rng)
            return
        starts, ends = (np.tile(each, self._passes(events)) for each in (self.starts, self.ends))
        yield from epoch_batches(self.sequences, starts, ends, tokens=tokens, rng=rng)

    def in_order(self, tokens: int) -> Iterator[Batch]:
        """Every window once, in order."""
        return _batches(self.sequences, self.starts, self.ends, tokens)

    def histories(self, tokens: int) -> Iterator[Batch]:
        """Each user's whole history up to the end of its newest window."""
        users, user = np.unique(self.sequences.owners(self.starts), return_inverse=True)
        ends = np.zeros(len(users), dtype=np.int64)
        np.maximum.at(ends, user, self.ends)
        yield from _batches(self.sequences, np.asarray(self.sequences.offsets)[users], ends, tokens)


def _batches(sequences: Sequences, starts: np.ndarray, ends: np.ndarray, tokens: int) -> Iterator[Batch]:
    """Batches of about so many tokens."""
    for some in cut_by_budget(ends - starts, tokens):
        yield gather(sequences, starts[some], ends[some], users=sequences.owners(starts[some]))


def training_windows(sequences: Sequences, ends: np.ndarray, *, length: int, stride: int | None = None) -> Windows:
    """The newest `length` events of each user before `ends` [U], and with a `stride` also older windows of that length,
    each starting so many events before the next. Windows of fewer than two events are left out."""
    begins, ends = np.asarray(sequences.offsets)[:-1], np.asarray(ends)
    if stride is None:
        starts = np.maximum(begins, ends - length)
    else:
        owner, positions = window_starts(ends - begins, length, stride)
        starts = begins[owner] + positions
        ends = np.minimum(ends[owner], starts + length)
    useful = ends - starts >= 2
    if not useful.any():
        raise TrainingError(
            "No user has two events to learn from before the split; give a longer log or lower --min-user."
        )
    return Windows(sequences, starts[useful], ends[useful])
