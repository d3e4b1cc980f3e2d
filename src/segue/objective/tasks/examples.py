"""Tasks: a batch of histories → inputs, the queries among their states, and the targets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from segue.data.batch import Batch
from segue.kinds import Kind
from segue.objective.tasks.positive import ALL_EVENTS, PositiveEvents


@dataclass(frozen=True, slots=True, eq=False)
class Examples:
    """Inputs, and the targets of their states."""

    inputs: Batch
    targets: np.ndarray  # [M] int64, item numbers
    positions: np.ndarray | None = None  # [M] int64, the input tokens whose states are queries; None: all, in order
    weights: np.ndarray | None = None  # [M] float32; None: equal
    own: tuple[np.ndarray, np.ndarray] | None = None  # rows [P] of the inputs, items [P] int64, no negatives of these
    grouped: bool = False  # whether the targets of one token are no negatives of each other

    @property
    def users(self) -> np.ndarray:
        """The user of each query [M] int64, by row of the inputs."""
        owner = np.repeat(np.arange(len(self.inputs.lengths)), self.inputs.lengths)
        return owner if self.positions is None else owner[self.positions]


@dataclass(frozen=True, slots=True, eq=False)
class TaskFacts:
    """The facts of the log and of the model that tasks need."""

    mask: int = 0  # number of the mask token
    positive: PositiveEvents = ALL_EVENTS
    length: int | None = None  # events that the model reads; None: all


NO_FACTS = TaskFacts()


class Task(Kind, frozen=True):
    """A task is its settings. It turns a batch, in which every user has at least two events, into examples, and samples
    anew at each call."""

    @property
    def extra(self) -> int:
        """Events of a training window beyond the length of the model. Next-item, recency and continuation take at least
        one event out of the inputs; a bidirectional model does not count the mask of the query."""
        return 1

    def __call__(self, batch: Batch, rng: np.random.Generator, facts: TaskFacts = NO_FACTS) -> Examples:
        raise NotImplementedError


def sample_without_replacement(lengths: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Indices of `counts[b]` of each user's `lengths[b]` tokens, sampled uniformly, ascending in the packed batch."""
    owner = np.repeat(np.arange(len(lengths)), lengths)
    shuffled = np.lexsort((rng.random(len(owner)), owner))  # by user, each user's tokens in random order
    position = np.arange(len(owner)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return np.sort(shuffled[position < np.repeat(counts, lengths)])
