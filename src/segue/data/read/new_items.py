"""A table of new items → rows of an existing vocabulary: its columns, its types, and what does not fit."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import polars as pl
from polars.datatypes import DataTypeClass

from segue.data.read.catalogue import open_catalogue, with_arrays
from segue.data.read.dates import read_dates
from segue.data.read.log import id_text
from segue.data.read.vectors import open_vectors, split_sources
from segue.errors import InputError


def read_items(source: Any, *, item: str | None) -> tuple[pl.DataFrame, int]:
    """Every item of `items` as `prepare` takes it, with the columns `id`, perhaps `title`, and all others; and the
    number of rows left out because their id came before. A row that cannot be parsed is an error.

    item: the catalogue's column of the id, if it has no usual name.
    """
    table, arrays = split_sources(source)
    files = [open_vectors(path) for path in arrays]
    if table is None:
        ids = pl.concat([file.ids.alias("id") for file in files]).unique(maintain_order=True)
        return with_arrays(ids.to_frame(), files), 0
    catalogue = open_catalogue(table, item=item)
    if item is not None and catalogue.columns["id"] != item:
        raise InputError(f"{catalogue.input.label} has no column {item!r}; --item names the column of the id.")
    frames = []
    for frame, malformed in catalogue.blocks():
        for first in malformed[:1]:
            raise InputError(f"{catalogue.input.label}, row {first.row}: {first.reason}; correct or remove it.")
        frames.append(frame)
    rows = pl.concat(frames, how="vertical_relaxed")
    distinct = rows.unique("id", keep="first", maintain_order=True)
    return with_arrays(distinct, files), rows.height - distinct.height


def fitted(table: pl.DataFrame, vocabulary: pl.DataFrame) -> tuple[pl.DataFrame, pl.Series]:
    """Rows with the columns of a vocabulary's table, for items without events; and the reason why a row does not fit
    [n], null if it does.

    A column that the table lacks is null, one that the vocabulary lacks is left out. Of rows with the same id the last
    counts.
    """
    if "id" not in table.columns:
        raise InputError(f"New items need a column `id`; their columns are {', '.join(table.columns) or 'none'}.")
    text = id_text(pl.col("id"), table.schema["id"])
    if text is None:
        raise InputError(f"The ids of new items have the type {table.schema['id']}; expected text or numbers.")
    table = table.with_columns(text)
    if table["id"].is_null().any() or (table["id"] == "").any():
        raise InputError("A new item has no id; give each item one.")
    table = table.unique("id", keep="last", maintain_order=True)
    columns, reasons = [table["id"]], [pl.Series([None] * table.height, dtype=pl.String)]
    for name, dtype in vocabulary.schema.items():
        if name == "id":
            continue
        if name == "count":
            columns.append(pl.Series(name, [0] * table.height, dtype=dtype))
            continue
        given = table[name] if name in table.columns else pl.Series(name, [None] * table.height, dtype=dtype)
        if given.dtype == pl.String and dtype != pl.String:  # an empty cell of a CSV file is null
            given = pl.select(pl.when(given != "").then(given)).to_series()
        columns.append(_cast(given, dtype))
        misfit = columns[-1].is_null() & given.is_not_null()
        reasons.append(pl.select(pl.when(misfit).then(pl.lit(_expected(name, dtype)))).to_series())
    rows = pl.DataFrame(columns).select(vocabulary.columns)
    return rows, pl.select(pl.coalesce(reasons)).to_series()


def _cast(given: pl.Series, dtype: pl.DataType | DataTypeClass) -> pl.Series:
    """A column in the vocabulary's type, null for each value that cannot be converted."""
    if given.dtype == dtype:
        return given
    text, truth, converted = given.dtype == pl.String, {"true": True, "false": False}, pl.Series()
    with suppress(pl.exceptions.PolarsError):  # there may be no conversion between the types
        if isinstance(dtype, pl.Array):
            converted = _vectors(given, dtype)
        elif text and dtype == pl.Boolean:
            converted = given.str.to_lowercase().replace_strict(truth, default=None, return_dtype=dtype)
        elif text and (dtype == pl.Date or isinstance(dtype, pl.Datetime)):
            converted = _dates(given, dtype)
        else:
            converted = given.cast(dtype, strict=False)
    return converted if converted.dtype == dtype else pl.Series(given.name, [None] * len(given), dtype=dtype)


def _dates(given: pl.Series, dtype: pl.DataType | DataTypeClass) -> pl.Series:
    """Times in ISO 8601; one with an offset becomes UTC if the vocabulary's have no zone."""
    zone = dtype.time_zone if isinstance(dtype, pl.Datetime) else None
    times = read_dates(given.str.strip_chars(), zone)["microseconds"].cast(pl.Datetime("us")).alias(given.name)
    if not isinstance(dtype, pl.Datetime):
        return times.cast(pl.Date).set(times != times.dt.truncate("1d"), None)
    if zone is not None:
        times = times.dt.replace_time_zone("UTC").dt.convert_time_zone(zone)
    return times.cast(dtype)


def _vectors(given: pl.Series, dtype: pl.Array) -> pl.Series:
    """Lists of finite numbers of the width of the vocabulary's vectors."""
    if not isinstance(given.dtype, pl.List | pl.Array):
        return given
    lists = given.cast(pl.List(pl.Float32), strict=False)
    finite = lists.list.eval(pl.element().is_finite().fill_null(value=False)).list.all()
    valid = (lists.list.len() == dtype.size) & finite
    none = pl.Series([None], dtype=pl.List(pl.Float32))
    return pl.select(pl.when(valid).then(lists).otherwise(none)).to_series().cast(dtype).alias(given.name)


def _expected(name: str, dtype: pl.DataType | DataTypeClass) -> str:
    if isinstance(dtype, pl.Array):
        return f"its {name!r} is not a list of {dtype.size} finite numbers"
    if dtype == pl.Date or isinstance(dtype, pl.Datetime):
        return f"its {name!r} is not a date in ISO 8601, such as 2026-01-31"
    return f"its {name!r} is not of the type {dtype}, as in the catalogue of the run"
