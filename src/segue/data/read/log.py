"""Files or a table → blocks with one column per role: ids as text, times as text, numbers or microseconds.

The reader of the local engine and of Spark's executors. It rejects only rows that cannot be parsed; the rules
check the others. Times are read twice: their unit is decided for the whole column before any event is read.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import polars as pl

from segue.data.read.arrow import ParquetInput, TableInput, is_table
from segue.data.read.blocks import ROW, Block, LogInput, Malformed
from segue.data.read.columns import Columns, find_columns
from segue.data.read.delimited import DelimitedFile
from segue.data.read.json_lines import JsonLinesFile
from segue.data.read.streams import check_file, read_sample
from segue.data.read.times import TimeRule, decide, forced_rule, votes
from segue.data.settings import PrepareSettings, Role
from segue.errors import InputError, SettingsError

TimeType = Literal["text or numbers", "times with a zone", "local times"]

ProgressCallback = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""


@dataclass(frozen=True, slots=True)
class Log:
    """A log whose columns are known."""

    inputs: list[LogInput]
    columns: Columns
    ordered: bool = False
    """Whether the log has no time, and the column `order` is read instead."""


@dataclass(frozen=True, slots=True)
class TimeDecision:
    """How the times are read."""

    rule: TimeRule | None
    """None without a time column: events keep the order of their rows."""
    counts: dict[str, int] = field(default_factory=dict)
    """How many values fit each form, if they were counted."""


def open_inputs(source: Any, *, named: set[str], label: str = "the table") -> list[LogInput]:
    """Open a path, several paths or a table."""
    if isinstance(source, str | os.PathLike):
        return [open_file(Path(source), named=named)]
    if is_table(source):
        return [TableInput(source, label=label)]
    if isinstance(source, Sequence) and source and all(isinstance(path, str | os.PathLike) for path in source):
        return [open_file(Path(path), named=named) for path in source]
    raise InputError(
        f"Expected a path, several paths, or a pandas, polars or Arrow table as the log; got {type(source).__name__}."
    )


def open_file(path: Path, *, named: set[str]) -> LogInput:
    """Open a file by its content, whatever its name."""
    if check_file(path).startswith(b"PAR1"):
        return ParquetInput(path)
    sample, _ = read_sample(path, 1 << 16)
    if sample.lstrip()[:1] in (b"{", b"["):
        return JsonLinesFile(path)
    return DelimitedFile(path, named=named)


def log_of_inputs(inputs: list[LogInput], settings: PrepareSettings) -> Log:
    """Find the columns of opened inputs; every file must have them."""
    columns = find_columns(inputs[0], settings)
    ordered = "order" in columns.names and "time" not in columns.names
    if ordered:
        names: dict[Role, str] = {("time" if role == "order" else role): name for role, name in columns.names.items()}
        columns = replace(columns, names=names)
    for log in inputs:
        columns.positions(log)
    return Log(inputs, columns, ordered)


def decide_times(log: Log, settings: PrepareSettings, count: Callable[[], dict[str, int]]) -> TimeDecision:
    """Decide how the times are read. count: counts the forms of the whole column (`votes`), if nothing else decides."""
    if "time" not in log.columns.names:
        return TimeDecision(None)
    if log.ordered:
        return TimeDecision(TimeRule(form="order", forced=True))
    forced = forced_rule(settings)
    column_type = time_type(log.inputs, log.columns)
    if column_type != "text or numbers":
        if forced is not None:
            raise SettingsError("--time-format is for times as text or numbers; this log holds dates: leave it out.")
        return TimeDecision(TimeRule(form="instant", zone=settings.time_zone if column_type == "local times" else None))
    if forced is not None:
        return TimeDecision(forced)
    counts = count()
    return TimeDecision(decide(counts, zone=settings.time_zone), counts)


def count_forms(log: Log, progress: ProgressCallback | None = None) -> dict[str, int]:
    """How many values of the time column fit each form."""
    counts: Counter[str] = Counter()
    for _, block in read_blocks(log.inputs, log.columns.only("time"), stage="reading the times", progress=progress):
        counts.update(votes(block.frame["time"]))
    return counts


def read_blocks(
    inputs: list[LogInput], columns: Columns, *, stage: str = "reading", progress: ProgressCallback | None = None
) -> Iterator[tuple[LogInput, Block]]:
    """Every block of every input, one column per role; progress is reported after each has been used."""
    before, total = 0, sum(log.size for log in inputs)
    for log in inputs:
        for block in log.blocks(columns.positions(log)):
            yield log, by_role(block, log.label, columns)
            if progress is not None:
                progress(stage, min(before + block.done, total), total)
        before += log.size


def time_type(inputs: list[LogInput], columns: Columns) -> TimeType:
    """The type of the time column, the same in every input."""
    types: list[TimeType] = []
    for log in inputs:
        types.append("text or numbers")
        if isinstance(log, ParquetInput | TableInput):
            dtype = next(log.blocks(columns.only("time").positions(log))).frame.schema["time"]
            dtype = getattr(dtype, "inner", dtype)
            if isinstance(dtype, pl.Datetime | pl.Date):
                zone = dtype.time_zone if isinstance(dtype, pl.Datetime) else None
                types[-1] = "local times" if zone is None else "times with a zone"
    if len(set(types)) > 1:
        raise InputError(
            f"The times are {types[0]} in {inputs[0].label} and another type in other files; give them one type."
        )
    return types[0]


def _one_row_an_event(frame: pl.DataFrame) -> tuple[pl.DataFrame, list[Malformed]]:
    """Expand rows of lists; a row whose lists differ in length is malformed."""
    lists = [name for name in frame.columns if name not in (ROW, "user")]
    texts = [name for name in lists if frame.schema[name] == pl.String]
    frame = frame.with_columns(pl.col(texts).fill_null("").str.split(","))
    frame = frame.with_columns(pl.col(name).fill_null([]) for name in lists)
    lengths = [pl.col(name).list.len() for name in lists]
    even = pl.all_horizontal(lengths[0] == other for other in lengths) & (lengths[0] > 0)
    malformed = [
        Malformed(
            row=record[ROW],
            reason="lists of unequal length" if len({len(record[name]) for name in lists}) > 1 else "an empty list",
            text=str({name: record[name] for name in frame.columns if name != ROW}),
        )
        for record in frame.filter(~even).iter_rows(named=True)
    ]
    return frame.filter(even).explode(lists), malformed


def by_role(block: Block, label: str, columns: Columns) -> Block:
    """A block with one row per event, and with the type of each role."""
    frame, malformed, expressions = block.frame, block.malformed, []
    if columns.lists:
        frame, uneven = _one_row_an_event(frame)
        malformed = malformed + uneven
    for role, name in columns.names.items():
        dtype = frame.schema[role]
        expression = (id_text if role in ("user", "item", "kind") else _number)(pl.col(role), dtype)
        if role == "time" and isinstance(dtype, pl.Datetime | pl.Date):
            expression = pl.col(role).dt.epoch("us")
        if expression is None:
            raise InputError(
                f"{label}: the column {name!r} has the type {dtype}, which cannot be the {role}; "
                f"name another with --{role}."
            )
        expressions.append(expression.alias(role))
    return Block(frame.with_columns(expressions), malformed, block.done)


def id_text(column: pl.Expr, dtype: pl.DataType) -> pl.Expr | None:
    """Ids as text; whole numbers that a table stores as floats, to allow nulls, lose their `.0`."""
    if dtype == pl.String:
        return column
    if dtype.is_float():
        numbers = column.fill_nan(None)
        whole = pl.when(numbers == numbers.round()).then(numbers).cast(pl.Int64, strict=False).cast(pl.String)
        return pl.coalesce(whole, numbers.cast(pl.String))
    castable = dtype.is_integer() or dtype.is_decimal() or dtype == pl.Null
    return column.cast(pl.String) if castable or isinstance(dtype, pl.Categorical | pl.Enum) else None


def _number(column: pl.Expr, dtype: pl.DataType) -> pl.Expr | None:
    if dtype == pl.String or dtype.is_float():
        return column
    if dtype.is_decimal() or dtype == pl.Null:
        return column.cast(pl.String)
    return column.cast(pl.Int64, strict=False) if dtype.is_integer() else None
