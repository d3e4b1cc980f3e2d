"""Questions about the users of a log → answers: by this process, or by others that hold the same run and data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Protocol, TypeVar

import numpy as np

from segue.data.batch import Batch, cut_by_budget, ragged_rows
from segue.data.dataset import Data
from segue.data.sequences import Sequences
from segue.data.timestamps import MICROSECONDS
from segue.recommend.recommender import Recommender

MOST_EVENTS = 2_000_000  # of histories in memory at a time

T = TypeVar("T")
Arrays = dict[str, np.ndarray]
"""A question, or its answer: what can be sent from process to process as it is."""


class LogHistories:
    """Users' events in a data folder, in the numbers of a run, which may have been trained on other data."""

    def __init__(self, data: Data, recommender: Recommender) -> None:
        self.sequences = data.sequences
        numbers = recommender.vocabulary.numbers(data.vocabulary.table["id"].to_list(), unknown="zero")
        known = np.where(recommender.answerable[numbers], numbers, 0)
        self.translated = np.concatenate(([0], known))  # [data's items + 1]; 0 is unknown to the run
        self.kinds = recommender.known.kinds.numbers(data.kinds) if recommender.known.kinds else None  # [data's kinds]
        self.has_times = data.manifest["has_time"]

    def within(self, sequences: Sequences) -> LogHistories:
        """The same over some of the users, numbered as they are there."""
        some = copy.copy(self)
        some.sequences = sequences
        return some

    def of(self, users: np.ndarray, moments: np.ndarray | None = None) -> Iterator[tuple[np.ndarray, Batch]]:
        """(rows of `users`, their histories of known items) one after another, a bounded number of events at a time.

        users [n]: the data's numbers, -1 for one that it does not have. moments [n]: microseconds; only events before
        them are used.
        """
        offsets = self.sequences.offsets
        known = users >= 0
        starts, lengths = np.zeros((2, len(known)), dtype=np.int64)
        starts[known] = offsets[users[known]]
        lengths[known] = offsets[users[known] + 1] - starts[known]
        for rows in cut_by_budget(lengths, MOST_EVENTS):
            yield rows, self._gathered(starts[rows], lengths[rows], None if moments is None else moments[rows])

    def _gathered(self, starts: np.ndarray, lengths: np.ndarray, moments: np.ndarray | None) -> Batch:
        rows = ragged_rows(starts, lengths)
        owners = np.repeat(np.arange(len(starts)), lengths)
        items = self.translated[self.sequences.items[rows]]
        kept = items > 0
        if moments is not None:
            kept &= self.sequences.times[rows] < moments[owners]
        rows, values = rows[kept], self.sequences.values
        times = self.sequences.times[rows] // MICROSECONDS
        return Batch(
            items=items[kept],
            times=times if self.has_times else np.zeros_like(times),  # an order is no time
            lengths=np.bincount(owners[kept], minlength=len(starts)),
            query_times=None if moments is None else moments // MICROSECONDS,
            kinds=self._kinds(rows),
            values=None if values is None else values[rows],
        )

    def _kinds(self, rows: np.ndarray) -> np.ndarray | None:
        """In the numbers of the run; None where it, or the log, tells none apart."""
        if self.kinds is None or self.sequences.kinds is None:
            return None
        kinds: np.ndarray = self.kinds[self.sequences.kinds[rows]]
        return kinds


class JobContext:
    """What every process that answers has: a run, and the histories of a data folder in its numbers."""

    def __init__(self, recommender: Recommender, data: Data) -> None:
        self.recommender = recommender
        self.data = data
        self.histories = LogHistories(data, recommender)


ChunkFunction = Callable[[JobContext, Arrays], Arrays]
"""Gives the same answer wherever the worker is."""


class JobRunner(Protocol):
    """Those who do a task."""

    def answers(
        self, task: ChunkFunction, questions: Iterable[tuple[T, Arrays]]
    ) -> Generator[tuple[T, Arrays], None, None]:
        """The answer to each question, in their order; what stands beside the question stands beside the answer.

        Questions are read as they are needed, a few ahead at most. Close the generator where not all is read.
        """


class LocalRunner:
    """This process, which answers one question after another; torch uses all cores for each."""

    def __init__(self, recommender: Recommender, data: Data) -> None:
        self._worker = JobContext(recommender, data)

    def answers(
        self, task: ChunkFunction, questions: Iterable[tuple[T, Arrays]]
    ) -> Generator[tuple[T, Arrays], None, None]:
        for beside, question in questions:
            yield beside, task(self._worker, question)
