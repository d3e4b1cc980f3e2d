"""The Spark engine: a log → the core of its events, in their final order.

Reading, judging, counting and sorting happen on the executors; the driver holds the ids, the rejected rows and what it
is just writing. Rows, numbers and refusals are those of the local engine.
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
from segue.data.read.gather import (
    MOST_KINDS,
    Log,
    Progress,
    TimeLook,
    decided_times,
    known_log,
    known_times,
    nobody_left,
    refuse_many_kinds,
    refuse_single_item,
    refuse_useless,
)
from segue.data.rules.judge import k_core
from segue.data.rules.rejected import Rejected, example
from segue.data.settings import PrepareSettings
from segue.data.spark.reader import SparkSource, open_source
from segue.data.spark.session import explained, open_session
from segue.data.spark.writer import SparkEvents, numbered_events
from segue.data.timestamps import MICROSECONDS
from segue.data.write.writer import Core, Numbers, final_numbers
from segue.errors import InputError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@contextmanager
def open_spark_engine(
    source: Any, settings: PrepareSettings, progress: Progress, *, remote: str | None
) -> Iterator[_SparkEngine]:
    """Open a session and the log in it."""
    with open_session(remote) as spark, explained("prepare the log"), ExitStack() as held:
        opened = open_source(spark, source, named=set(settings.named_columns().values()))
        log = known_log(opened.inputs, settings)
        yield _SparkEngine(log, spark, opened, settings, progress, held)


@dataclass(slots=True)
class _SparkEngine:
    """An opened log and what to do with it."""

    log: Log
    spark: SparkSession
    source: SparkSource
    settings: PrepareSettings
    progress: Progress
    held: ExitStack
    """Gives back what executors hold for us."""
    _rows: int = 0

    def look_at_times(self) -> TimeLook:
        known = known_times(self.log, self.settings)
        if known is not None:
            return known
        self.progress("looking at the times", 0, 1)
        votes = self.source.votes(self.log.columns)
        self.progress("looking at the times", 1, 1)
        return decided_times(votes, self.settings)

    def core(self, look: TimeLook) -> Core:
        timed = look.rule is not None
        if not timed and not self.source.files:
            raise InputError(
                "The rows of a table have no order, and no column gives one; name the time with --time, or a column "
                "of whole numbers with --order."
            )
        self.progress("reading", 0, 1)
        judged = self._hold(self.source.judged(self.log.columns, look.rule))
        rejected, kept = self._rejected(judged)
        self._rows = kept + rejected.total
        self.progress("reading", 1, 1)
        refuse_useless(rejected, rows=self._rows, kept=kept, look=look, settings=self.settings)
        if rejected.total:
            rejected.hold_all(self._rejected_rows(judged))
        good = judged.filter("reason IS NULL").drop("reason", "told", "text")
        if not timed:
            good = self._hold(_with_row_order(self.spark, good))
        if self.settings.drop_duplicates:
            good = self._hold(_different(good, timed=timed))
            left = good.count()
        else:
            left = good.select(*_compared(timed=timed)).distinct().count()
        return self._counted(good, rejected, kept, duplicates=kept - left)

    def described(self) -> list[dict[str, Any]]:
        """Without digests: the driver does not see the files."""
        if not self.source.files:
            return [{"table": self.log.inputs[0].label, "rows": self._rows}]
        return [{"path": file.path, "bytes": file.size} for file in self.source.files]

    def _hold(self, frame: DataFrame) -> DataFrame:
        """Keep a frame on the executors, in memory or on their disks, until the work is done."""
        kept = frame.persist()
        self.held.callback(kept.unpersist)
        return kept

    def _label(self, number: int | None) -> str:
        return self.log.inputs[0].label if number is None else self.source.files[number].label

    def _rejected(self, judged: DataFrame) -> tuple[Rejected, int]:
        """What was refused, counted by reason with the first row of each; and how many rows are good."""
        from pyspark.sql import functions as F

        counts: dict[str | None, int] = dict(judged.groupBy("reason").count().collect())
        rejected = Rejected(list(self.log.columns.names), hold=0)
        rejected.counts.update({reason: count for reason, count in counts.items() if reason is not None})
        if rejected.total:
            first = F.min(F.struct("file", ROW, "part", "text", "told")).alias("first")
            met = judged.filter("reason IS NOT NULL").groupBy("reason").agg(first).collect()
            for reason, (file, row, _, text, told) in met:
                rejected.examples[reason] = example(self._label(file), row, [text] if told is None else told)
        return rejected, counts.get(None, 0)

    def _rejected_rows(self, judged: DataFrame) -> pl.DataFrame:
        bad = judged.filter("reason IS NOT NULL").select("file", ROW, "part", "reason", "told", "text")
        frame = pl.DataFrame(pl.from_arrow(bad.toArrow())).sort("file", ROW, "part")
        roles = list(self.log.columns.names)
        labels = [self._label(number) for number in frame["file"]]
        texts = [pl.col("told").list.get(place, null_on_oob=True).alias(role) for place, role in enumerate(roles)]
        return frame.with_columns(pl.Series("file", labels, dtype=pl.String), *texts).drop("part", "told")

    def _counted(self, good: DataFrame, rejected: Rejected, kept: int, *, duplicates: int) -> Core:
        """Keep users and items with enough events, and number them by id."""
        settings, columns = self.settings, self.log.columns.names
        core = k_core(nw.from_native(good), min_user=settings.min_user, min_item=settings.min_item, settle=_settled)
        users, items = (_numbers(survivors, column) for survivors, column in zip(core, ("user", "item"), strict=True))
        if not len(users.ids):
            counts = good.groupBy("user").count().toArrow().column("count").to_numpy()
            raise nobody_left(kept, good.select("item").distinct().count(), counts, settings)
        refuse_single_item(items.ids)
        kinds = _kinds(good) if "kind" in columns else None
        has = ["user", "item", "time"]
        has += [role for role in ("kind", "value", "order") if role in columns]
        return Core(
            users=users,
            items=items,
            kinds=kinds,
            valued="value" in columns,
            rows=self._rows,
            kept=kept,
            rejected=rejected,
            events=SparkEvents(
                numbered=numbered_events(self.spark, good, users=users, items=items, kinds=kinds),
                users=users,
                has=has,
                rows_ordered=bool(self.source.files),
                duplicates=duplicates,
            ),
        )


def _settled(frame: nw.LazyFrame[Any]) -> nw.LazyFrame[Any]:
    """Computed and kept on the executors, without the way it was computed: plans would grow with every round."""
    settled: nw.LazyFrame[Any] = nw.from_native(frame.to_native().localCheckpoint())
    return settled


def _numbers(survivors: nw.LazyFrame[Any], column: str) -> Numbers:
    table = survivors.to_native().toArrow()
    ids = pl.Series(pl.from_arrow(table.column(column)), dtype=pl.String)
    return final_numbers(ids, np.arange(len(ids)), table.column("events").to_numpy())


def _kinds(good: DataFrame) -> pl.Series:
    table = good.select("kind").distinct().limit(MOST_KINDS + 1).toArrow()
    refuse_many_kinds(table.num_rows)
    return pl.Series(pl.from_arrow(table.column(0)), dtype=pl.String).sort()


def _with_row_order(spark: SparkSession, good: DataFrame) -> DataFrame:
    """The running number of each good row as its time."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    counts: dict[int, int] = dict(good.groupBy("file").count().collect())
    files = sorted(counts)
    before = np.cumsum([0, *(counts[file] for file in files)])[:-1]
    table = pa.table({"file": pa.array(files, pa.int32()), "before": pa.array(before, pa.int64())})
    place = F.row_number().over(Window.partitionBy("file").orderBy(ROW, "part")).cast("long") - 1
    numbered = good.withColumn("time", place).join(spark.createDataFrame(table), on="file", how="inner")
    return numbered.withColumn("time", (F.col("time") + F.col("before")) * MICROSECONDS).drop("before")


def _different(good: DataFrame, *, timed: bool) -> DataFrame:
    """The first of all rows that are equal, by the log's order."""
    from pyspark.sql import functions as F

    equal = _compared(timed=timed)
    others = ["file", ROW, "part", "place", *([] if timed else ["time"])]
    first = good.groupBy(*equal).agg(F.min(F.struct(*others)).alias("first"))
    return first.select(*equal, *(f"first.{name}" for name in others))


def _compared(*, timed: bool) -> list[str]:
    """The columns in which equal rows are equal."""
    return ["user", "item", "kind", "value", *(["time"] if timed else [])]
