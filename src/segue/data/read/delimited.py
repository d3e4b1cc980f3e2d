"""Delimited text (CSV, TSV, any delimiter) → blocks of text columns.

One parser (Arrow's) reads the sample that finds the delimiter and then the whole file, so both see the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.csv

from segue.data.read.blocks import ROW, Block, Malformed
from segue.data.read.streams import NOT_UTF8, LogBytes, read_sample
from segue.data.read.times import looks_like_number_or_time
from segue.errors import InputError

READ_BYTES = 2 << 20  # no row is longer; Arrow reads 32 of them ahead, so more would cost memory
BLOCK_ROWS = 1 << 17  # smaller blocks cost time
SAMPLE_BYTES = 1 << 20
SAMPLE_ROWS = 200
MOST_COLUMNS = 10_000

_USUAL = (",", "\t", ";", "|", "::")
_UNUSUAL = "\x01\x1f^~#:!$&*/ "
_UNIT_SEPARATOR = "\x1f"  # what "::" becomes, as the parser takes one character
_END = "\x1eend\x1e"  # a last row of our own: when it does not come out again, a quote was never closed


@dataclass(frozen=True, slots=True)
class _Layout:
    delimiter: str
    names: list[str]
    columns: list[list[str]]
    first_row: int  # number of the first row of data: 2 under a header, 1 without
    rows: int  # sampled rows of data
    agree: float  # share of them with as many fields as the first row


class DelimitedFile:
    """A text file with a delimiter that was found in its first rows."""

    typed = False

    def __init__(self, path: Path, *, named: set[str]) -> None:
        self.label = str(path)
        self.path = path
        self.size = path.stat().st_size
        self._layout = _sniffed(path, named)
        self.names = self._layout.names

    @property
    def headerless(self) -> bool:
        return self._layout.first_row == 1

    @property
    def note(self) -> str:
        return " Its first row looks like data, so its columns are numbered." if self.headerless else ""

    def sample(self, position: int) -> list[str]:
        return self._layout.columns[position]

    def holds_lists(self, position: int) -> bool:  # noqa: ARG002
        return False

    def blocks(self, positions: Mapping[str, int]) -> Iterator[Block]:
        stream = LogBytes(self.path)
        try:
            yield from self._parsed(stream, positions)
        finally:
            stream.close()

    def _parsed(self, stream: LogBytes, positions: Mapping[str, int]) -> Iterator[Block]:
        rows = _RowNumbers(self._layout.first_row)
        held: list[pa.RecordBatch] = []
        ended = False
        try:
            for batch in self._batches(stream, positions, rows):
                ended = _is_end(batch)
                held.append(batch.slice(0, batch.num_rows - 1) if ended else batch)
                if ended or sum(each.num_rows for each in held) >= BLOCK_ROWS:
                    yield _block(pa.Table.from_batches(held), positions, rows, stream)
                    held = []
        except pa.ArrowInvalid as error:
            raise self._never_closed(rows.last) from error
        if not ended:
            raise self._never_closed(rows.last)

    def _batches(self, stream: LogBytes, positions: Mapping[str, int], rows: _RowNumbers) -> Any:
        count, delimiter = len(self.names), self._layout.delimiter
        wanted = [f"f{position}" for position in positions.values()]
        return _open_csv(
            _Ended(stream, delimiter, count),
            delimiter,
            names=[f"f{index}" for index in range(count)],
            wanted=list(dict.fromkeys(wanted)),
            skip=self._layout.first_row - 1,
            block_bytes=READ_BYTES,
            on_invalid=rows.invalid,
        )

    def _never_closed(self, row: int) -> InputError:
        return InputError(
            f"{self.label}: a quote that opens after row {max(row, 1)} is never closed, or one row is longer than "
            f"{READ_BYTES >> 20} MB. Double the quotes inside a quoted field, or remove the lone one."
        )


class _RowNumbers:
    """Numbers the rows that came through, leaving out those that did not."""

    def __init__(self, first: int) -> None:
        self.last = first - 1
        self._invalid: list[int] = []  # numbers after `last`
        self._fresh: list[Malformed] = []

    def invalid(self, row: Any) -> str:
        self._invalid.append(row.number)
        reason = f"expected {row.expected_columns} fields, got {row.actual_columns}"
        self._fresh.append(Malformed(row=row.number, reason=reason, text=row.text))
        return "skip"

    def next(self, count: int) -> np.ndarray:
        plain = self.last + 1 + np.arange(count)
        # the k-th invalid row stands before every row that would be numbered from (its number - k) on
        gaps = np.asarray(self._invalid, dtype=np.int64) - np.arange(len(self._invalid))
        numbers = plain + np.searchsorted(gaps, plain, side="right")
        if count:
            self.last = int(numbers[-1])
            self._invalid = [number for number in self._invalid if number > self.last]
        return np.asarray(numbers)

    def taken(self) -> list[Malformed]:
        fresh, self._fresh = self._fresh, []
        return fresh


class _Ended:
    """The bytes of a log with our own last row behind them; a two-character delimiter is made one."""

    def __init__(self, stream: LogBytes, delimiter: str, count: int) -> None:
        mark = _single(delimiter)
        self._stream = stream
        self._narrow = delimiter.encode() if len(delimiter) > 1 else None
        self._end = b"\n" + mark.join([_END] * count).encode() + b"\n"
        self._held = b""
        self.closed = False

    def read(self, size: int) -> bytes:
        piece = self._stream.read(max(1, size - len(self._held)))
        if self._narrow is None:
            return piece or self._ending()
        piece, self._held = self._held + piece, b""
        if piece.endswith(self._narrow[:1]) and not piece.endswith(self._narrow):
            piece, self._held = piece[:-1], piece[-1:]
        return piece.replace(self._narrow, _UNIT_SEPARATOR.encode()) or self._ending()

    def _ending(self) -> bytes:
        end, self._end = self._held + self._end, b""
        self._held = b""
        return end

    def close(self) -> None:
        self.closed = True

    def readable(self) -> bool:
        return True


def _single(delimiter: str) -> str:
    return delimiter if len(delimiter) == 1 else _UNIT_SEPARATOR


def _open_csv(
    source: Any,
    delimiter: str,
    *,
    names: list[str],
    wanted: list[str],
    skip: int,
    block_bytes: int,
    on_invalid: Callable[[Any], str],
) -> Any:
    """Arrow's streaming parser with every column as text; one thread, or it would not number the rows."""
    if not isinstance(source, pa.NativeFile):
        source = pa.PythonFile(source, mode="r")
    return pyarrow.csv.open_csv(
        source,
        read_options=pyarrow.csv.ReadOptions(
            column_names=names,
            autogenerate_column_names=not names,
            skip_rows_after_names=skip,
            use_threads=False,
            block_size=block_bytes,
        ),
        parse_options=pyarrow.csv.ParseOptions(
            delimiter=_single(delimiter), newlines_in_values=True, invalid_row_handler=on_invalid
        ),
        convert_options=pyarrow.csv.ConvertOptions(
            include_columns=wanted,
            column_types={f"f{index}": pa.string() for index in range(len(names) or MOST_COLUMNS)},
            strings_can_be_null=False,
            check_utf8=False,  # LogBytes lets nothing else through
        ),
    )


def _is_end(batch: pa.RecordBatch) -> bool:
    return bool(batch.num_rows) and batch.column(0)[batch.num_rows - 1].as_py() == _END


def _block(table: pa.Table, positions: Mapping[str, int], rows: _RowNumbers, stream: LogBytes) -> Block:
    columns = {ROW: pl.Series(rows.next(table.num_rows), dtype=pl.Int64)}
    for name, position in positions.items():
        columns[name] = pl.Series(pl.from_arrow(table.column(f"f{position}"))).rechunk()
    frame, malformed = pl.DataFrame(columns), rows.taken()
    if stream.dirty:
        frame, broken = _without_broken_text(frame)
        malformed += broken
    return Block(frame=frame, malformed=malformed, done=stream.consumed())


def _without_broken_text(frame: pl.DataFrame) -> tuple[pl.DataFrame, list[Malformed]]:
    """Take out the rows that hold bytes which were not UTF-8."""
    texts = [name for name in frame.columns if name != ROW]
    broken = pl.any_horizontal(pl.col(texts).str.contains(NOT_UTF8, literal=True))
    bad = frame.filter(broken)
    rows = [
        Malformed(row=row, reason="not UTF-8", text=" ".join(cells).replace(NOT_UTF8, "\ufffd"))
        for row, *cells in bad.iter_rows()
    ]
    return (frame.filter(~broken) if rows else frame), rows


def _sniffed(path: Path, named: set[str]) -> _Layout:
    """Find the delimiter under which most sampled rows have as many fields as the first."""
    sample, whole = read_sample(path, SAMPLE_BYTES)
    if not sample.strip():
        raise InputError(f"{path} is empty; expected a log with a header row and events.")
    trial = partial(_tried, sample, whole=whole, named=named)
    found = [layout for mark in _USUAL if (layout := trial(mark)) and len(layout.names) > 1]
    if not any(layout.agree > 0.5 for layout in found):
        rare = [layout for mark in _UNUSUAL if (layout := trial(mark)) and len(layout.names) > 1]
        found += [layout for layout in rare if layout.agree > 0.9]
    if not found:
        alone = trial(",")
        found = [alone] if alone else []
    if not found:
        raise InputError(f"{path} cannot be read as delimited text; expected CSV, TSV, JSON lines or Parquet.")
    best = max(found, key=lambda layout: (layout.agree, len(layout.names)))
    if not best.rows:
        raise InputError(f"{path} has a header ({', '.join(best.names)}) and no rows under it.")
    if not best.agree:
        raise InputError(
            f"{path}: no row has as many fields as the first ({len(best.names)}: {', '.join(best.names)}); "
            "give every column a name in the header."
        )
    return best


def _tried(sample: bytes, delimiter: str, *, whole: bool, named: set[str]) -> _Layout | None:
    """The sample under one delimiter; None where it cannot be parsed at all."""
    if len(delimiter) > 1:
        sample = sample.replace(delimiter.encode(), _UNIT_SEPARATOR.encode())
    invalid: list[Any] = []

    def skip(row: Any) -> str:
        invalid.append(row)
        return "skip"

    try:
        table = _sample_table(sample, delimiter, skip)
    except pa.ArrowInvalid:
        return None
    if not whole and table.num_rows > 2:
        table = table.slice(0, table.num_rows - 1)  # the last row is cut off somewhere
    columns = [[cell or "" for cell in column.slice(0, SAMPLE_ROWS + 1).to_pylist()] for column in table.columns]
    names, first_row = [column[0] for column in columns], 2
    if _is_data(names) and not named & set(names):
        names, first_row = [f"column {index}" for index in range(1, len(columns) + 1)], 1
    good = table.num_rows + 1 - first_row
    return _Layout(
        delimiter=delimiter,
        names=names,
        columns=[column[first_row - 1 :] for column in columns],
        first_row=first_row,
        rows=good + len(invalid),
        agree=good / max(1, good + len(invalid)),
    )


def _sample_table(sample: bytes, delimiter: str, on_invalid: Callable[[Any], str]) -> pa.Table:
    ended = sample if sample.endswith(b"\n") else sample + b"\n"
    return _open_csv(
        pa.BufferReader(ended),
        delimiter,
        names=[],
        wanted=[],
        skip=0,
        block_bytes=len(ended) + 1,
        on_invalid=on_invalid,
    ).read_all()


def _is_data(first_row: list[str]) -> bool:
    """Whether a first row is already an event: names of columns are neither numbers nor dates."""
    return any(looks_like_number_or_time(cell) for cell in first_row)
