"""Files, folders or a table that Spark reads → judged rows, on the executors. The reader of the Spark engine.

Parquet and tables are divided as Spark divides them. A text file (CSV, TSV, JSON lines, compressed or not) is read by
one executor from beginning to end: a quoted field may hold the end of a line, so that no position inside is surely the
beginning of a row. Many files are read in parallel. Text on a file system that every executor mounts (`file:`) is read
from there; from any other (`s3a://`, `hdfs://`) Spark loads it as a whole, which ends at 2 GB a file. A folder stands
for the files in it; its own folders must be given too, unless they are named like a column's values (`day=1`). Rows are
numbered within their file, as by the local engine; tables and DataFrames have neither files nor numbers of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from segue.data.read.arrow import TableInput, is_table
from segue.data.read.blocks import LogInput
from segue.data.read.columns import Columns
from segue.data.read.times import TimeRule
from segue.data.settings import Role
from segue.data.spark.executor import (
    SPARK_JUDGED,
    BlockTask,
    Files,
    Opener,
    SurveyedFile,
    TableRows,
    TextFiles,
    count_votes,
    judge_block,
    plain_path,
    run_task,
    survey,
)
from segue.data.spark.files import SparkFile, is_parquet, list_files, quoted, rows_by_schema, spark_path
from segue.errors import InputError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SAMPLE_ROWS = 200


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of the log, read in one way."""

    frame: Callable[[Columns, list[Role]], DataFrame]
    """What Spark gives to the executors, for these columns."""
    opener: Callable[[Columns, list[Role]], Opener]


@dataclass(frozen=True, slots=True)
class SparkSource:
    """An opened log: its inputs know their columns, and executors read their rows."""

    inputs: list[LogInput]
    files: list[SparkFile]
    """Empty for a table, whose rows have no order."""
    parts: list[_Part]

    def votes(self, columns: Columns) -> dict[str, int]:
        """How many values of the time column fit each form."""
        counts = self._mapped(columns, ["time"], count_votes, "name string, count long")
        table = counts.groupBy("name").sum("count").toArrow()
        return dict(zip(*(column.to_pylist() for column in table.columns), strict=True))

    def judged(self, columns: Columns, rule: TimeRule | None) -> DataFrame:
        """Every row as `executor.JUDGED` describes it."""
        roles = list(columns.names)
        return self._mapped(columns, roles, partial(judge_block, roles=roles, rule=rule), SPARK_JUDGED)

    def _mapped(self, columns: Columns, roles: list[Role], task: BlockTask, schema: str) -> DataFrame:
        columns = replace(columns, names={role: columns.names[role] for role in roles})
        frames = [
            part.frame(columns, roles).mapInArrow(
                partial(run_task, opener=part.opener(columns, roles), columns=columns, roles=roles, task=task), schema
            )
            for part in self.parts
        ]
        return reduce(lambda one, other: one.unionAll(other), frames)


def open_source(spark: SparkSession, source: Any, *, named: set[str]) -> SparkSource:
    """Open a path, several paths, the name of a table or a Spark DataFrame. named: columns that the user named."""
    if type(source).__module__.startswith("pyspark.sql"):
        return _open_table(source, "the table")
    if is_table(source):
        raise InputError(
            "The Spark engine takes files, folders, the name of a table or a Spark DataFrame, and not a table in "
            "memory; leave --engine spark out for it."
        )
    names = [str(name) for name in ([source] if isinstance(source, str | Path) else source)]
    if len(names) == 1 and _is_table_name(spark, names[0]):
        return _open_table(spark.table(names[0]), names[0])
    return _open_files(spark, names, named)


def _is_table_name(spark: SparkSession, name: str) -> bool:
    from pyspark.errors import PySparkException

    if "/" in name or Path(name).exists():
        return False
    try:
        return bool(spark.catalog.tableExists(name))
    except PySparkException:  # no valid name of a table
        return False


def _open_table(frame: DataFrame, label: str) -> SparkSource:
    part = _Part(
        frame=lambda columns, roles: frame.select(*_by_role(columns, roles)),
        opener=lambda columns, roles: TableRows(label, [columns.names[role] for role in roles], None),
    )
    return SparkSource([TableInput(frame.limit(SAMPLE_ROWS).toArrow(), label=label)], [], [part])


def _by_role(columns: Columns, roles: list[Role]) -> list[Any]:
    """The columns of a frame, each under its role."""
    from pyspark.sql import functions as F

    escaped = {role: columns.names[role].replace("`", "``") for role in roles}
    return [F.col(f"`{name}`").alias(role) for role, name in escaped.items()]


def _open_files(spark: SparkSession, names: list[str], named: set[str]) -> SparkSource:
    paths = {name: spark_path(name) for name in names}
    listed = list_files(spark, paths)
    files = [file for group in listed.values() for file in group]
    numbers = {plain_path(file.path): (number, file.label) for number, file in enumerate(files)}
    if len(paths) < len(names) or len(numbers) < len(files):
        raise InputError("A file of the log is given twice, or is in a folder that is given too; give each once.")
    parquet = [name for name, group in listed.items() if is_parquet(name, group)]
    texts = [file for name, group in listed.items() if name not in parquet for file in group]
    parts: list[_Part] = []
    inputs: list[tuple[int, LogInput]] = []
    for name in parquet:
        for first, rows in rows_by_schema(spark, paths[name], listed[name]):
            parts.append(_parquet_part(rows, numbers))
            number, label = numbers[plain_path(first.path)]
            inputs.append((number, TableInput(rows.limit(SAMPLE_ROWS).toArrow(), label=label)))
    if texts:
        local = all(file.path.startswith("file:") for file in files)
        parts.append(_text_part(spark, [quoted(file.path) for file in texts], numbers, named, local=local))
        inputs += [(file.number, file) for file in _survey_part(parts[-1])]
    inputs.sort(key=lambda each: each[0])
    return SparkSource([log for _, log in inputs], files, parts)


def _parquet_part(rows: DataFrame, files: Files) -> _Part:
    from pyspark.sql import functions as F

    def frame(columns: Columns, roles: list[Role]) -> DataFrame:
        origin = [F.expr("_metadata.file_path AS file"), F.expr("_metadata.row_index + 1 AS row")]
        return rows.select(*origin, *_by_role(columns, roles))

    return _Part(frame, lambda columns, roles: TableRows("", [columns.names[role] for role in roles], files))


def _text_part(spark: SparkSession, paths: list[str], files: Files, named: set[str], *, local: bool) -> _Part:
    wanted = ["path"] if local else ["path", "content"]
    return _Part(
        frame=lambda _columns, _roles: spark.read.format("binaryFile").load(paths).select(*wanted),
        opener=lambda _columns, _roles: TextFiles(files, named),
    )


def _survey_part(part: _Part) -> list[SurveyedFile]:
    nothing = Columns({}, ())
    frame = part.frame(nothing, []).mapInArrow(partial(survey, opener=part.opener(nothing, [])), "survey binary")
    surveyed = [msgspec.json.decode(line, type=SurveyedFile) for line in frame.toArrow().column(0).to_pylist()]
    return sorted(surveyed, key=lambda file: file.number)
