"""Files or a table → blocks with one column a role: ids as text, times as text, numbers or microseconds.

The reader of the local engine. It rejects only what is no row at all; the rules judge the others.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import polars as pl

from segue.data.read.arrow import ParquetInput, TableInput, is_table
from segue.data.read.blocks import ROW, LogInput, Malformed
from segue.data.read.columns import Columns
from segue.data.read.delimited import DelimitedFile
from segue.data.read.json_lines import JsonLinesFile
from segue.data.read.streams import check_file, read_sample
from segue.data.settings import Role
from segue.errors import InputError

TimeType = Literal["text or numbers", "times with a zone", "local times"]


@dataclass(frozen=True, slots=True)
class LogBlock:
    """A block of one input, with one column a role."""

    input: LogInput
    frame: pl.DataFrame
    malformed: list[Malformed]
    done: int


def open_inputs(source: Any, *, named: set[str], label: str = "the table") -> list[LogInput]:
    """A path, several paths or a table, opened."""
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


def read_blocks(inputs: list[LogInput], columns: Columns, *, roles: Sequence[Role]) -> Iterator[LogBlock]:
    """Every block of every input, one column a role."""
    for log in inputs:
        positions = {role: position for role, position in columns.positions(log).items() if role in roles}
        for block in log.blocks(positions):
            frame, malformed = block.frame, block.malformed
            if columns.lists:
                frame, uneven = _one_row_an_event(frame)
                malformed = malformed + uneven
            yield LogBlock(log, _typed(frame, log, columns), malformed, block.done)


def time_type(inputs: list[LogInput], columns: Columns) -> TimeType:
    """The type of the time column, the same in every input."""
    types = [_time_type(log, columns.positions(log)["time"]) for log in inputs]
    if len(set(types)) > 1:
        raise InputError(
            f"The times are {types[0]} in {inputs[0].label} and another type in other files; give them one type."
        )
    return types[0]


def _time_type(log: LogInput, position: int) -> TimeType:
    if not log.typed:
        return "text or numbers"
    dtype = next(log.blocks({"time": position})).frame.schema["time"]
    dtype = getattr(dtype, "inner", dtype)
    if isinstance(dtype, pl.Datetime) and dtype.time_zone is not None:
        return "times with a zone"
    return "local times" if isinstance(dtype, pl.Datetime | pl.Date) else "text or numbers"


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


def _typed(frame: pl.DataFrame, log: LogInput, columns: Columns) -> pl.DataFrame:
    changed = []
    for role, name in columns.names.items():
        if role not in frame.columns:
            continue
        read = {"user": id_text, "item": id_text, "kind": id_text, "time": _time}.get(role, _number)
        expression = read(pl.col(role), frame.schema[role])
        if expression is None:
            raise InputError(
                f"{log.label}: the column {name!r} has the type {frame.schema[role]}, which cannot be the {role}; "
                f"name another with --{role}."
            )
        changed.append(expression.alias(role))
    return frame.with_columns(changed)


def id_text(column: pl.Expr, dtype: pl.DataType) -> pl.Expr | None:
    """Ids as text; whole numbers that a table stores as floats, to allow nulls, lose their `.0`."""
    if dtype == pl.String:
        return column
    if dtype.is_float():
        filled = column.fill_nan(None)
        whole = pl.when(filled == filled.round()).then(filled).cast(pl.Int64, strict=False).cast(pl.String)
        return pl.coalesce(whole, filled.cast(pl.String))
    if dtype.is_integer() or dtype.is_decimal() or isinstance(dtype, pl.Categorical | pl.Enum):
        return column.cast(pl.String)
    return column.cast(pl.String) if dtype == pl.Null else None


def _time(column: pl.Expr, dtype: pl.DataType) -> pl.Expr | None:
    if isinstance(dtype, pl.Datetime):
        return column.dt.epoch("us")
    if dtype == pl.Date:
        return column.cast(pl.Datetime("us")).dt.epoch("us")
    return _number(column, dtype)


def _number(column: pl.Expr, dtype: pl.DataType) -> pl.Expr | None:
    if dtype == pl.String or dtype.is_float():
        return column
    if dtype.is_decimal() or dtype == pl.Null:
        return column.cast(pl.String)
    return column.cast(pl.Int64, strict=False) if dtype.is_integer() else None
