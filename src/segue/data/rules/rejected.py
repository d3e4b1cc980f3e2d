"""Rows that cannot be used: counted by reason and stored with their texts; too many of them stop `prepare`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import polars as pl

from segue.data.read.blocks import ROW, Malformed, detached
from segue.data.settings import Role
from segue.errors import InputError

TEXT_IN_MESSAGE = 60


@dataclass(slots=True)
class Rejected:
    """The rejected rows so far. Rows beyond `max_stored` are only counted: `prepare` will stop anyway."""

    roles: list[Role]
    max_stored: int
    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    frames: list[pl.DataFrame] = field(default_factory=list)
    """The stored rows, with `file`, `row` and `reason`."""
    _stored: int = 0

    @property
    def total(self) -> int:
        return self.counts.total()

    def add(self, label: str, malformed: list[Malformed], rows: pl.DataFrame) -> None:
        """Add rows that cannot be parsed, and rows with the `reason` that the rules gave."""
        lines = pl.DataFrame(malformed, schema={ROW: pl.Int64, "reason": pl.String, "text": pl.String})
        columns = [pl.col(role).cast(pl.String) for role in self.roles]
        for frame in (lines, rows.select(ROW, "reason", *columns)):
            for reason, count in frame["reason"].value_counts().iter_rows():
                self.counts[reason] += count
            for reason in set(frame["reason"].unique()) - set(self.examples):
                row, _, *texts = frame.filter(pl.col("reason") == reason).row(0)
                self.examples[reason] = example(label, row, texts)
            if frame.height and self._stored < self.max_stored:
                self._stored += frame.height
                self.frames.append(detached(frame).with_columns(pl.lit(label).alias("file")))

    def table(self) -> pl.DataFrame:
        """Every stored row: file, row, reason, and the texts of its columns or, if it has none, of the whole row."""
        schema = {"file": pl.String, ROW: pl.Int64, "reason": pl.String}
        schema |= dict.fromkeys([*self.roles, "text"], pl.String)
        empty = pl.DataFrame(schema=schema)
        return pl.concat([empty, *self.frames], how="diagonal").sort("file", ROW, maintain_order=True)

    def check(self, rows: int, *, most: float, hint: str = "") -> None:
        """Refuse a share of rejected rows above `most`, and a log without a good row."""
        if self.total <= most * rows:
            if self.total == rows:
                raise InputError("No row of the log can be used; are --user, --item and --time the right columns?")
            return
        advice = [hint] if hint else []
        if self.counts["not UTF-8"] > 0.001 * rows:
            advice.append(
                "The log is not UTF-8, perhaps Windows-1252 (Latin-1): convert it with "
                "`iconv -f WINDOWS-1252 -t UTF-8 LOG > utf8.csv`."
            )
        if self.counts["unreadable time"] > 0.5 * rows:
            advice.append("Give the format of the times with --time-format, such as '%d/%m/%Y %H:%M'.")
        common = sorted(self.counts.items(), key=lambda each: (-each[1], each[0]))[:5]
        reasons = "; ".join(f"{count} × {reason} ({self.examples[reason]})" for reason, count in common)
        raise InputError(
            f"{self.total} of {rows} rows ({self.total / rows:.1%}) cannot be used, more than --max-rejected "
            f"{most:.4g} allows, so nothing was written: {' '.join([f'{reasons}.', *advice])}"
        )


def example(label: str, row: int | None, texts: Iterable[str | None]) -> str:
    """A rejected row as text for a message; row: None for a table without row numbers."""
    joined = ", ".join("" if text is None else str(text) for text in texts)
    shown = joined if len(joined) <= TEXT_IN_MESSAGE else joined[:TEXT_IN_MESSAGE] + "…"
    return f"{label}: {shown!r}" if row is None else f"{label} row {row}: {shown!r}"
