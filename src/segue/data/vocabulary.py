"""Identifiers outside, numbers inside: 0 is padding, 1..n are items, so that items can be added at the end."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from segue.errors import InputError

if TYPE_CHECKING:
    import polars as pl  # whoever has a table has it already, and who only asks for names need not wait for it

PADDING = 0
MOST_CHUNKS = 32  # of a table that grows: to copy it each time takes longer than to read it in pieces
LEAST_HASHED = 2_000_000  # items from which on ids are found by their hashes: in a dictionary they take 150 bytes each


class Names(Protocol):
    """What answering needs to know of items: their ids, their numbers and their titles."""

    def __len__(self) -> int: ...

    def numbers(self, ids: Sequence[str], *, unknown: Literal["error", "zero"]) -> np.ndarray: ...

    def ids(self, numbers: np.ndarray) -> list[str]: ...

    def titles(self, numbers: np.ndarray) -> list[str | None]: ...


class Vocabulary:
    """Item ids and what the catalogue says of them; row i describes item number i + 1.

    `table` has the columns `id` and `count`, perhaps `title`, and any further catalogue columns.
    """

    def __init__(self, table: pl.DataFrame) -> None:
        self.table = table

    def __len__(self) -> int:
        return self.table.height

    @property
    def _many(self) -> bool:
        return len(self) >= LEAST_HASHED

    @cached_property
    def _hashed(self) -> _HashedIds:
        return _HashedIds(self.table["id"])

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {identifier: number for number, identifier in enumerate(self.table["id"].to_list(), start=1)}

    def numbers(self, ids: Sequence[str], *, unknown: Literal["error", "zero"]) -> np.ndarray:
        """Numbers of ids [n] int64; an unknown id is an error (a bug in training) or 0 (normal when serving)."""
        if self._many:
            found = self._hashed.numbers(ids)
        else:
            found = np.fromiter(map(self._numbers.get, ids, itertools.repeat(PADDING)), dtype=np.int64, count=len(ids))
        if unknown == "error" and not found.all():
            missing = ids[int(np.flatnonzero(found == PADDING)[0])]
            raise InputError(f"The item {missing!r} is not in the catalogue of {len(self)} items.")
        return found

    def ids(self, numbers: np.ndarray) -> list[str]:
        """Ids of item numbers, each in 1..n."""
        if self._many:
            return self.table["id"].gather(np.asarray(numbers, dtype=np.int64) - 1).to_list()
        ids = self._ids
        return [ids[number] for number in np.asarray(numbers).tolist()]

    def titles(self, numbers: np.ndarray) -> list[str | None]:
        """Titles of item numbers, None where the catalogue has none."""
        if self._many:
            named = "title" in self.table.columns
            places = np.asarray(numbers, dtype=np.int64) - 1
            return self.table["title"].gather(places).to_list() if named else [None] * len(places)
        titles = self._titles
        return [titles[number] for number in np.asarray(numbers).tolist()]

    def categories(self, column: str) -> np.ndarray | None:
        """The number 1 … C of each item's value in a column of the catalogue [V + 1] int64; 0 for number 0, and one
        number for all items without a value. None without a column's name."""
        if not column:
            return None
        self._refuse_missing(column, "categories", own=("id", "count", "title"))
        import polars as pl

        _, numbers = np.unique(self.table[column].cast(pl.String).fill_null("").to_numpy(), return_inverse=True)
        return np.concatenate(([PADDING], numbers + 1)).astype(np.int64)

    def with_rows(self, rows: pl.DataFrame) -> Vocabulary:
        """With further items at the end, in the order of `rows`, which has the same columns; the row of an id that is
        there already takes the place of the old one. This vocabulary stays as it is."""
        import polars as pl

        ids = rows["id"].to_list()
        known = self.numbers(ids, unknown="zero")
        table = pl.concat([self.table, rows.select(self.table.columns)])
        if known.any():
            places = np.arange(len(self) + len(ids))
            places[known[known > 0] - 1] = len(self) + np.flatnonzero(known > 0)
            table = table[np.concatenate((places[: len(self)], len(self) + np.flatnonzero(known == 0)))]
        elif table.n_chunks() > MOST_CHUNKS:
            table = table.rechunk()
        extended = Vocabulary(table)
        if extended._many:
            return extended
        new = [name for name, number in zip(ids, known.tolist(), strict=True) if not number]
        # The copy of a table of numbers is a hundred times faster than to make it again of a large catalogue.
        extended._numbers = self._numbers | dict(zip(new, range(len(self) + 1, len(extended) + 1), strict=True))
        return extended

    def vectors(self, column: str) -> np.ndarray:
        """A column of vectors [V + 1, F] float32; zeros for number 0 and for items without one."""
        self._refuse_missing(column, "vectors", own=("id", "count", "title"))
        import polars as pl

        dtype = self.table.schema[column]
        if not isinstance(dtype, pl.Array):
            raise InputError(
                f"The catalogue's column {column!r} holds {dtype}, and not vectors: name a column of lists of numbers."
            )
        vectors = np.zeros((len(self) + 1, dtype.size), dtype=np.float32)
        given = self.table[column].is_not_null().to_numpy()
        vectors[1:][given] = self.table[column].drop_nulls().to_numpy()
        return vectors

    def texts(self, columns: Sequence[str]) -> list[str]:
        """What columns say of each item, one after the other [V]; empty where they say nothing."""
        import polars as pl

        for column in columns:
            self._refuse_missing(column, "texts", own=("id", "count"))
            if self.table.schema[column].is_nested() and self.table.schema[column] != pl.List(pl.String):
                raise InputError(
                    f"The catalogue's column {column!r} holds {self.table.schema[column]}, and not texts: name it as "
                    "model.vectors if it holds vectors, or leave it out."
                )
        words = [
            pl.col(column).list.join(" ")
            if self.table.schema[column] == pl.List(pl.String)
            else pl.col(column).cast(pl.String)
            for column in columns
        ]
        return (
            self.table.select(pl.concat_str(words, separator=" ", ignore_nulls=True).fill_null(""))
            .to_series()
            .to_list()
        )

    def _refuse_missing(self, column: str, what: str, *, own: Sequence[str]) -> None:
        if column in self.table.columns:
            return
        others = [name for name in self.table.columns if name not in own]
        has = f"it has {', '.join(others)}" if others else "it has none: give one with `segue prepare --items`"
        raise InputError(f"The catalogue has no column {column!r} to take {what} from; {has}.")

    # Lists, because an answer's few items are looked up many times a second; their texts are those of `_numbers`.
    # Number 0 is no item.
    @cached_property
    def _ids(self) -> list[str]:
        return ["", *self._numbers]

    @cached_property
    def _titles(self) -> list[str | None]:
        return [None, *(self.table["title"] if "title" in self.table.columns else [None] * len(self))]


class _HashedIds:
    """Ids of many items → numbers, by twelve bytes an item: hashes in order, and whose they are."""

    def __init__(self, ids: pl.Series) -> None:
        self._ids = ids
        self._seed = 0
        while True:
            hashes = ids.hash(self._seed).to_numpy()
            order = np.argsort(hashes)
            self._hashes, self._places = hashes[order], order.astype(np.int32)
            if not (self._hashes[1:] == self._hashes[:-1]).any():  # else two ids have one hash: another seed
                return
            self._seed += 1

    def numbers(self, ids: Sequence[str]) -> np.ndarray:
        """[n] int64, 0 where an id is unknown."""
        import polars as pl

        asked = pl.Series(list(ids), dtype=pl.String)
        places = np.searchsorted(self._hashes, asked.hash(self._seed).to_numpy())
        rows = self._places[np.minimum(places, len(self._places) - 1)].astype(np.int64)
        same = (self._ids.gather(rows) == asked).to_numpy()
        return np.where(same, rows + 1, PADDING)
