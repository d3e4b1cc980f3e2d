"""Results of benches in bench/results → the tables of docs/scale.md, each between the markers of its subject.

    python -m bench.scale_document

A subject that was not measured on this machine keeps the table that is there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.tables import FOLDER, markdown, shown, write_section

DOCUMENT = Path(__file__).parent.parent / "docs" / "scale.md"
SUBJECTS = (
    "scale",
    "spark",
    "catalogue",
    "processes",
    "codes-assign",
    "codes-memory",
    "codes-speed",
    "codes-quality",
    "embed",
    "counts-build",
    "counts-answers",
    "counts-serve",
    "replicas",
)


def main() -> None:
    for subject in SUBJECTS:
        path = FOLDER / f"{subject}.json"
        if path.is_file():
            write_section(DOCUMENT, subject, section(json.loads(path.read_text(encoding="utf-8"))))
            print(f"{DOCUMENT}: {subject}")


def section(result: dict[str, Any]) -> list[str]:
    """A bench's table, what its columns mean, and where and when it was measured."""
    rows = [{name: shown(value) for name, value in row.items()} for row in result["rows"]]
    conditions = result["machine"]
    origin = f"Measured on {conditions['at'][:10]} with {conditions['cores']} cores."
    return [*markdown(rows), "", " ".join([origin, *result["notes"]])]


if __name__ == "__main__":
    main()
