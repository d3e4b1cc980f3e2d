"""Delimited text (CSV, TSV, any delimiter) → blocks of text columns.

Arrow's parser reads the sample that decides the delimiter and then the whole file, so both see the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.csv

from segue.data.read.blocks import ROW, SAMPLE_ROWS, Block, Malformed
from segue.data.read.streams import NOT_UTF8, LogBytes, read_sample
from segue.data.read.times import looks_like_number_or_time
from segue.errors import InputError

READ_BYTES = 2 << 20  # the longest row; Arrow reads 32 of them ahead, so more would cost memory
BLOCK_ROWS = 1 << 17  # smaller blocks cost time
MAX_COLUMNS = 10_000

_USUAL = (",", "\t", ";", "|", "::")
_UNUSUAL = "\x01\x1f^~#:!$&*/ "
_UNIT_SEPARATOR = "\x1f"  # replaces "::", as the parser takes one character
_END = "\x1eend\x1e"  # appended as a last row: if the parser does not return it, a quote was never closed


@dataclass(frozen=True, slots=True)
class _Layout:
    delimiter: str
    names: list[str]
    columns: list[list[str]]
    first_row: int  # number of the first row of data: 2 under a header, 1 without
    rows: int  # sampled rows of data
    agreement: float  # share of them with as many fields as the first row


class DelimitedFile:
    """A text file; its delimiter is detected from its first rows."""

    def __init__(self, path: Path, *, named: set[str]) -> None:
        self.label = str(path)
        self.path = path
        self.size = path.stat().st_size
        self._layout = _find_layout(path, named)
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
        delimiter, count = self._layout.delimiter, len(self.names)
        rows = _RowNumbers(self._layout.first_row)
        pending: list[pa.RecordBatch] = []
        ended = False
        with closing(LogBytes(self.path)) as stream, suppress(pa.ArrowInvalid):
            for batch in _open_csv(
                pa.PythonFile(_StreamWithEnd(stream, delimiter, count), mode="r"),
                delimiter,
                names=[f"f{index}" for index in range(count)],
                columns=list(dict.fromkeys(f"f{position}" for position in positions.values())),
                skip=self._layout.first_row - 1,
                block_bytes=READ_BYTES,
                on_invalid=rows.invalid,
            ):
                last = bool(batch.num_rows) and batch.column(0)[batch.num_rows - 1].as_py() == _END
                pending.append(batch.slice(0, batch.num_rows - 1) if last else batch)
                if last or sum(each.num_rows for each in pending) >= BLOCK_ROWS:
                    yield _block(pa.Table.from_batches(pending), positions, rows, stream)
                    pending = []
                ended = last
        if not ended:
            raise InputError(
                f"{self.label}: a quote that opens after row {max(rows.last, 1)} is never closed, or one row is longer "
                f"than {READ_BYTES >> 20} MB. Double the quotes inside a quoted field, or remove the lone one."
            )


class _RowNumbers:
    """Numbers the parsed rows, counting the invalid rows between them."""

    def __init__(self, first: int) -> None:
        self.last = first - 1
        self.malformed: list[Malformed] = []
        self._invalid: list[int] = []  # numbers after `last`

    def invalid(self, row: Any) -> str:
        self._invalid.append(row.number)
        reason = f"expected {row.expected_columns} fields, got {row.actual_columns}"
        self.malformed.append(Malformed(row=row.number, reason=reason, text=row.text))
        return "skip"

    def next(self, count: int) -> tuple[np.ndarray, list[Malformed]]:
        """The numbers of the next rows, and the invalid rows that were read since the last call."""
        plain = self.last + 1 + np.arange(count)
        # the k-th invalid row comes before every row that would be numbered from (its number - k) on
        gaps = np.asarray(self._invalid, dtype=np.int64) - np.arange(len(self._invalid))
        numbers = plain + np.searchsorted(gaps, plain, side="right")
        if count:
            self.last = int(numbers[-1])
            self._invalid = [number for number in self._invalid if number > self.last]
        malformed, self.malformed = self.malformed, []
        return np.asarray(numbers), malformed


class _StreamWithEnd:
    """The bytes of a log with one more row at the end; a delimiter of two characters becomes one."""

    def __init__(self, stream: LogBytes, delimiter: str, count: int) -> None:
        self._stream = stream
        self._wide = delimiter.encode() if len(delimiter) > 1 else None
        self._end = b"\n" + _single(delimiter).join([_END] * count).encode() + b"\n"
        self._pending = b""
        self.closed = False

    def read(self, size: int) -> bytes:
        piece = self._stream.read(max(1, size - len(self._pending)))
        if not piece:
            piece, self._end = self._end, b""
        if self._wide is None:
            return piece
        piece, self._pending = self._pending + piece, b""
        if piece.endswith(self._wide[:1]) and not piece.endswith(self._wide):
            piece, self._pending = piece[:-1], piece[-1:]
        return piece.replace(self._wide, _UNIT_SEPARATOR.encode()) or (self.read(size) if self._pending else b"")

    def close(self) -> None:
        self.closed = True

    def readable(self) -> bool:
        return True


def _single(delimiter: str) -> str:
    return delimiter if len(delimiter) == 1 else _UNIT_SEPARATOR


def _open_csv(
    source: pa.NativeFile,
    delimiter: str,
    *,
    block_bytes: int,
    on_invalid: Callable[[Any], str],
    names: Sequence[str] = (),
    columns: Sequence[str] = (),
    skip: int = 0,
) -> Any:
    """Arrow's streaming parser with every column as text; it numbers rows only with one thread."""
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
            include_columns=columns,
            column_types={f"f{index}": pa.string() for index in range(len(names) or MAX_COLUMNS)},
            strings_can_be_null=False,
            check_utf8=False,  # LogBytes yields nothing else
        ),
    )


def _block(table: pa.Table, positions: Mapping[str, int], rows: _RowNumbers, stream: LogBytes) -> Block:
    numbers, malformed = rows.next(table.num_rows)
    columns = {ROW: pl.Series(numbers, dtype=pl.Int64)}
    for name, position in positions.items():
        columns[name] = pl.Series(pl.from_arrow(table.column(f"f{position}"))).rechunk()
    frame = pl.DataFrame(columns)
    if stream.dirty:
        invalid = pl.any_horizontal(pl.col(list(positions)).str.contains(NOT_UTF8, literal=True))
        malformed += [
            Malformed(row=row, reason="not UTF-8", text=" ".join(cells).replace(NOT_UTF8, "\ufffd"))
            for row, *cells in frame.filter(invalid).iter_rows()
        ]
        frame = frame.filter(~invalid)
    return Block(frame=frame, malformed=malformed, done=stream.consumed())


def _find_layout(path: Path, named: set[str]) -> _Layout:
    """The layout of the delimiter with which most sampled rows have as many fields as the first."""
    sample, whole = read_sample(path)
    if not sample.strip():
        raise InputError(f"{path} is empty; expected a log with a header row and events.")
    trial = partial(_try_delimiter, sample, whole=whole, named=named)
    layouts = [layout for mark in _USUAL if (layout := trial(mark)) and len(layout.names) > 1]
    if not any(layout.agreement > 0.5 for layout in layouts):
        rare = [layout for mark in _UNUSUAL if (layout := trial(mark)) and len(layout.names) > 1]
        layouts += [layout for layout in rare if layout.agreement > 0.9]
    if not layouts and (single := trial(",")):
        layouts = [single]
    if not layouts:
        raise InputError(f"{path} cannot be read as delimited text; expected CSV, TSV, JSON lines or Parquet.")
    best = max(layouts, key=lambda layout: (layout.agreement, len(layout.names)))
    if not best.rows:
        raise InputError(f"{path} has a header ({', '.join(best.names)}) and no rows under it.")
    if not best.agreement:
        raise InputError(
            f"{path}: no row has as many fields as the first ({len(best.names)}: {', '.join(best.names)}); "
            "give every column a name in the header."
        )
    return best


def _try_delimiter(sample: bytes, delimiter: str, *, whole: bool, named: set[str]) -> _Layout | None:
    """Parse the sample with one delimiter; None if it cannot be parsed at all."""
    if len(delimiter) > 1:
        sample = sample.replace(delimiter.encode(), _UNIT_SEPARATOR.encode())
    text = sample if sample.endswith(b"\n") else sample + b"\n"
    rows = _RowNumbers(1)
    try:
        table = _open_csv(
            pa.BufferReader(text), delimiter, block_bytes=len(text) + 1, on_invalid=rows.invalid
        ).read_all()
    except pa.ArrowInvalid:
        return None
    if not whole and table.num_rows > 2:
        table = table.slice(0, table.num_rows - 1)  # the last row is cut off
    columns = [[cell or "" for cell in column.slice(0, SAMPLE_ROWS + 1).to_pylist()] for column in table.columns]
    names, first_row = [column[0] for column in columns], 2
    if any(map(looks_like_number_or_time, names)) and not named & set(names):  # a first row of data
        names, first_row = [f"column {index}" for index in range(1, len(columns) + 1)], 1
    good = table.num_rows + 1 - first_row
    n_rows = good + len(rows.malformed)
    return _Layout(
        delimiter=delimiter,
        names=names,
        columns=[column[first_row - 1 :] for column in columns],
        first_row=first_row,
        rows=n_rows,
        agreement=good / max(1, n_rows),
    )
