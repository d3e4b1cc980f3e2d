"""`segue add-items`: a run and a catalogue → a run with more items."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from segue.cli.options import Json, Run, print_result


def add_items(
    run: Run,
    items: Annotated[
        list[Path],
        typer.Argument(help="A catalogue, and arrays of vectors, as `segue prepare` takes them.", metavar="FILE..."),
    ],
    out: Annotated[Path, typer.Option(help="The run folder to make.")],
    item: Annotated[str | None, typer.Option(help="Column of the item's id.", show_default="found by name")] = None,
    json: Json = False,
) -> None:
    """Copy a run with new items, represented by their content; nothing is trained."""
    from segue import api

    report = api.add_items(run, items, out=out, item=item)
    changed = f", {report.changed:,} changed" if report.changed else ""
    print_result(
        report,
        f"Made {out}: {report.added:,} items added to {run}{changed}; {report.items:,} in all.",
        f"{report.duplicates:,} rows repeat an id and were left out." if report.duplicates else "",
        f"Columns that the run does not have, ignored: {', '.join(report.ignored)}." if report.ignored else "",
        f"Next: segue recommend {out} --history ID,ID",
        json=json,
    )
