"""Item ids ↔ item numbers: 0 is padding and 1..n are items, so that items can be added at the end."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from segue.errors import InputError

if TYPE_CHECKING:
    import polars as pl  # imported late: callers that only look up names need not wait for it

PADDING = 0
MAX_CHUNKS = 32  # of a growing table: copying it each time takes longer than reading it in chunks
MIN_HASHED = 2_000_000  # with so many items, ids are looked up by hash: a dictionary takes 150 bytes per id


class Names(Protocol):
    """The ids, numbers and titles of items: the part of a vocabulary that recommending needs."""

    def __len__(self) -> int: ...

    def numbers(self, ids: Sequence[str], *, unknown: Literal["error", "zero"]) -> np.ndarray: ...

    def ids(self, numbers: np.ndarray) -> list[str]: ...

    def titles(self, numbers: np.ndarray) -> list[str | None]: ...


class Vocabulary:
    """Item ids and their columns of the catalogue; row i describes item number i + 1.

    `table` has the columns `id` and `count`, perhaps `title`, and any further catalogue columns.
    """

    def __init__(self, table: pl.DataFrame) -> None:
        self.table = table

    def __len__(self) -> int:
        return self.table.height

    @property
    def _many(self) -> bool:
        return len(self) >= MIN_HASHED

    @cached_property
    def _hashed(self) -> _HashedIds:
        return _HashedIds(self.table["id"])

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {identifier: number for number, identifier in enumerate(self.table["id"].to_list(), start=1)}

    def numbers(self, ids: Sequence[str], *, unknown: Literal["error", "zero"]) -> np.ndarray:
        """Numbers of ids [n] int64; an unknown id is an error (in training) or 0 (in serving)."""
        if self._many:
            numbers = self._hashed.numbers(ids)
        else:
            values = map(self._numbers.get, ids, itertools.repeat(PADDING))
            numbers = np.fromiter(values, dtype=np.int64, count=len(ids))
        if unknown == "error" and not numbers.all():
            missing = ids[int(np.flatnonzero(numbers == PADDING)[0])]
            raise InputError(f"The item {missing!r} is not in the catalogue of {len(self)} items.")
        return numbers

    def ids(self, numbers: np.ndarray) -> list[str]:
        """Ids of item numbers, each in 1..n."""
        if self._many:
            return self.table["id"].gather(np.asarray(numbers, dtype=np.int64) - 1).to_list()
        ids = self._ids
        return [ids[number] for number in np.asarray(numbers).tolist()]

    def titles(self, numbers: np.ndarray) -> list[str | None]:
        """Titles of item numbers, None if the catalogue has none."""
        if self._many:
            titled = "title" in self.table.columns
            rows = np.asarray(numbers, dtype=np.int64) - 1
            return self.table["title"].gather(rows).to_list() if titled else [None] * len(rows)
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
        """A longer vocabulary, with new items at the end in the order of `rows`, which has the same columns; the row of
        a known id replaces the old one. This vocabulary does not change."""
        import polars as pl

        ids = rows["id"].to_list()
        known = self.numbers(ids, unknown="zero")
        table = pl.concat([self.table, rows.select(self.table.columns)])
        if known.any():
            order = np.arange(len(self) + len(ids))
            order[known[known > 0] - 1] = len(self) + np.flatnonzero(known > 0)
            table = table[np.concatenate((order[: len(self)], len(self) + np.flatnonzero(known == 0)))]
        elif table.n_chunks() > MAX_CHUNKS:
            table = table.rechunk()
        extended = Vocabulary(table)
        if extended._many:
            return extended
        new = [name for name, number in zip(ids, known.tolist(), strict=True) if not number]
        # Copying the dictionary is a hundred times faster than building it again for a large catalogue.
        extended._numbers = self._numbers | dict(zip(new, range(len(self) + 1, len(extended) + 1), strict=True))
        return extended

    def vectors(self, column: str) -> np.ndarray:
        """A column of vectors [V + 1, F] float32; zeros for number 0 and for items without a vector."""
        self._refuse_missing(column, "vectors", own=("id", "count", "title"))
        import polars as pl

        dtype = self.table.schema[column]
        if not isinstance(dtype, pl.Array):
            raise InputError(
                f"The catalogue's column {column!r} holds {dtype}, not vectors; name a column of lists of numbers."
            )
        vectors = np.zeros((len(self) + 1, dtype.size), dtype=np.float32)
        has_vector = self.table[column].is_not_null().to_numpy()
        vectors[1:][has_vector] = self.table[column].drop_nulls().to_numpy()
        return vectors

    def texts(self, columns: Sequence[str]) -> list[str]:
        """The texts of columns joined for each item [V]; empty if it has none."""
        import polars as pl

        words = []
        for column in columns:
            self._refuse_missing(column, "texts", own=("id", "count"))
            dtype, is_list = self.table.schema[column], self.table.schema[column] == pl.List(pl.String)
            if dtype.is_nested() and not is_list:
                raise InputError(
                    f"The catalogue's column {column!r} holds {dtype}, not texts; name it as model.items.vectors if it "
                    "holds vectors, or leave it out."
                )
            words.append(pl.col(column).list.join(" ") if is_list else pl.col(column).cast(pl.String))
        joined = pl.concat_str(words, separator=" ", ignore_nulls=True).fill_null("")
        return self.table.select(joined).to_series().to_list()

    def _refuse_missing(self, column: str, what: str, *, own: Sequence[str]) -> None:
        if column in self.table.columns:
            return
        others = [name for name in self.table.columns if name not in own]
        has = f"it has {', '.join(others)}" if others else "it has none: give one with `segue prepare --items`"
        raise InputError(f"The catalogue has no column {column!r} to take {what} from; {has}.")

    # Lists, because the service looks up a few items many times a second. Number 0 is no item.
    @cached_property
    def _ids(self) -> list[str]:
        return ["", *self._numbers]

    @cached_property
    def _titles(self) -> list[str | None]:
        return [None, *(self.table["title"] if "title" in self.table.columns else [None] * len(self))]


class _HashedIds:
    """Ids of many items → numbers, in twelve bytes per item: sorted hashes and their rows."""

    def __init__(self, ids: pl.Series) -> None:
        self._ids = ids
        self._seed = 0
        while True:
            hashes = ids.hash(self._seed).to_numpy()
            order = np.argsort(hashes)
            self._hashes, self._rows = hashes[order], order.astype(np.int32)
            if not (self._hashes[1:] == self._hashes[:-1]).any():  # no two ids share a hash
                return
            self._seed += 1

    def numbers(self, ids: Sequence[str]) -> np.ndarray:
        """[n] int64, 0 for unknown ids."""
        import polars as pl

        queries = pl.Series(list(ids), dtype=pl.String)
        indices = np.searchsorted(self._hashes, queries.hash(self._seed).to_numpy())
        rows = self._rows[np.minimum(indices, len(self._rows) - 1)].astype(np.int64)
        same = (self._ids.gather(rows) == queries).to_numpy()
        return np.where(same, rows + 1, PADDING)


class Kinds:
    """The kinds of events that a run was trained on, whose numbers may differ from those of another log; an unknown
    kind has the number after the last."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        """names: by number, as in a data folder; the empty name is that of events without a kind."""
        self.names = tuple(names)
        self._numbers = {name: number for number, name in enumerate(self.names)}

    def __len__(self) -> int:
        return len(self.names)

    def numbers(self, names: Sequence[str | None]) -> np.ndarray:
        """Numbers of kinds [n] int64; None is an event without a kind."""
        numbers = map(self._numbers.get, (name or "" for name in names), itertools.repeat(len(self.names)))
        return np.fromiter(numbers, dtype=np.int64, count=len(names))
