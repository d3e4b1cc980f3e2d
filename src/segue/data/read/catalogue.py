"""A table of items → the columns of a new vocabulary, or rows that fit an existing one.

The columns are the id, the title and every further column of the catalogue.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import polars as pl
from polars.datatypes import DataTypeClass

from segue.data.read.blocks import ROW, LogInput, Malformed, detached
from segue.data.read.columns import ID_NAMES, TITLE_NAMES, by_rank, listed, named_position
from segue.data.read.dates import read_dates
from segue.data.read.json_lines import JsonLinesFile
from segue.data.read.log import id_text, open_inputs
from segue.data.read.vectors import open_vectors, split_sources, with_arrays, with_vectors
from segue.errors import InputError

OWN = ("id", "count", ROW)  # columns of the vocabulary and of blocks; a catalogue's column of this name is renamed


@dataclass(frozen=True, slots=True)
class Catalogue:
    """An opened catalogue; positions: names in the vocabulary → positions in the file."""

    input: LogInput
    positions: dict[str, int]

    @property
    def columns(self) -> dict[str, str]:
        """Names in the vocabulary → names in the catalogue."""
        return {name: self.input.names[position] for name, position in self.positions.items()}

    def blocks(self) -> Iterator[tuple[pl.DataFrame, list[Malformed]]]:
        """Blocks of rows with ids as text, each with its rows that cannot be parsed."""
        log = self.input
        # vectors of JSON are read as text, as its lists may hold anything
        numbers = log.holds_numbers if isinstance(log, JsonLinesFile) else lambda _: False
        vectors = [name for name, position in self.positions.items() if numbers(position)]
        for block in log.blocks(self.positions):
            frame = block.frame.drop(ROW)
            text = id_text(pl.col("id"), frame.schema["id"])
            if text is None:
                raise InputError(f"{log.label}: the ids have the type {frame.schema['id']}; expected text or numbers.")
            yield frame.with_columns(text, pl.col(vectors).cast(pl.List(pl.Float64), strict=False)), block.malformed


def open_catalogue(source: Any, *, item: str | None) -> Catalogue:
    """Open a catalogue; its id column has a usual name or that of the log's item, its title a usual name."""
    inputs = open_inputs(source, named=set() if item is None else {item}, label="the catalogue table")
    if len(inputs) != 1:
        raise InputError(f"Expected one catalogue for --items, got {len(inputs)} files.")
    log = inputs[0]
    all_positions = list(range(len(log.names)))
    ids = [named_position(log, "item", item)] if item in log.names else by_rank(log, ID_NAMES, free=all_positions)
    if len(ids) != 1:
        state = "could be the item's id" if ids else "looks like the item's id"
        raise InputError(
            f"{log.label}: {'more than one' if ids else 'no'} column {state}; name it `item` or as in the log. "
            f"Its columns are {listed(log.names)}.{log.note}"
        )
    free = [position for position in all_positions if position not in ids]
    titles = by_rank(log, TITLE_NAMES, free=free)[:1]
    positions = {"id": ids[0]} | ({"title": titles[0]} if titles else {})
    for position in free:
        name = log.names[position] or "unnamed"
        while name in positions or name in OWN:
            name = f"catalogue_{name}"
        if position not in titles:
            positions[name] = position
    return Catalogue(input=log, positions=positions)


def described_items(
    catalogue: Catalogue, ids: pl.Series, *, max_rejected: float
) -> tuple[pl.DataFrame, dict[str, int]]:
    """The catalogue's columns for `ids`, in their order, null if it has none; and the counts of its rows.

    Of rows with the same id the first counts. Only rows of `ids` stay in memory.
    """
    id_table = pl.DataFrame({"id": ids})
    rows: list[pl.DataFrame] = []
    counts = {"rows": 0, "rejected": 0, "duplicates": 0}
    for frame, malformed in catalogue.blocks():
        counts["rows"] += frame.height + len(malformed)
        counts["rejected"] += len(malformed)
        rows.append(detached(frame.join(id_table, on="id", how="semi")))
    if counts["rejected"] > max_rejected * counts["rows"]:
        raise InputError(
            f"{catalogue.input.label}: {counts['rejected']} of {counts['rows']} rows cannot be read, "
            "more than --max-rejected allows."
        )
    matches = pl.concat(rows, how="vertical_relaxed")
    first = matches.unique("id", keep="first", maintain_order=True)
    counts["duplicates"] = matches.height - first.height
    counts["described"] = first.height
    if not first.height:
        raise InputError(
            f"{catalogue.input.label}: none of its ids is an item of the log (such as {ids[0]!r}); "
            f"is {catalogue.columns['id']!r} the column with the log's item ids?"
        )
    described = id_table.join(first, on="id", how="left", maintain_order="left")
    return with_vectors(described, catalogue.input.label), counts


def read_items(source: Any, *, item: str | None) -> tuple[pl.DataFrame, int]:
    """The items of `source` (see `items` of `prepare`), with the columns `id`, perhaps `title`, and all others; and the
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
        column = table[name] if name in table.columns else pl.Series(name, [None] * table.height, dtype=dtype)
        if column.dtype == pl.String and dtype != pl.String:  # an empty cell of a CSV file is null
            column = pl.select(pl.when(column != "").then(column)).to_series()
        columns.append(_cast(column, dtype))
        misfit = columns[-1].is_null() & column.is_not_null()
        reasons.append(pl.select(pl.when(misfit).then(pl.lit(_expected(name, dtype)))).to_series())
    rows = pl.DataFrame(columns).select(vocabulary.columns)
    return rows, pl.select(pl.coalesce(reasons)).to_series()


def _cast(column: pl.Series, dtype: pl.DataType | DataTypeClass) -> pl.Series:
    """A column in the vocabulary's type, null for each value that cannot be converted."""
    if column.dtype == dtype:
        return column
    text, truth, converted = column.dtype == pl.String, {"true": True, "false": False}, pl.Series()
    with suppress(pl.exceptions.PolarsError):  # there may be no conversion between the types
        if isinstance(dtype, pl.Array):
            converted = _vectors(column, dtype)
        elif text and dtype == pl.Boolean:
            converted = column.str.to_lowercase().replace_strict(truth, default=None, return_dtype=dtype)
        elif text and (dtype == pl.Date or isinstance(dtype, pl.Datetime)):
            converted = _dates(column, dtype)
        else:
            converted = column.cast(dtype, strict=False)
    return converted if converted.dtype == dtype else pl.Series(column.name, [None] * len(column), dtype=dtype)


def _dates(column: pl.Series, dtype: pl.DataType | DataTypeClass) -> pl.Series:
    """Times in ISO 8601; one with an offset becomes UTC if the vocabulary's have no zone."""
    zone = dtype.time_zone if isinstance(dtype, pl.Datetime) else None
    times = read_dates(column.str.strip_chars(), zone)["microseconds"].cast(pl.Datetime("us")).alias(column.name)
    if not isinstance(dtype, pl.Datetime):
        return times.cast(pl.Date).set(times != times.dt.truncate("1d"), None)
    if zone is not None:
        times = times.dt.replace_time_zone("UTC").dt.convert_time_zone(zone)
    return times.cast(dtype)


def _vectors(column: pl.Series, dtype: pl.Array) -> pl.Series:
    """Lists of finite numbers of the width of the vocabulary's vectors."""
    if not isinstance(column.dtype, pl.List | pl.Array):
        return column
    lists = column.cast(pl.List(pl.Float32), strict=False)
    finite = lists.list.eval(pl.element().is_finite().fill_null(value=False)).list.all()
    valid = (lists.list.len() == dtype.size) & finite
    none = pl.Series([None], dtype=pl.List(pl.Float32))
    return pl.select(pl.when(valid).then(lists).otherwise(none)).to_series().cast(dtype).alias(column.name)


def _expected(name: str, dtype: pl.DataType | DataTypeClass) -> str:
    if isinstance(dtype, pl.Array):
        return f"its {name!r} is not a list of {dtype.size} finite numbers"
    if dtype == pl.Date or isinstance(dtype, pl.Datetime):
        return f"its {name!r} is not a date in ISO 8601, such as 2026-01-31"
    return f"its {name!r} is not of the type {dtype}, as in the catalogue of the run"
