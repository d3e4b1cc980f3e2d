"""Good rows on the executors → their final order and numbers, streamed to the driver.

The writer of the Spark engine: executors number and sort, and the driver receives one sorted partition after another
and writes it as the local engine does. It holds the ids and one partition, never the log.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pyarrow as pa

from segue.data.read.blocks import ROW
from segue.data.write.events import Chunk, concatenated
from segue.data.write.writer import Numbers
from segue.errors import InputError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_TYPES: dict[str, type[np.generic]] = {
    "user": np.uint32,
    "item": np.uint32,
    "time": np.int64,
    "kind": np.uint16,
    "value": np.float32,
    "order": np.int64,
}


@dataclass(slots=True)
class SparkEvents:
    """The events of the core, by user, time and order, some whole users at a time."""

    spark: SparkSession
    good: DataFrame
    users: Numbers
    items: Numbers
    kinds: pl.Series | None
    columns: list[str]
    """The columns of `Chunk` that the log has."""
    rows_ordered: bool
    """Whether rows have files and numbers, which order events of equal time."""
    duplicates: int

    def __iter__(self) -> Iterator[Chunk]:
        keys = ["user", "time", "order", "file", ROW, "part", "item", "kind", "value"]
        ordered = self._numbered().repartitionByRange("user").sortWithinPartitions(*keys)
        schema = ", ".join(f"`{name}` binary" for name in self.columns)
        packed = ordered.select(*self.columns).mapInArrow(_packed, schema)
        chunks = (
            Chunk(**{name: np.frombuffer(row[name], dtype=_TYPES[name]) for name in self.columns})
            for row in packed.toLocalIterator()
        )
        for events in _whole_users(chunks):
            if not self.rows_ordered:
                self._refuse_ties(events)
            yield events

    def _numbered(self) -> DataFrame:
        """Good rows of the core's users and items, with final numbers instead of ids."""
        frame = self.good.withColumnRenamed("order_number", "order")
        for column, ids, first in (("user", self.users.ids, 0), ("item", self.items.ids, 1), ("kind", self.kinds, 0)):
            if ids is not None:
                texts = ids.to_arrow(compat_level=pl.CompatLevel.oldest()).cast(pa.string())
                numbers = pa.array(np.arange(first, first + len(ids)), pa.int64())
                table = self.spark.createDataFrame(pa.table({column: texts, "number": numbers}))
                frame = frame.join(table, on=column, how="inner").drop(column).withColumnRenamed("number", column)
        return frame

    def _refuse_ties(self, events: Chunk) -> None:
        """Refuse different events of a user at the same time, which have no order; equal ones need none."""
        same, equal = (events.user[1:] == events.user[:-1]), np.ones(max(0, len(events) - 1), dtype=bool)
        for name, column in events.columns().items():
            bits = column.view(np.int32) if name == "value" else column
            if name in ("time", "order"):
                same &= bits[1:] == bits[:-1]
            equal &= bits[1:] == bits[:-1]
        tied = np.flatnonzero(same & ~equal)
        if len(tied):
            user = self.users.ids[int(events.user[tied[0]])]
            shared = "time and --order" if events.order is not None else "time"
            raise InputError(
                f"Events of the user {user!r} share their {shared}, and the rows of a table have no order of their "
                "own; name a column that orders them with --order, or give the log as files."
            )


def _packed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """On the executors: turn each batch into one row that holds every column as bytes."""
    for batch in batches:
        if batch.num_rows:
            columns: dict[str, Any] = {}
            for name in batch.schema.names:
                values = batch.column(name).to_numpy(zero_copy_only=False)
                values = values.view(np.float32) if name == "value" else values.astype(_TYPES[name])
                columns[name] = pa.array([values.tobytes()], pa.binary())
            yield pa.RecordBatch.from_pydict(columns)


def _whole_users(chunks: Iterator[Chunk]) -> Iterator[Chunk]:
    """Chunks of whole users: the last user of a chunk moves to the next, which may hold more of its events."""
    pending: list[Chunk] = []
    for chunk in chunks:
        joined = concatenated([*pending, chunk])
        last = int(np.searchsorted(joined.user, joined.user[-1]))
        if last:
            yield joined.take(slice(0, last))
        pending = [joined.take(slice(last, len(joined)))]
    yield from pending
