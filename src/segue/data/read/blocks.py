"""The output of every reader: blocks of columns with row numbers, and the rows that cannot be parsed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import polars as pl

SAMPLE_ROWS = 200  # rows whose values help to find the columns
ROW = "row"  # the column of row numbers; the header of a text file is row 1


def detached(frame: pl.DataFrame) -> pl.DataFrame:
    """A copy with memory of its own; without it, some rows of a block keep the text of the whole block in memory."""
    return pl.DataFrame(pl.from_arrow(frame.to_arrow(compat_level=pl.CompatLevel.oldest())))


@dataclass(frozen=True, slots=True)
class Malformed:
    """A row that cannot be parsed: its number, the reason and its text."""

    row: int
    reason: str
    text: str


@dataclass(frozen=True, slots=True)
class Block:
    """Some consecutive rows: the column `row` and every requested column."""

    frame: pl.DataFrame
    malformed: list[Malformed] = field(default_factory=list)
    done: int = 0  # of the input's `size`, for progress


class LogInput(Protocol):
    """An opened file or table: its columns are known, its rows are read block by block."""

    label: str
    """Its name in messages."""
    names: list[str]
    """Its columns, in order; a name may occur twice."""
    size: int
    """Bytes or rows, for progress."""

    @property
    def note(self) -> str:
        """A sentence to add if its columns cannot be found."""

    def sample(self, position: int) -> list[str]:
        """The first values of a column as text."""

    def holds_lists(self, position: int) -> bool:
        """Whether the column's type is a list (Parquet, tables, JSON)."""

    def blocks(self, positions: Mapping[str, int]) -> Iterator[Block]:
        """The rows, with the column at positions[name] as `name`.

        Numbers and dates keep the types that the format has for them. An empty id is "" or null.
        """
