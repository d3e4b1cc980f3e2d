"""Rows of a bench → a table on the screen, `bench/results/SUBJECT.json`, or a section of a document."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from segue.errors import InputError
from segue.evaluation.report import aligned
from segue.folders import write_json

FOLDER = Path(__file__).parent / "results"
NUMBERS = "+-–.0123456789"  # the first characters of a cell with a number
LIBRARIES = ("segue", "torch", "numpy", "polars", "pyarrow", "narwhals")


def machine() -> dict[str, Any]:
    """The machine and versions of a measurement, which seconds depend on."""
    return {
        "python": platform.python_version(),
        "versions": {name: version(name) for name in LIBRARIES},
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "machine": platform.machine(),
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def publish(subject: str, *, title: str, rows: Sequence[Mapping[str, Any]], notes: Sequence[str], body: Any) -> Path:
    """Print one table (the keys of the first row are its columns) with notes under it, and write all of it as JSON."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for name in rows[0]:
        text = isinstance(rows[0][name], str)
        table.add_column(name, justify="left" if text else "right", no_wrap=text)
    for row in rows:
        table.add_row(*(shown(value) for value in row.values()))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)  # wide enough in a file
    console.print(table)
    for note in notes:
        console.print(note, markup=False, soft_wrap=True)
    return written(subject, rows=rows, notes=notes, body=body)


def written(subject: str, *, rows: Sequence[Mapping[str, Any]], notes: Sequence[str], body: Any) -> Path:
    """Write rows, notes and details as JSON."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{subject}.json"
    write_json(
        path, {"subject": subject, "machine": machine(), "rows": list(rows), "notes": list(notes), "detail": body}
    )
    print(f"written: {path}")
    return path


def shown(value: object) -> str:
    """A value as text in a table."""
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


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
    """Replace what is between the document's two marks of this name."""
    begin, end = f"<!-- {name}: made by `make bench`. -->\n", f"<!-- {name} ends. -->"
    before, mark, rest = document.read_text(encoding="utf-8").partition(begin)
    _, ending, after = rest.partition(end)
    if not (mark and ending):
        raise InputError(f"{document} lacks the two lines between which {name} goes: {begin.strip()} and {end}")
    document.write_text("\n".join([before + begin, *lines, "", end]) + after, encoding="utf-8")
