"""Tasks whose targets are positive events after a state: the first one, or those of the following days.

A target is later than the state's own event by at least a second. A training window holds the inputs and, after them,
`labels` events that are only targets. Its inputs are its oldest events, as many as the model reads, up to the last
event that has a target. So in a history of five events in a month the first four are inputs with targets, and only the
last is no input. In a history longer than a window the newest `labels` events are never inputs. A user without any
target is left out of the inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from segue.data.batch import Batch, ragged_rows
from segue.errors import SettingsError
from segue.kinds import Count, PositiveNumber
from segue.objective.tasks.examples import NO_FACTS, Examples, Task, TaskFacts
from segue.objective.tasks.positive import Positive

SECONDS_A_DAY = 86400


@dataclass(frozen=True, slots=True, eq=False)
class Ahead:
    """The positive events of a batch, and the possible targets of each token: positives[first : last]."""

    positives: np.ndarray  # [P] int64, indices of tokens, ascending
    first: np.ndarray  # [T] int64
    last: np.ndarray  # [T] int64

    @property
    def any(self) -> np.ndarray:
        return self.last > self.first  # [T] bool


def positives_ahead(batch: Batch, positive: np.ndarray, seconds: int | None) -> Ahead:
    """For each token, the `positive` [T] events of the same user that are at most `seconds` later; None: all later."""
    owner = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
    since = batch.times - batch.times.min()
    latest = since.max()
    keys = owner * (latest + 1) + since  # ascending: by user, then by time
    span = latest - since if seconds is None else np.minimum(seconds, latest - since)
    positives = np.flatnonzero(positive)
    return Ahead(
        positives=positives,
        first=np.searchsorted(keys[positives], keys, side="right"),
        last=np.searchsorted(keys[positives], keys + span, side="right"),
    )


class ActionTask(Task, frozen=True):
    """Tasks whose targets are positive events with a later timestamp than the input's."""

    positive: tuple[Positive, ...] = ()
    """The events that are targets, such as [{kind = "buy"}, {kind = "rate", min_value = 4.0}]; without any, all events.
    No positive event of a user's training history is a negative of that user. Evaluation by window, and validation with
    evaluate.days, use them too; validation and reports of the next event use every kind."""


class NextAction(ActionTask, frozen=True, tag="next-action"):
    """Every state predicts the first later positive event. If every event is positive and no two have the same
    timestamp, that is `next-item`."""

    def __call__(self, batch: Batch, rng: np.random.Generator, facts: TaskFacts = NO_FACTS) -> Examples:  # noqa: ARG002
        ahead = positives_ahead(batch, facts.positive(batch), None)
        queries = np.flatnonzero(ahead.any)
        return _examples(batch, ahead, queries, ahead.positives[ahead.first[queries]])


class _DaysAhead(ActionTask, frozen=True):
    """Base of the tasks whose targets are the events of some days."""

    days: PositiveNumber = 28.0
    """How far ahead targets may lie, in days; at least a second, 1 / 86400."""
    labels: Count = 32
    """Events after the inputs that a training window keeps as targets. In a history longer than a window, its
    newest `labels` events are never inputs."""

    def __post_init__(self) -> None:
        if self.days < 1 / SECONDS_A_DAY:
            raise SettingsError(f"objective.task.days must be at least a second, 1 / 86400, got {self.days}.")

    @property
    def extra(self) -> int:
        return self.labels

    def ahead(self, batch: Batch, facts: TaskFacts) -> tuple[Ahead, np.ndarray]:
        """The possible targets of each token, and the tokens that may be queries [T] bool: inputs that have any."""
        ahead = positives_ahead(batch, facts.positive(batch), round(self.days * SECONDS_A_DAY))
        return ahead, ahead.any & (facts.length is None or _positions(batch.lengths) < facts.length)


class DenseAllAction(_DaysAhead, frozen=True, tag="dense-all-action"):
    """Every state predicts one of the positive events in the days after it, sampled uniformly at each call
    (PinnerFormer: Pancha and others, "PinnerFormer: Sequence Modeling for User Representation at Pinterest", KDD
    2022)."""

    def __call__(self, batch: Batch, rng: np.random.Generator, facts: TaskFacts = NO_FACTS) -> Examples:
        ahead, possible = self.ahead(batch, facts)
        queries = np.flatnonzero(possible)
        samples = rng.integers(ahead.first[queries], ahead.last[queries])
        return _examples(batch, ahead, queries, ahead.positives[samples])


class AllAction(_DaysAhead, frozen=True, tag="all-action"):
    """The newest state predicts all positive events in the days after it, at most the first `labels`.

    The last input is sampled at each call among the events that have a target and at most `labels` events after them.
    If there is none, it is the last event that has a target. So the inputs of a long history's newest window always end
    at the same event, those of a short history at any.
    """

    def __call__(self, batch: Batch, rng: np.random.Generator, facts: TaskFacts = NO_FACTS) -> Examples:
        ahead, possible = self.ahead(batch, facts)
        lengths, positions = batch.lengths, _positions(batch.lengths)
        owner = np.repeat(np.arange(len(lengths)), lengths)
        preferred = lengths[owner] - 1 - positions <= self.labels
        rank = np.where(preferred, lengths[owner] + rng.random(len(owner)), positions)
        rank[~possible] = -1
        best = np.lexsort((rank, owner))[np.cumsum(lengths) - 1]  # each user's token of the highest rank
        newest = best[rank[best] >= 0]  # the last input of each user that has a target
        counts = np.minimum(ahead.last - ahead.first, self.labels)[newest]
        targets = ahead.positives[ragged_rows(ahead.first[newest], counts)]
        return _examples(batch, ahead, np.repeat(newest, counts), targets)


def _positions(lengths: np.ndarray) -> np.ndarray:
    """Each token's position in its user's window [T]."""
    return np.asarray(np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths))


def _examples(batch: Batch, ahead: Ahead, queries: np.ndarray, targets: np.ndarray) -> Examples:
    """Examples of the tokens `queries` [M], ascending, and `targets` [M]; a user's inputs end at its last query."""
    owner, begins = np.repeat(np.arange(len(batch.lengths)), batch.lengths), np.cumsum(batch.lengths) - batch.lengths
    positions, lengths = _positions(batch.lengths), np.zeros_like(batch.lengths)
    np.maximum.at(lengths, owner[queries], positions[queries] + 1)
    inputs, rows = positions < lengths[owner], lengths > 0
    own, users = ahead.positives[rows[owner[ahead.positives]]], None if batch.users is None else batch.users[rows]
    return Examples(
        inputs=batch.tokens(inputs, lengths[rows], query_times=batch.times[(begins + lengths)[rows]], users=users),
        targets=batch.items[targets],
        positions=(np.cumsum(inputs) - 1)[queries],
        own=((np.cumsum(rows) - 1)[owner[own]], batch.items[own]),
    )
