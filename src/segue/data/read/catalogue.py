"""A table of items → the columns of the vocabulary: the title and every further column of the catalogue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from segue.data.read.blocks import ROW, LogInput, Malformed, detached
from segue.data.read.columns import ID_NAMES, TITLE_NAMES, by_rank, listed, named_position
from segue.data.read.json_lines import JsonLinesFile
from segue.data.read.log import id_text, open_inputs
from segue.data.read.vectors import VectorFile, vectors_of, with_vectors
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
    everything = list(range(len(log.names)))
    ids = [named_position(log, "item", item)] if item in log.names else by_rank(log, ID_NAMES, free=everything)
    if len(ids) != 1:
        state = "could be the item's id" if ids else "looks like the item's id"
        raise InputError(
            f"{log.label}: {'more than one' if ids else 'no'} column {state}; name it `item` or as in the log. "
            f"Its columns are {listed(log.names)}.{log.note}"
        )
    free = [position for position in everything if position not in ids]
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
    wanted = pl.DataFrame({"id": ids})
    rows: list[pl.DataFrame] = []
    counts = {"rows": 0, "rejected": 0, "duplicates": 0}
    for frame, malformed in catalogue.blocks():
        counts["rows"] += frame.height + len(malformed)
        counts["rejected"] += len(malformed)
        rows.append(detached(frame.join(wanted, on="id", how="semi")))
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
    described = wanted.join(first, on="id", how="left", maintain_order="left")
    return with_vectors(described, catalogue.input.label), counts


def with_arrays(table: pl.DataFrame, files: Sequence[VectorFile]) -> pl.DataFrame:
    """A vocabulary's table with one more column for each array of vectors."""
    for file in files:
        if file.column in table.columns:
            raise InputError(
                f"{file.path}: its vectors would be the column {file.column!r}, which the catalogue has already; "
                "rename the file, and the one with its ids."
            )
        table = table.with_columns(vectors_of(file, table["id"]))
    return table
