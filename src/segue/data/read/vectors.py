"""Vectors of items: columns of lists in a catalogue, or arrays with a file of ids each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from segue.data.read.streams import check_file
from segue.errors import InputError

NPY = ".npy"


@dataclass(frozen=True, slots=True, eq=False)
class VectorFile:
    """An array of vectors, opened by memory map, and the ids of its rows."""

    path: Path  # its stem is the name of the column
    vectors: np.ndarray  # [n, F]
    ids: pl.Series  # [n] text


def split_sources(source: Any) -> tuple[Any, list[Path]]:
    """The value of --items → the catalogue, None if there is none, and the paths of arrays of vectors."""
    if isinstance(source, str | os.PathLike):
        source = [source]
    if not isinstance(source, Sequence) or not all(isinstance(path, str | os.PathLike) for path in source):
        return source, []
    paths = [Path(path) for path in source]
    arrays = [path for path in paths if path.suffix == NPY]
    others = [path for path in paths if path.suffix != NPY]
    return (others or None if paths else source), arrays


def open_vectors(path: Path) -> VectorFile:
    """Open an array [n, F] of numbers in a .npy file, and the file of ids beside it."""
    check_file(path)
    vectors = _array(path)
    if vectors.ndim != 2 or not vectors.shape[1] or vectors.dtype.kind not in "fiu":
        raise InputError(
            f"{path} holds an array of shape {list(vectors.shape)} and type {vectors.dtype}; expected one row of "
            "numbers an item."
        )
    ids = _ids(path)
    if len(ids) != len(vectors):
        raise InputError(f"{path} has {len(vectors)} rows, but its file of ids has {len(ids)}; expected one id a row.")
    return VectorFile(path, vectors, ids)


def _array(path: Path) -> np.ndarray:
    try:
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise InputError(f"{path} cannot be read as an array ({error}); save it with numpy.save.") from error
    return array


def _ids(path: Path) -> pl.Series:
    text, array = (path.with_name(f"{path.stem}.ids{suffix}") for suffix in (".txt", NPY))
    if text.exists():
        check_file(text)
        try:
            lines = text.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")  # universal newlines
            return pl.Series(lines, dtype=pl.String)
        except UnicodeDecodeError as error:
            raise InputError(f"{text} is not UTF-8; save the ids as UTF-8, one a line.") from error
    if not array.exists():
        raise InputError(f"{path} has no file of ids: write them to {text}, one a line in the order of its rows.")
    ids = _array(array)
    if ids.ndim != 1 or ids.dtype.kind not in "Uiu":
        raise InputError(
            f"{array} holds an array of shape {list(ids.shape)} and type {ids.dtype}; expected one id a row of {path}, "
            "as text or whole numbers."
        )
    return pl.Series(np.asarray(ids)).cast(pl.String)


def with_arrays(table: pl.DataFrame, files: Sequence[VectorFile]) -> pl.DataFrame:
    """A vocabulary's table with one more column for each array: the vectors of its ids, null if the file has none.

    Of rows of an array with the same id the first counts.
    """
    for file in files:
        name, width = file.path.stem, file.vectors.shape[1]
        if name in table.columns:
            raise InputError(
                f"{file.path}: its vectors would be the column {name!r}, which the catalogue has already; "
                "rename the file, and the one with its ids."
            )
        row_of_id = pl.DataFrame({"id": file.ids, "row": np.arange(len(file.ids))}).unique("id", keep="first")
        rows = table.select("id").join(row_of_id, on="id", how="left", maintain_order="left")["row"]
        if rows.null_count() == len(rows):
            raise InputError(
                f"{file.path}: none of its ids (such as {file.ids.first()!r}) is an item of the log (such as "
                f"{table['id'][0]!r}); does its file of ids hold the ids of the log's items?"
            )
        has_vector = rows.is_not_null().to_numpy()
        vectors = np.zeros((len(rows), width), dtype=np.float32)
        with np.errstate(over="ignore"):  # a number that is too large is refused below
            vectors[has_vector] = file.vectors[rows.drop_nulls().to_numpy()]
        _refuse_infinite(vectors, str(file.path))
        column = pl.Series(vectors, dtype=pl.Array(pl.Float32, width))
        table = table.with_columns(pl.when(pl.Series(has_vector)).then(column).alias(name))
    return table


def with_vectors(table: pl.DataFrame, label: str) -> pl.DataFrame:
    """A catalogue with its columns of lists of numbers as vectors of one width each."""
    for name, dtype in table.schema.items():
        if not isinstance(dtype, pl.List | pl.Array) or not dtype.inner.is_numeric():
            continue
        column = table[name].arr.to_list() if isinstance(dtype, pl.Array) else table[name]
        sizes = column.list.len().drop_nulls().unique().sort()
        if len(sizes) > 1 or (len(sizes) and not sizes[0]):
            shown = ", ".join(map(str, sizes.head(4).to_list())) + (", …" if len(sizes) > 4 else "")
            raise InputError(
                f"{label}: the lists in {name!r} have {shown} numbers; expected as many in every row, or an "
                "empty cell for an item without a vector."
            )
        width = int(sizes[0]) if len(sizes) else 1
        vectors = column.cast(pl.List(pl.Float32), strict=False).list.to_array(width)
        _refuse_infinite(vectors.drop_nulls().to_numpy(), f"{label}: the column {name!r}")
        table = table.with_columns(vectors)
    return table


def widths(table: pl.DataFrame) -> dict[str, dict[str, int]]:
    """For each column of vectors, its width and the number of items that have one."""
    return {
        name: {"width": dtype.size, "items": table.height - table[name].null_count()}
        for name, dtype in table.schema.items()
        if isinstance(dtype, pl.Array)
    }


def _refuse_infinite(vectors: np.ndarray, label: str) -> None:
    finite = np.isfinite(vectors)
    if not finite.all():
        raise InputError(
            f"{label} holds {int((~finite).sum())} numbers that are missing, infinite or too large for a vector; leave "
            "the whole vector out if a number is unknown."
        )
