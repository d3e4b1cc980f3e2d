"""`segue compare`: several runs → one table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from segue.cli.options import Html, Json, print_json, write_page
from segue.terminal import print_line


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.", metavar="RUN...", show_default=False)],
    html: Html = None,
    json: Json = False,
) -> None:
    """Compare runs, with confidence intervals and significance."""
    from segue import api
    from segue.evaluation.compare import comparison_table
    from segue.evaluation.comparison_page import html as comparison_page

    comparison = api.compare(runs)
    if html is not None:
        write_page(comparison_page(comparison), html)
    if json:
        print_json(comparison)
        return
    print_line(comparison_table(comparison))
    if html is not None:
        print_line(f"Wrote {html}.")
