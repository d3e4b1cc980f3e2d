"""Questions about the users of a log → answers by the executors of a Spark cluster.

Each question is a Spark job of one task, and comes back in its place; only this process writes. A question names users
by their numbers, so the run folder and the data folder must be at paths that every executor sees, as on a shared file
system; an executor that sees others is refused. Each of an executor's Python processes opens them once, whatever it is
asked afterwards: Spark starts as many as the executor has tasks at a time, and a task has `spark.task.cpus` threads.
The executors' Python needs this segue.
"""

from __future__ import annotations

import io
import socket
import uuid
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.metadata import version
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from segue.data.dataset import Data
from segue.data.spark.session import explained, open_session
from segue.errors import FolderError, InputError, SegueError
from segue.recommend.jobs.embed import run_digest
from segue.recommend.jobs.runner import Arrays, ChunkFunction, JobContext
from segue.recommend.recommender import INDEX, Recommender

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

LEAST_AHEAD = 32  # questions asked before the first is answered, where a cluster is small, or only grows with them
MOST_HELD = 1 << 30  # bytes of answers that wait here for those before them, or for whoever writes
ANSWER = "answer binary, refusal string"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an executor finds what it answers from, and how it knows that it is the same."""

    segue: str
    run: str
    run_digest: str
    index_digest: str
    data: str
    data_digest: str


class SparkRunner:
    """The executors of a session: the one that runs, that of `remote` (sc://host:port), or a local one."""

    def __init__(self, recommender: Recommender, data: Data, *, remote: str | None = None) -> None:
        self._place = _place(recommender, data)
        self._remote = remote

    def answers(
        self, task: ChunkFunction, questions: Iterable[tuple[T, Arrays]]
    ) -> Generator[tuple[T, Arrays], None, None]:
        """As `JobRunner` says. Two questions for every core of the cluster are on their way at a time, or some more.

        Fewer where so many answers would fill the memory: how large they are is known from the first on.
        """
        from pyspark.sql import functions as columns

        waiting: deque[tuple[T, Future[Arrays]]] = deque()
        with open_session(self._remote) as spark:
            most, tag = max(LEAST_AHEAD, 2 * _cores(spark)), f"segue-{uuid.uuid4().hex}"
            ahead, largest = LEAST_AHEAD, 1
            answered = columns.udf(partial(_answered, self._place, task), ANSWER, useArrow=False)("question")
            pool = ThreadPoolExecutor(most, initializer=spark.addTag, initargs=(tag,))
            try:
                for beside, question in questions:
                    waiting.append((beside, pool.submit(_ask, spark, answered, question)))
                    while len(waiting) > ahead:
                        beside, answer = _first(waiting)
                        largest = max(largest, _size(answer))
                        ahead = min(most, MOST_HELD // largest)
                        yield beside, answer
                while waiting:
                    yield _first(waiting)
            finally:
                if waiting:
                    with explained("answer"):
                        spark.interruptTag(tag)
                pool.shutdown(cancel_futures=True)


def _place(recommender: Recommender, data: Data) -> _Place:
    digest = run_digest(recommender)  # refuses what is not as it is in its folder
    assert recommender.folder is not None
    return _Place(
        segue=version("segue"),
        run=str(recommender.folder.absolute()),
        run_digest=digest,
        index_digest=recommender.manifest["files"][INDEX]["sha256"],
        data=str(data.folder.absolute()),
        data_digest=data.digest,
    )


def _cores(spark: SparkSession) -> int:
    """Tasks that run at a time: into as many parts Spark cuts what nothing else cuts."""
    from pyspark.sql import functions as columns

    numbers = spark.range(1 << 16).select(columns.spark_partition_id().alias("part"))
    with explained("answer"):
        return int(numbers.agg(columns.max("part")).collect()[0][0]) + 1


def _first(waiting: deque[tuple[T, Future[Arrays]]]) -> tuple[T, Arrays]:
    beside, answer = waiting[0]
    answer.result()  # while it is awaited it still waits
    waiting.popleft()
    return beside, answer.result()


def _size(answer: Arrays) -> int:
    return sum(array.nbytes for array in answer.values())


def _ask(spark: SparkSession, answered: Column, question: Arrays) -> Arrays:
    """One question, asked and awaited."""
    with explained("answer"):
        frame = spark.createDataFrame([(_packed(question),)], "question binary").coalesce(1)
        rows = frame.select(answered.alias("said")).collect()
    said = rows[0].said
    if said.refusal is not None:
        raise FolderError(said.refusal)
    return _unpacked(said.answer)


def _packed(arrays: Arrays) -> bytes:
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return file.getvalue()


def _unpacked(packed: bytes) -> Arrays:
    with np.load(io.BytesIO(packed), allow_pickle=False) as arrays:
        return dict(arrays)


# --- on an executor ---------------------------------------------------------------------------------------------------


def _answered(place: _Place, task: ChunkFunction, question: bytes) -> tuple[bytes | None, str | None]:
    """The answer, or the sentence why there is none: as an error, Spark would try again, and bury it in a trace."""
    try:
        return _packed(task(_worker(place), _unpacked(question))), None
    except SegueError as error:
        return None, str(error)


@lru_cache(maxsize=1)
def _worker(place: _Place) -> JobContext:
    """Opened once in a process; the one before it, of another place, is given up."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    torch.set_num_threads(context.cpus())
    here = f"the Spark executor on {socket.gethostname()}"
    if version("segue") != place.segue:
        raise InputError(f"Python on {here} has segue {version('segue')}, this is {place.segue}; install the same.")
    try:
        recommender, data = Recommender.open(place.run), Data.open(place.data)
    except SegueError as error:
        raise FolderError(f"On {here}: {error} Every executor must see the run and the data at these paths.") from error
    if _place(recommender, data) != place:
        raise FolderError(f"On {here}, {place.run} or {place.data} has not what it has here; share the same folders.")
    return JobContext(recommender, data)
