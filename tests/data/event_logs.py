"""Small logs for the tests of `data`: rows to files, and the contents of a data folder by ids."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from segue.data.dataset import Data

HEADER = ("user", "item", "time")


def csv_text(rows: Iterable[Sequence[object]], *, header: Sequence[str] = HEADER, delimiter: str = ",") -> str:
    """Rows as the csv module writes them."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=delimiter, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()


def write_csv(path: Path, rows: Iterable[Sequence[object]], *, header: Sequence[str] = HEADER) -> Path:
    path.write_bytes(csv_text(rows, header=header).encode())
    return path


def histories(data: Data) -> dict[str, list[str]]:
    """Every user's items, oldest first, by ids."""
    offsets, items = data.sequences.offsets, data.sequences.items
    ids = data.users.ids(range(len(data.users)))  # type: ignore[arg-type]
    return {
        user: data.vocabulary.ids(items[begin:end])
        for user, begin, end in zip(ids, offsets[:-1], offsets[1:], strict=True)
    }


def seconds(data: Data) -> list[int]:
    """The times of all events in seconds, in storage order."""
    return [int(time) // 1_000_000 for time in data.sequences.times]


def digests(data: Data) -> dict[str, str]:
    return {name: facts["sha256"] for name, facts in data.manifest["files"].items()}
