"""The catalogue of a run, searched by id and title and filtered by its columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import polars as pl

from segue.data.vocabulary import Vocabulary
from segue.errors import InputError
from segue.serving.http.bodies import CatalogueItem
from segue.serving.requests import FilterValue
from segue.serving.store.store import AddedItem

OWN = ("id", "title", "count")
MOST_EXACT = 2.0**53  # beyond it not every whole number is a float of its own
KEPT_FILTERS = 32  # an answer costs one list of item numbers each


class CatalogueSearch:
    """What a run's items.parquet says of each item."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._table = vocabulary.table
        # Vectors are read by models, not by people.
        self.columns = [
            name for name, dtype in self._table.schema.items() if name not in OWN and not isinstance(dtype, pl.Array)
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
        self._allowed = lru_cache(maxsize=KEPT_FILTERS)(partial(_numbers_where, self._table))

    def search(self, text: str, limit: int) -> list[CatalogueItem]:
        """Items with this text in the id or the title, in any case: the exact id, then those that begin with it, then
        the others, the more frequent first. Without a text, the most frequent items."""
        wanted = text.strip().lower()
        found = self._lower
        if wanted:
            inside = pl.any_horizontal(pl.col("id", "title").str.contains(wanted, literal=True))
            begins = pl.any_horizontal(pl.col("id", "title").str.starts_with(wanted))
            found = found.filter(inside).with_columns(
                rank=pl.when(pl.col("id") == wanted).then(2).otherwise(begins.cast(pl.Int32))
            )
            found = found.sort("rank", "count", "row", descending=[True, True, False])
        else:
            found = found.sort("count", "row", descending=[True, False])
        rows = found["row"].head(limit)
        return [_item(row, self.columns) for row in self._table[rows.to_numpy()].to_dicts()]

    def allowed(self, where: Mapping[str, Sequence[FilterValue]]) -> np.ndarray:
        """Numbers of the items that fit every column's values; of a column, any of its values will do."""
        for column in where:
            if column not in self.columns:
                known = ", ".join(self.columns) or "none"
                raise InputError(f"The catalogue has no column {column!r} to filter by; its columns are: {known}.")
        return self._allowed(tuple(sorted((name, tuple(map(_text, values))) for name, values in where.items())))


def new_rows(items: Sequence[AddedItem], vocabulary: Vocabulary) -> pl.DataFrame:
    """Items that were added while serving, with those columns that a run's catalogue has."""
    columns = [pl.Series("id", [item.id for item in items], dtype=pl.String)]
    for name, dtype in vocabulary.table.schema.items():
        if name not in ("id", "count") and any(name in item.row for item in items):
            columns.append(_said(name, dtype, [item.row.get(name) for item in items]))
    return pl.DataFrame(columns)


def _said(name: str, dtype: pl.DataType, values: Sequence[Any]) -> pl.Series:
    """What JSON says of a column: texts, which are read as all new items' are, or lists where it holds lists."""
    if dtype == pl.List(pl.String):
        texts = [None if value is None else [_text(one) for one in _listed(value)] for value in values]
        return pl.Series(name, texts, dtype)
    if dtype.is_nested():
        lists = [value if isinstance(value, list) else [] if value is not None else None for value in values]
        return pl.Series(name, lists, pl.List(pl.Float64), strict=False)
    return pl.Series(name, [None if value is None else _text(value) for value in values], pl.String)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _numbers_where(table: pl.DataFrame, where: tuple[tuple[str, tuple[str, ...]], ...]) -> np.ndarray:
    kept = np.ones(table.height, dtype=bool)
    for name, values in where:
        kept &= _fits(table[name], values)
    return np.flatnonzero(kept) + 1


def _item(row: Mapping[str, Any], columns: Sequence[str]) -> CatalogueItem:
    details = {name: row[name] for name in columns if row[name] is not None}
    return CatalogueItem(id=row["id"], title=row.get("title"), count=row["count"], details=details)


def _text(value: FilterValue) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _numbers(values: Sequence[str], dtype: pl.DataType) -> pl.Series:
    """The values that are numbers, in a column's own type, where no two numbers of the column are one: 2.0 is 2."""
    texts = pl.Series(values, dtype=pl.String)
    numbers = texts.cast(pl.Float64, strict=False)
    if dtype.is_float():
        return numbers.cast(dtype).drop_nulls()
    whole = numbers.set((numbers != numbers.round()) | (numbers.abs() > MOST_EXACT), None)
    exact = texts.cast(dtype, strict=False)
    return exact.fill_null(whole.cast(dtype, strict=False)).drop_nulls()


def _fits(column: pl.Series, values: Sequence[str]) -> np.ndarray:
    """Where a column has one of the values: numbers are compared as numbers, everything else as text."""
    if column.dtype.is_numeric():
        return column.is_in(_numbers(values, column.dtype).implode()).fill_null(value=False).to_numpy()
    if column.dtype.is_nested():
        raise InputError(f"The column {column.name!r} holds lists or records, by which nothing can be filtered.")
    return column.cast(pl.String).is_in(list(values)).fill_null(value=False).to_numpy()
