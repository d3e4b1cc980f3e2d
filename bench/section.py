"""Tables → a part of a document, between two lines that name it; the rest is written by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from segue.errors import InputError


def markdown(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Rows as a Markdown table: the keys of the first are its columns, the first of which is text."""
    names = list(rows[0])
    lines = [_line(names), _line(["---", *["--:"] * (len(names) - 1)])]
    return [*lines, *(_line(list(row.values())) for row in rows)]


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
