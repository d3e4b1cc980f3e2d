"""Tasks that look days ahead: a state is asked for what its user did after it, and not only for what came next.

Only positive events are asked for, and only events later than the state's own, by the clock: what happened at the same
second is no answer. A training window holds the inputs and, after them, `labels` events that are only asked for. Its
inputs are its oldest events, as many as the model reads, but none after the last of which anything can be asked. So a
short history is used up: of five events in a month the first four are inputs, each is asked, and the last is the only
one that is never read. Of a history longer than a window the newest `labels` events are never read. A user of whom
nothing can be asked is left out of the inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from segue.data.batch import Batch
from segue.errors import SettingsError
from segue.kinds import Count, PositiveNumber
from segue.objective.tasks.examples import EXTRA, Examples, Task, TaskSettings
from segue.objective.tasks.positive import Positive, PositiveEvents

SECONDS_A_DAY = 86400


@dataclass(frozen=True, slots=True, eq=False)
class Ahead:
    """The positive events of a batch, and those of them that each token may be asked for: places[first : last]."""

    places: np.ndarray  # [P] int64, the tokens that are positive, ascending
    first: np.ndarray  # [T] int64
    last: np.ndarray  # [T] int64

    @property
    def any(self) -> np.ndarray:
        return self.last > self.first  # [T] bool


def positives_ahead(batch: Batch, positive: np.ndarray, seconds: int | None) -> Ahead:
    """Of each token the positive events [T] bool of the same user, later by at most so many seconds, or by any."""
    owner = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
    since = batch.times - batch.times.min()
    furthest = since.max()
    moments = owner * (furthest + 1) + since  # ascending: users one after another, each oldest first
    until = furthest - since if seconds is None else np.minimum(seconds, furthest - since)
    places = np.flatnonzero(positive)
    return Ahead(
        places=places,
        first=np.searchsorted(moments[places], moments, side="right"),
        last=np.searchsorted(moments[places], moments + until, side="right"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NextAction:
    """Every state is asked for the first positive event after it. Where every event is positive and no two come at the
    same second, that is `next_item`."""

    positive: PositiveEvents

    @property
    def extra(self) -> int:
        return EXTRA

    def __call__(self, batch: Batch, rng: np.random.Generator) -> Examples:  # noqa: ARG002 (nothing is drawn)
        ahead = positives_ahead(batch, self.positive(batch), None)
        asked = np.flatnonzero(ahead.any)
        return _examples(batch, ahead, asked, ahead.places[ahead.first[asked]])


@dataclass(frozen=True, slots=True, kw_only=True)
class _DaysAhead:
    """What tasks know that ask for the events of some days."""

    positive: PositiveEvents
    seconds: int
    """How far ahead."""
    length: int
    """Inputs of a window at most."""
    labels: int
    """Events of a window after its inputs at most."""

    @property
    def extra(self) -> int:
        return self.labels


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseAllAction(_DaysAhead):
    """Every state is asked for one of the positive events in the days after it, drawn anew each time, all with equal
    chance (PinnerFormer: Pancha and others, "PinnerFormer: Sequence Modeling for User Representation at Pinterest", KDD
    2022)."""

    def __call__(self, batch: Batch, rng: np.random.Generator) -> Examples:
        ahead = positives_ahead(batch, self.positive(batch), self.seconds)
        asked = np.flatnonzero(ahead.any & (_places(batch.lengths) < self.length))
        drawn = rng.integers(ahead.first[asked], ahead.last[asked])
        return _examples(batch, ahead, asked, ahead.places[drawn])


@dataclass(frozen=True, slots=True, kw_only=True)
class AllAction(_DaysAhead):
    """Only the newest state is asked, for all positive events in the days after it, the `labels` next at most.

    Where the inputs end is drawn anew each time: after any event that leaves at most `labels` events to ask for, if
    there is something to ask; else after the last where there is. So the newest window of a long history always ends
    its inputs at the same event, and a short one shows every part of it.
    """

    def __call__(self, batch: Batch, rng: np.random.Generator) -> Examples:
        ahead = positives_ahead(batch, self.positive(batch), self.seconds)
        newest = self._newest(ahead, batch.lengths, rng)
        counts = np.minimum(ahead.last - ahead.first, self.labels)[newest]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        answers = ahead.places[np.repeat(ahead.first[newest], counts) + within]
        return _examples(batch, ahead, np.repeat(newest, counts), answers)

    def _newest(self, ahead: Ahead, lengths: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """The token at which each user's inputs end, of the users that have one."""
        places, owner = _places(lengths), np.repeat(np.arange(len(lengths)), lengths)
        preferred = lengths[owner] - 1 - places <= self.labels
        rank = np.where(preferred, lengths[owner] + rng.random(len(owner)), places)
        rank[~ahead.any | (places >= self.length)] = -1
        best = np.lexsort((rank, owner))[np.cumsum(lengths) - 1]  # of each user's tokens the one of the highest rank
        return np.asarray(best[rank[best] >= 0])


def _places(lengths: np.ndarray) -> np.ndarray:
    """Each token's place in its user's window [T]."""
    return np.asarray(np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths))


def _examples(batch: Batch, ahead: Ahead, asked: np.ndarray, answers: np.ndarray) -> Examples:
    """The tokens `asked` [M], ascending, for the tokens `answers` [M]; inputs end at each user's last one asked."""
    owner, begins = np.repeat(np.arange(len(batch.lengths)), batch.lengths), np.cumsum(batch.lengths) - batch.lengths
    places, lengths = _places(batch.lengths), np.zeros_like(batch.lengths)
    np.maximum.at(lengths, owner[asked], places[asked] + 1)
    kept, known = places < lengths[owner], lengths > 0
    own, users = ahead.places[known[owner[ahead.places]]], None if batch.users is None else batch.users[known]
    return Examples(
        inputs=batch.tokens(kept, lengths[known], query_times=batch.times[(begins + lengths)[known]], users=users),
        targets=batch.items[answers],
        positions=(np.cumsum(kept) - 1)[asked],
        own=((np.cumsum(known) - 1)[owner[own]], batch.items[own]),
    )


class ActionTaskSettings(TaskSettings, frozen=True):
    """Tasks whose targets are positive events later than the input, by the clock."""

    positive: tuple[Positive, ...] = ()
    """The events that are targets, such as [{kind = "buy"}, {kind = "rate", min_value = 4.0}]; without any, all events.
    No positive event of a user's training history is a negative of that user. Evaluation by window, and validation with
    evaluate.days, use them too; validation and reports of the next event use every kind."""


class NextActionSettings(ActionTaskSettings, frozen=True, tag="next-action"):
    """Every state predicts the first later positive event."""

    def task(self, n_items: int, kinds: Sequence[str], length: int | None) -> Task:  # noqa: ARG002
        return NextAction(positive=PositiveEvents(self.positive, kinds))


class _DaysAheadSettings(ActionTaskSettings, frozen=True):
    days: PositiveNumber = 28.0
    """How far ahead targets may lie, in days; at least a second, 1 / 86400."""
    labels: Count = 32
    """Events after the inputs that a training window keeps as targets. The newest so many events of a history longer
    than a window are never inputs."""

    def __post_init__(self) -> None:
        if self.days < 1 / SECONDS_A_DAY:
            raise SettingsError(f"objective.task.days must be at least a second, 1 / 86400, got {self.days}.")

    def task(self, n_items: int, kinds: Sequence[str], length: int | None) -> Task:  # noqa: ARG002
        assert length is not None, "how much of a window is input depends on how much the model reads"
        build = AllAction if isinstance(self, AllActionSettings) else DenseAllAction
        return build(
            positive=PositiveEvents(self.positive, kinds),
            seconds=round(self.days * SECONDS_A_DAY),
            length=length,
            labels=self.labels,
        )


class DenseAllActionSettings(_DaysAheadSettings, frozen=True, tag="dense-all-action"):
    """Every state predicts one of the positive events in the days after it, sampled anew each epoch (PinnerFormer)."""


class AllActionSettings(_DaysAheadSettings, frozen=True, tag="all-action"):
    """The newest state predicts all positive events in the days after it, the `labels` next at most."""
