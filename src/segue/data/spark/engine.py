"""The Spark engine: a log → the core of its events, in their final order.

Executors read, check, count and sort; the driver holds the ids, the rejected rows and the partition that it is
writing. Rows, numbers and errors are those of the local engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import narwhals as nw
import numpy as np
import polars as pl
import pyarrow as pa

from segue.data.read.blocks import ROW
from segue.data.read.log import Log, ProgressCallback, TimeDecision, log_of_inputs
from segue.data.read.times import mixture
from segue.data.rules.rejected import Rejected, example
from segue.data.rules.rows import MAX_KINDS, k_core, no_user_left, refuse_many_kinds
from segue.data.settings import PrepareSettings
from segue.data.spark.reader import SparkSource, open_source
from segue.data.spark.session import explained, open_session
from segue.data.spark.writer import SparkEvents
from segue.data.timestamps import MICROSECONDS
from segue.data.write.writer import Core, final_numbers
from segue.errors import InputError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@contextmanager
def open_spark_engine(source: Any, settings: PrepareSettings, progress: ProgressCallback) -> Iterator[_SparkEngine]:
    """Open a session and the log in it."""
    with open_session(settings.spark_remote) as spark, explained("prepare the log"), ExitStack() as releases:
        spark_source = open_source(spark, source, named=set(settings.named_columns().values()))
        log = log_of_inputs(spark_source.inputs, settings)
        yield _SparkEngine(log, spark, spark_source, settings, progress, releases)


@dataclass(slots=True)
class _SparkEngine:
    """Reads and sorts an opened log on Spark's executors."""

    log: Log
    spark: SparkSession
    source: SparkSource
    settings: PrepareSettings
    progress: ProgressCallback
    releases: ExitStack
    """Releases the frames that executors hold."""
    _rows: int = 0

    def count_forms(self) -> dict[str, int]:
        self.progress("reading the times", 0, 1)
        counts = self.source.count_forms(self.log.columns)
        self.progress("reading the times", 1, 1)
        return counts

    def core(self, times: TimeDecision) -> Core:
        timed = times.rule is not None
        if not timed and not self.source.files:
            raise InputError(
                "The rows of a table have no order, and no column gives one; name the time with --time, or a column "
                "of whole numbers with --order."
            )
        self.progress("reading", 0, 1)
        checked = self._persist(self.source.checked(self.log.columns, times.rule))
        rejected, n_good = self._rejected(checked)
        self._rows = n_good + rejected.total
        self.progress("reading", 1, 1)
        rejected.check(self._rows, most=self.settings.max_rejected, hint=mixture(times.counts))
        if rejected.total:
            rejected.frames.append(self._rejected_rows(checked))
        good = checked.filter("reason IS NULL").drop("reason", "texts", "line")
        if not timed:
            good = self._persist(_with_row_order(self.spark, good))
        keys = ["user", "item", "kind", "value", *(["time"] if timed else [])]
        if self.settings.drop_duplicates:
            good = self._persist(_distinct(good, keys))
            n_distinct = good.count()
        else:
            n_distinct = good.select(*keys).distinct().count()
        return self._core(good, rejected, n_good, duplicates=n_good - n_distinct)

    def described(self) -> list[dict[str, Any]]:
        """The sources without digests, as the driver does not read the files."""
        if not self.source.files:
            return [{"table": self.log.inputs[0].label, "rows": self._rows}]
        return [{"path": file.path, "bytes": file.size} for file in self.source.files]

    def _persist(self, frame: DataFrame) -> DataFrame:
        """Keep a frame on the executors, in memory or on their disks, until the work is done."""
        persisted = frame.persist()
        self.releases.callback(persisted.unpersist)
        return persisted

    def _label(self, number: int | None) -> str:
        return self.log.inputs[0].label if number is None else self.source.files[number].label

    def _rejected(self, checked: DataFrame) -> tuple[Rejected, int]:
        """The rejected rows, counted by reason with the first row of each; and the number of good rows."""
        from pyspark.sql import functions as F

        counts: dict[str | None, int] = dict(checked.groupBy("reason").count().collect())
        rejected = Rejected(list(self.log.columns.names), max_stored=0)
        rejected.counts.update({reason: count for reason, count in counts.items() if reason is not None})
        if rejected.total:
            first = F.min(F.struct("file", ROW, "part", "line", "texts")).alias("first")
            firsts = checked.filter("reason IS NOT NULL").groupBy("reason").agg(first).collect()
            for reason, (file, row, _, line, texts) in firsts:
                rejected.examples[reason] = example(self._label(file), row, [line] if texts is None else texts)
        return rejected, counts.get(None, 0)

    def _rejected_rows(self, checked: DataFrame) -> pl.DataFrame:
        bad = checked.filter("reason IS NOT NULL").select("file", ROW, "part", "reason", "texts", "line")
        frame = pl.DataFrame(pl.from_arrow(bad.toArrow())).sort("file", ROW, "part")
        roles = list(self.log.columns.names)
        labels = [self._label(number) for number in frame["file"]]
        texts = [pl.col("texts").list.get(index, null_on_oob=True).alias(role) for index, role in enumerate(roles)]
        return (
            frame.with_columns(pl.Series("file", labels, dtype=pl.String), *texts)
            .drop("part", "texts")
            .rename({"line": "text"})
        )

    def _core(self, good: DataFrame, rejected: Rejected, n_good: int, *, duplicates: int) -> Core:
        """Keep users and items with enough events, and number them by id."""
        settings, columns = self.settings, self.log.columns.names
        core = k_core(
            nw.from_native(good),
            min_user=settings.min_user,
            min_item=settings.min_item,
            # computed and stored on the executors, without its plan: plans would grow with every round
            settle=lambda frame: nw.from_native(frame.to_native().localCheckpoint()),
        )
        numbers = []
        for survivors, column in zip(core, ("user", "item"), strict=True):
            table = survivors.to_native().toArrow()
            ids = pl.Series(pl.from_arrow(table.column(column)), dtype=pl.String)
            numbers.append(final_numbers(ids, np.arange(len(ids)), table.column("events").to_numpy()))
        users, items = numbers
        if not len(users.ids):
            counts = good.groupBy("user").count().toArrow().column("count").to_numpy()
            raise no_user_left(n_good, good.select("item").distinct().count(), counts, settings)
        kinds = None
        if "kind" in columns:
            table = good.select("kind").distinct().limit(MAX_KINDS + 1).toArrow()
            refuse_many_kinds(table.num_rows)
            kinds = pl.Series(pl.from_arrow(table.column(0)), dtype=pl.String).sort()
        return Core(
            users=users,
            items=items,
            kinds=kinds,
            valued="value" in columns,
            rows=self._rows,
            rejected=rejected,
            events=SparkEvents(
                spark=self.spark,
                good=good,
                users=users,
                items=items,
                kinds=kinds,
                columns=["user", "item", "time", *(role for role in ("kind", "value", "order") if role in columns)],
                rows_ordered=bool(self.source.files),
                duplicates=duplicates,
            ),
        )


def _with_row_order(spark: SparkSession, good: DataFrame) -> DataFrame:
    """Set the time of each good row to its running number."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    counts: dict[int, int] = dict(good.groupBy("file").count().collect())
    files = sorted(counts)
    before = np.cumsum([0, *(counts[file] for file in files)])[:-1]
    table = pa.table({"file": pa.array(files, pa.int32()), "before": pa.array(before, pa.int64())})
    index = F.row_number().over(Window.partitionBy("file").orderBy(ROW, "part")).cast("long") - 1
    numbered = good.withColumn("time", index).join(spark.createDataFrame(table), on="file", how="inner")
    return numbered.withColumn("time", (F.col("time") + F.col("before")) * MICROSECONDS).drop("before")


def _distinct(good: DataFrame, keys: list[str]) -> DataFrame:
    """The first row, in the log's order, of each set of rows with equal `keys`."""
    from pyspark.sql import functions as F

    others = ["file", ROW, "part", "order_number", *({"time"} - set(keys))]
    first = good.groupBy(*keys).agg(F.min(F.struct(*others)).alias("first"))
    return first.select(*keys, *(f"first.{name}" for name in others))
