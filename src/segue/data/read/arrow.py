"""Parquet files and tables in memory → blocks of columns in their own types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import narwhals as nw
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from segue.data.read.blocks import ROW, SAMPLE_ROWS, Block
from segue.errors import InputError

BLOCK_ROWS = 1 << 17


class ParquetInput:
    """A Parquet file, read in blocks of rows."""

    note = ""

    def __init__(self, path: Path) -> None:
        self.label = str(path)
        self.path = path
        try:
            self._file = pq.ParquetFile(path, coerce_int96_timestamp_unit="us")
        except (pa.ArrowInvalid, OSError) as error:
            raise InputError(f"{path} is a damaged Parquet file: {_first_line(error)}.") from error
        self.schema: pa.Schema = self._file.schema_arrow
        self._int96 = _int96_columns(self._file)
        self.names = list(self.schema.names)
        self.size = int(self._file.metadata.num_rows)
        if not self.size:
            raise InputError(f"{path} has columns ({', '.join(self.names)}) and no rows.")

    def sample(self, position: int) -> list[str]:
        return _sample_text(next(self._batches([self.names[position]], SAMPLE_ROWS)).column(0))

    def holds_lists(self, position: int) -> bool:
        return _is_list(self.schema.field(position).type)

    def blocks(self, positions: Mapping[str, int]) -> Iterator[Block]:
        names = list(dict.fromkeys(self.names[position] for position in positions.values()))
        done = 0
        for batch in self._batches(names, BLOCK_ROWS):
            columns = {name: batch.column(self.names[position]) for name, position in positions.items()}
            yield _block(columns, done)
            done += batch.num_rows

    def _batches(self, columns: list[str], rows: int) -> Iterator[pa.RecordBatch]:
        try:
            for batch in self._file.iter_batches(batch_size=rows, columns=columns):
                for index, name in enumerate(batch.schema.names):
                    if name in self._int96:
                        batch = batch.set_column(index, name, batch.column(index).cast(self._int96[name]))
                yield batch
        except (pa.ArrowInvalid, OSError) as error:
            raise InputError(f"{self.label} is a damaged Parquet file: {_first_line(error)}.") from error


def _int96_columns(file: pq.ParquetFile) -> dict[str, pa.DataType]:
    """The types of columns of 96-bit times (old Spark, Impala): they are UTC, though the file does not state it."""
    utc = pa.timestamp("us", "UTC")
    leaves = [file.schema.column(index) for index in range(len(file.schema))]
    old = {leaf.path for leaf in leaves if leaf.physical_type == "INT96"}
    lists = {path.removesuffix(".list.element") for path in old}
    types = {field.name: pa.list_(utc) if _is_list(field.type) else utc for field in file.schema_arrow}
    return {name: dtype for name, dtype in types.items() if name in (lists if _is_list(dtype) else old)}


class TableInput:
    """A pandas, polars or Arrow table."""

    note = ""

    def __init__(self, table: Any, *, label: str) -> None:
        self.label = label
        try:
            frame = nw.from_native(table)
        except (nw.exceptions.NarwhalsError, ValueError) as error:
            raise InputError(f"{label} cannot be used: {_first_line(error)}.") from error
        self._frame: nw.DataFrame[Any] = frame.collect() if isinstance(frame, nw.LazyFrame) else frame
        self.names = list(self._frame.columns)
        if not all(isinstance(name, str) for name in self.names):
            raise InputError(f"{label} has columns whose names are not text ({self.names[:5]}…); rename them.")
        self.size = len(self._frame)
        if not self.size:
            raise InputError(f"{label} has columns ({', '.join(self.names)}) and no rows.")

    def sample(self, position: int) -> list[str]:
        return _sample_text(self._column(position, 0, SAMPLE_ROWS))

    def holds_lists(self, position: int) -> bool:
        return isinstance(self._frame.schema[self.names[position]], nw.List)

    def blocks(self, positions: Mapping[str, int]) -> Iterator[Block]:
        for begin in range(0, self.size, BLOCK_ROWS):
            columns = {name: self._column(position, begin, BLOCK_ROWS) for name, position in positions.items()}
            yield _block(columns, begin)

    def _column(self, position: int, begin: int, rows: int) -> Any:
        """Some rows of a column; converting all would hold a pandas table in memory twice."""
        name = self.names[position]
        try:
            return self._frame[begin : begin + rows].select(name).to_arrow().column(0)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise InputError(
                f"{self.label}: the column {name!r} mixes types ({_first_line(error)}); turn it into text first."
            ) from error


def is_table(source: Any) -> bool:
    """Whether narwhals recognises a data frame, even one that it refuses."""
    try:
        return isinstance(nw.from_native(source, pass_through=True), nw.DataFrame | nw.LazyFrame)
    except (nw.exceptions.NarwhalsError, ValueError):
        return True


def _block(columns: Mapping[str, Any], done: int) -> Block:
    frame = {name: pl.Series(pl.from_arrow(_plain(column))) for name, column in columns.items()}
    count = len(next(iter(frame.values()))) if frame else 0
    rows = pl.Series(np.arange(done + 1, done + count + 1), dtype=pl.Int64)
    return Block(frame=pl.DataFrame({ROW: rows, **frame}), done=done + count)


def _plain(column: Any) -> Any:
    """Dictionary-encoded columns as their values."""
    return column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column


def _is_list(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_list(dtype) or pa.types.is_large_list(dtype) or pa.types.is_fixed_size_list(dtype))


def _sample_text(column: Any) -> list[str]:
    try:
        return ["" if cell is None else cell for cell in pc.cast(_plain(column), pa.string()).to_pylist()]
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return []


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0].rstrip(".")
