"""Runs a function over chunks of a log's users: in this process, or in others that open the same run and data."""

from __future__ import annotations

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
"""A chunk, or its result: it can be sent between processes without pickle."""


class JobContext:
    """A run and a data folder, which every process of a job opens. It reads the folder's histories in the run's item
    numbers; the run may have been trained on other data."""

    def __init__(self, recommender: Recommender, data: Data) -> None:
        self.recommender = recommender
        self.data = data
        numbers = recommender.vocabulary.numbers(data.vocabulary.table["id"].to_list(), unknown="zero")
        known = np.where(recommender.answerable[numbers], numbers, 0)
        self._numbers = np.concatenate(([0], known))  # [data's items + 1]: the run's numbers; 0 is unknown to the run
        self._kinds = recommender.known.kinds.numbers(data.kinds) if recommender.known.kinds else None  # [data's kinds]

    def histories(
        self, sequences: Sequences, users: np.ndarray, before: np.ndarray | None = None
    ) -> Iterator[tuple[np.ndarray, Batch]]:
        """Yield (rows of `users`, their histories of known items), a bounded number of events at a time.

        sequences: of the data, or of some of its users.
        users [n]: numbers in `sequences`; -1 is a user that it does not have.
        before [n]: microseconds; only earlier events are used.
        """
        known = users >= 0
        starts, lengths = np.zeros((2, len(known)), dtype=np.int64)
        starts[known] = sequences.offsets[users[known]]
        lengths[known] = sequences.offsets[users[known] + 1] - starts[known]
        for some in cut_by_budget(lengths, MOST_EVENTS):
            rows, owners = ragged_rows(starts[some], lengths[some]), np.repeat(np.arange(len(some)), lengths[some])
            items = self._numbers[sequences.items[rows]]
            used = items > 0
            if before is not None:
                used &= sequences.times[rows] < before[some][owners]
            rows, kinds, values = rows[used], sequences.kinds, sequences.values
            times = sequences.times[rows] // MICROSECONDS
            yield (
                some,
                Batch(
                    items=items[used],
                    times=times if self.data.manifest["has_time"] else np.zeros_like(times),  # an order is no time
                    lengths=np.bincount(owners[used], minlength=len(some)),
                    query_times=None if before is None else before[some] // MICROSECONDS,
                    kinds=None if self._kinds is None or kinds is None else self._kinds[kinds[rows]],
                    values=None if values is None else values[rows],
                ),
            )


ChunkFunction = Callable[[JobContext, Arrays], Arrays]
"""Computes the result of a chunk; it is the same in every process."""
Results = Generator[tuple[T, Arrays], None, None]
"""The label of each chunk with its result."""


class JobRunner(Protocol):
    """Applies a function to chunks of users."""

    def map(self, function: ChunkFunction, chunks: Iterable[tuple[T, Arrays]]) -> Results[T]:
        """Yield each chunk's label with its result, in the order of the chunks.

        Chunks are read when they are needed, a few ahead at most. Close the generator if not all results are read.
        """


class LocalRunner:
    """Runs in this process, one chunk after another; torch uses all cores for each."""

    def __init__(self, recommender: Recommender, data: Data) -> None:
        self._context = JobContext(recommender, data)

    def map(self, function: ChunkFunction, chunks: Iterable[tuple[T, Arrays]]) -> Results[T]:
        for label, chunk in chunks:
            yield label, function(self._context, chunk)
