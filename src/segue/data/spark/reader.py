"""Files, folders or a table that Spark reads → checked rows, on the executors. The reader of the Spark engine.

Parquet and tables are divided as Spark divides them. A text file (CSV, TSV, JSON lines, compressed or not) is read by
one executor from beginning to end: a quoted field may hold the end of a line, so that no position inside is surely the
beginning of a row. Many files are read in parallel. Text on a file system that every executor mounts (`file:`) is read
from there; from any other (`s3a://`, `hdfs://`) Spark loads it as a whole, which ends at 2 GB a file. A folder stands
for the files in it; its own folders must be given too, unless they are named like a column's values (`day=1`). Rows are
numbered within their file, as by the local engine; tables and DataFrames have neither files nor numbers of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from segue.data.read.arrow import TableInput, is_table
from segue.data.read.blocks import ROW, SAMPLE_ROWS, LogInput
from segue.data.read.columns import Columns
from segue.data.read.times import TimeRule
from segue.data.spark.executor import (
    SPARK_CHECKED,
    Batches,
    BlockTask,
    Files,
    SurveyedFile,
    TextFiles,
    check_block,
    count_votes,
    plain_path,
    run_on_files,
    run_on_rows,
    survey,
)
from segue.data.spark.files import PARQUET, SparkFile, list_files, quoted, rows_by_schema, spark_path
from segue.errors import InputError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_Part = Callable[[Columns], tuple["DataFrame", Callable[..., Batches]]]
"""A part of the log: for some columns, the frame that Spark passes to the executors and the function that runs a task
over it there."""


@dataclass(frozen=True, slots=True)
class SparkSource:
    """An opened log: its inputs know their columns, and executors read their rows."""

    inputs: list[LogInput]
    files: list[SparkFile]
    """Empty for a table, whose rows have no order."""
    parts: list[_Part]

    def count_forms(self, columns: Columns) -> dict[str, int]:
        """How many values of the time column fit each form."""
        counts = self._mapped(columns.only("time"), count_votes, "name string, count long")
        table = counts.groupBy("name").sum("count").toArrow()
        return dict(zip(*(column.to_pylist() for column in table.columns), strict=True))

    def checked(self, columns: Columns, rule: TimeRule | None) -> DataFrame:
        """Every row as `executor.CHECKED_ROWS` describes it."""
        return self._mapped(columns, partial(check_block, roles=list(columns.names), rule=rule), SPARK_CHECKED)

    def _mapped(self, columns: Columns, task: BlockTask, schema: str) -> DataFrame:
        frames = []
        for part in self.parts:
            frame, run = part(columns)
            frames.append(frame.mapInArrow(partial(run, columns=columns, task=task), schema))
        return reduce(lambda one, other: one.unionAll(other), frames)


def open_source(spark: SparkSession, source: Any, *, named: set[str]) -> SparkSource:
    """Open a path, several paths, the name of a table or a Spark DataFrame. named: columns that the user named."""
    from pyspark.errors import PySparkException

    if type(source).__module__.startswith("pyspark.sql"):
        return _open_table(source, "the table")
    if is_table(source):
        raise InputError(
            "The Spark engine takes files, folders, the name of a table or a Spark DataFrame, and not a table in "
            "memory; leave --engine spark out for it."
        )
    names = [str(name) for name in ([source] if isinstance(source, str | Path) else source)]
    if len(names) == 1 and "/" not in names[0] and not Path(names[0]).exists():
        is_name = False
        with suppress(PySparkException):  # no valid name of a table
            is_name = spark.catalog.tableExists(names[0])
        if is_name:
            return _open_table(spark.table(names[0]), names[0])
    return _open_files(spark, names, named)


def _open_table(frame: DataFrame, label: str) -> SparkSource:
    part = _rows_part(frame, {"": (None, label)}, file="''", row="CAST(NULL AS LONG)")
    return SparkSource([TableInput(frame.limit(SAMPLE_ROWS).toArrow(), label=label)], [], [part])


def _rows_part(rows: DataFrame, files: Files, *, file: str, row: str) -> _Part:
    """Rows of Parquet files or of a table. file, row: Spark's expressions of a row's file and number."""

    def part(columns: Columns) -> tuple[DataFrame, Callable[..., Batches]]:
        escaped = {role: name.replace("`", "``") for role, name in columns.names.items()}
        by_role = [f"`{name}` AS `{role}`" for role, name in escaped.items()]
        return rows.selectExpr(f"{file} AS file", f"{row} AS {ROW}", *by_role), partial(run_on_rows, files=files)

    return part


def _open_files(spark: SparkSession, names: list[str], named: set[str]) -> SparkSource:
    paths = {name: spark_path(name) for name in names}
    groups = list_files(spark, paths)
    files = [file for group in groups.values() for file in group]
    numbers: Files = {plain_path(file.path): (number, file.label) for number, file in enumerate(files)}
    if len(paths) < len(names) or len(numbers) < len(files):
        raise InputError("A file of the log is given twice, or is in a folder that is given too; give each once.")
    texts: list[SparkFile] = []
    parts: list[_Part] = []
    inputs: dict[int | None, LogInput] = {}
    for name, group in groups.items():
        parquet = [file for file in group if file.path.endswith(PARQUET)]
        if parquet and len(parquet) < len(group):
            raise InputError(f"{name} holds Parquet and other files; give them separately, such as {name}/*.parquet.")
        if not parquet:
            texts += group
            continue
        for first, rows in rows_by_schema(spark, paths[name], group):
            parts.append(_rows_part(rows, numbers, file="_metadata.file_path", row="_metadata.row_index + 1"))
            number, label = numbers[plain_path(first.path)]
            inputs[number] = TableInput(rows.limit(SAMPLE_ROWS).toArrow(), label=label)
    if texts:
        columns = ["path"] if all(file.path.startswith("file:") for file in files) else ["path", "content"]
        contents = spark.read.format("binaryFile").load([quoted(file.path) for file in texts]).select(*columns)
        opener = TextFiles(numbers, named)
        parts.append(lambda _: (contents, partial(run_on_files, opener=opener)))
        surveys = contents.mapInArrow(partial(survey, opener=opener), "survey binary").toArrow().column(0)
        for line in surveys.to_pylist():
            described = msgspec.json.decode(line, type=SurveyedFile)
            inputs[described.number] = described
    return SparkSource([inputs[number] for number in range(len(files)) if number in inputs], files, parts)
