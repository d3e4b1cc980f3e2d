"""Tables of text → the screen, and a part of a document between two lines that name it; the rest is written by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from segue.errors import InputError
from segue.evaluation.report import aligned

NUMBERS = "+-–.0123456789"  # what a cell with a number begins with


def plain(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Rows as lines for a screen, however wide: the keys of the first are the columns."""
    return aligned([list(rows[0]), *(list(row.values()) for row in rows)])


def markdown(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Rows as a Markdown table, columns of numbers to the right."""
    names = list(rows[0])
    marks = ["--:" if all(row[name][:1] in NUMBERS for row in rows) else "---" for name in names]
    return [_line(names), _line(marks), *(_line(list(row.values())) for row in rows)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def write_section(document: Path, name: str, lines: Sequence[str]) -> None:
    """Put the lines in the place of what is between the document's two marks of this name."""
    begin, end = f"<!-- {name}: made by `make bench`. -->\n", f"<!-- {name} ends. -->"
    before, mark, rest = document.read_text(encoding="utf-8").partition(begin)
    _, ending, after = rest.partition(end)
    if not (mark and ending):
        raise InputError(f"{document} lacks the two lines between which {name} goes: {begin.strip()} and {end}")
    document.write_text("\n".join([before + begin, *lines, "", end]) + after, encoding="utf-8")
