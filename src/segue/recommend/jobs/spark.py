"""Runs a function over chunks of a log's users on the executors of a Spark cluster.

Each chunk is a Spark job of one task; results come back in the order of the chunks, and only this process writes. A
chunk names users by number, so every executor must see the run folder and the data folder at the same paths, as on a
shared file system; an executor that sees other folders is refused. Each Python process of an executor opens them once.
Spark starts as many processes as an executor has tasks at a time, and a task has `spark.task.cpus` threads. The
executors' Python needs the same version of segue.
"""

from __future__ import annotations

import io
import socket
import uuid
from collections import deque
from collections.abc import Iterable
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
from segue.recommend.jobs.runner import Arrays, ChunkFunction, JobContext, Results
from segue.recommend.recommender import COUNTS, INDEX, Recommender

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

LEAST_AHEAD = 32  # chunks submitted before the first result, even if the cluster is small: it may grow with them
MOST_HELD = 1 << 30  # bytes of results that wait here for earlier ones, or for the writer
RESULT = "result binary, refusal string"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Folders:
    """The folders that an executor opens, and the digests by which it checks them."""

    segue: str
    run: str
    run_digest: str
    index_digest: str
    counts_digest: str | None
    """Of the item-to-item counts; None if the run has none."""
    data: str
    data_digest: str


class SparkRunner:
    """Runs on the executors of a session: the active one, that of `remote` (sc://host:port), or a local one."""

    def __init__(self, recommender: Recommender, data: Data, *, remote: str | None = None) -> None:
        self._folders = _folders(recommender, data)
        self._remote = remote

    def map(self, function: ChunkFunction, chunks: Iterable[tuple[T, Arrays]]) -> Results[T]:
        """See `JobRunner.map`. At least two chunks for each core of the cluster are submitted at a time; fewer if their
        results would not fit in memory, estimated from the largest result so far."""
        from pyspark.sql import functions as columns

        pending: deque[tuple[T, Future[Arrays]]] = deque()
        with open_session(self._remote) as spark:
            parts = spark.range(1 << 16).select(columns.spark_partition_id().alias("part"))
            with explained("answer"):
                cores = int(parts.agg(columns.max("part")).collect()[0][0]) + 1  # Spark's default number of partitions
            most, tag = max(LEAST_AHEAD, 2 * cores), f"segue-{uuid.uuid4().hex}"
            ahead, largest = LEAST_AHEAD, 1
            result = columns.udf(partial(_run_chunk, self._folders, function), RESULT, useArrow=False)("chunk")
            pool = ThreadPoolExecutor(most, initializer=spark.addTag, initargs=(tag,))
            try:
                for label, chunk in chunks:
                    pending.append((label, pool.submit(_submit, spark, result, chunk)))
                    while len(pending) > ahead:
                        label, arrays = _first(pending)
                        largest = max(largest, sum(array.nbytes for array in arrays.values()))
                        ahead = min(most, MOST_HELD // largest)
                        yield label, arrays
                while pending:
                    yield _first(pending)
            finally:
                if pending:
                    with explained("answer"):
                        spark.interruptTag(tag)
                pool.shutdown(cancel_futures=True)


def _folders(recommender: Recommender, data: Data) -> _Folders:
    digest = run_digest(recommender)  # refuses a Recommender that differs from its folder
    assert recommender.folder is not None
    return _Folders(
        segue=version("segue"),
        run=str(recommender.folder.absolute()),
        run_digest=digest,
        index_digest=recommender.manifest["files"][INDEX]["sha256"],
        counts_digest=recommender.manifest["files"].get(COUNTS, {}).get("sha256"),
        data=str(data.folder.absolute()),
        data_digest=data.digest,
    )


def _first(pending: deque[tuple[T, Future[Arrays]]]) -> tuple[T, Arrays]:
    label, future = pending[0]
    future.result()  # an interrupt while it runs must find it among those to cancel
    pending.popleft()
    return label, future.result()


def _submit(spark: SparkSession, result: Column, chunk: Arrays) -> Arrays:
    with explained("answer"):
        frame = spark.createDataFrame([(_packed(chunk),)], "chunk binary").coalesce(1)
        row = frame.select(result.alias("returned")).collect()[0].returned
    if row.refusal is not None:
        raise FolderError(row.refusal)
    return _unpacked(row.result)


def _packed(arrays: Arrays) -> bytes:
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return file.getvalue()


def _unpacked(packed: bytes) -> Arrays:
    with np.load(io.BytesIO(packed), allow_pickle=False) as arrays:
        return dict(arrays)


# --- on an executor ---------------------------------------------------------------------------------------------------


def _run_chunk(expected: _Folders, function: ChunkFunction, chunk: bytes) -> tuple[bytes | None, str | None]:
    """The result, or the message of the error: after an exception, Spark would retry and show only a stack trace."""
    try:
        return _packed(function(_context(expected), _unpacked(chunk))), None
    except SegueError as error:
        return None, str(error)


@lru_cache(maxsize=1)
def _context(expected: _Folders) -> JobContext:
    """Open the folders, once in a process; those of an earlier job are closed. `expected`: as the command sees them."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    torch.set_num_threads(context.cpus())
    here = f"the Spark executor on {socket.gethostname()}"
    if version("segue") != expected.segue:
        raise InputError(f"Python on {here} has segue {version('segue')}, this is {expected.segue}; install the same.")
    try:
        recommender, data = Recommender.open(expected.run), Data.open(expected.data)
    except SegueError as error:
        raise FolderError(f"On {here}: {error} Every executor must see the run and the data at these paths.") from error
    if _folders(recommender, data) != expected:
        raise FolderError(
            f"On {here}, {expected.run} or {expected.data} differs from the one here; share the same folders."
        )
    return JobContext(recommender, data)
