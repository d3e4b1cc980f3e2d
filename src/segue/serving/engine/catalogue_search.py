"""Search by id and title in a run's catalogue, and filters by its columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial

import numpy as np
import polars as pl

from segue.data.vocabulary import Vocabulary
from segue.errors import InputError
from segue.serving.http.bodies import CatalogueItem
from segue.serving.requests import FilterValue
from segue.serving.store.store import AddedItem

OWN_COLUMNS = ("id", "title", "count")
MAX_EXACT_FLOAT = 2.0**53  # above it, two integers may be the same float
CACHED_FILTERS = 32  # each is an array of item numbers


class CatalogueSearch:
    """The rows of a run's items.parquet."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._table = vocabulary.table
        # Vectors are for models; they are neither shown nor filtered by.
        self.columns = [
            name
            for name, dtype in self._table.schema.items()
            if name not in OWN_COLUMNS and not isinstance(dtype, pl.Array)
        ]
        titles = self._table["title"] if "title" in self._table.columns else self._table["id"]
        self._lower = pl.DataFrame(
            {
                "id": self._table["id"].str.to_lowercase(),
                "title": titles.cast(pl.String).fill_null("").str.to_lowercase(),
                "count": self._table["count"],
                "row": np.arange(self._table.height),
            }
        )
        self._allowed = lru_cache(maxsize=CACHED_FILTERS)(partial(_matching_items, self._table))

    def search(self, text: str, limit: int) -> list[CatalogueItem]:
        """Items whose id or title contains the text, in any case: the exact id, then items that start with the text,
        then the others, each by descending count. Without a text, the most frequent items."""
        text = text.strip().lower()
        if text:
            contains = pl.any_horizontal(pl.col("id", "title").str.contains(text, literal=True))
            starts = pl.any_horizontal(pl.col("id", "title").str.starts_with(text))
            rank = pl.when(pl.col("id") == text).then(2).otherwise(starts.cast(pl.Int32))
            matches = self._lower.filter(contains).sort(rank, "count", "row", descending=[True, True, False])
        else:
            matches = self._lower.sort("count", "row", descending=[True, False])
        rows = self._table[matches["row"].head(limit).to_numpy()].to_dicts()
        return [
            CatalogueItem(
                id=row["id"],
                title=row.get("title"),
                count=row["count"],
                details={name: row[name] for name in self.columns if row[name] is not None},
            )
            for row in rows
        ]

    def allowed(self, where: Mapping[str, Sequence[FilterValue]]) -> np.ndarray:
        """Numbers of the items that have, in every given column, one of its given values."""
        for column in where:
            if column not in self.columns:
                known = ", ".join(self.columns) or "none"
                raise InputError(f"The catalogue has no column {column!r} to filter by; its columns are: {known}.")
        return self._allowed(tuple(sorted((name, tuple(map(_text, values))) for name, values in where.items())))


def new_rows(items: Sequence[AddedItem], vocabulary: Vocabulary) -> pl.DataFrame:
    """Items added while serving, with those columns that a run's catalogue has: JSON values as lists for a nested
    dtype, otherwise as text, which is parsed like that of all new items."""
    columns = [pl.Series("id", [item.id for item in items], dtype=pl.String)]
    for name, dtype in vocabulary.table.schema.items():
        if name in ("id", "count") or not any(name in item.row for item in items):
            continue
        values = [item.row.get(name) for item in items]
        if dtype == pl.List(pl.String):
            lists = [value if value is None or isinstance(value, list) else [value] for value in values]
            texts = [None if value is None else [_text(one) for one in value] for value in lists]
            columns.append(pl.Series(name, texts, dtype))
        elif dtype.is_nested():
            numbers = [value if value is None or isinstance(value, list) else [] for value in values]
            columns.append(pl.Series(name, numbers, pl.List(pl.Float64), strict=False))
        else:
            columns.append(pl.Series(name, [None if value is None else _text(value) for value in values], pl.String))
    return pl.DataFrame(columns)


def _text(value: FilterValue) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _matching_items(table: pl.DataFrame, where: tuple[tuple[str, tuple[str, ...]], ...]) -> np.ndarray:
    """Items with one of the values in each column: numbers are compared as numbers, everything else as text."""
    matches = np.ones(table.height, dtype=bool)
    for name, values in where:
        column = table[name]
        if column.dtype.is_nested():
            raise InputError(
                f"A filter needs a column of texts or numbers; {name!r} holds lists or records. Filter by another."
            )
        if column.dtype.is_numeric():
            has_value = column.is_in(_numbers(values, column.dtype).implode())
        else:
            has_value = column.cast(pl.String).is_in(list(values))
        matches &= has_value.fill_null(value=False).to_numpy()
    return np.flatnonzero(matches) + 1


def _numbers(values: Sequence[str], dtype: pl.DataType) -> pl.Series:
    """The values that are numbers, in the column's dtype, exactly: 2.0 becomes the integer 2, and 2.5 none."""
    texts = pl.Series(values, dtype=pl.String)
    numbers = texts.cast(pl.Float64, strict=False)
    if dtype.is_float():
        return numbers.cast(dtype).drop_nulls()
    whole = numbers.set((numbers != numbers.round()) | (numbers.abs() > MAX_EXACT_FLOAT), None)
    exact = texts.cast(dtype, strict=False)
    return exact.fill_null(whole.cast(dtype, strict=False)).drop_nulls()
