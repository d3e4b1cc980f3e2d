"""`segue evaluate` and `segue compare`: runs → a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from segue.cli.options import Html, Json, MovedData, Run, print_json, write_page
from segue.errors import InputError
from segue.terminal import MeasureDisplay, print_line


def evaluate(
    run: Run,
    data: MovedData = None,
    at: Annotated[
        str | None, typer.Option(help="Depths of the list, such as 1,5,10,50.", show_default="the run's")
    ] = None,
    days: Annotated[
        float | None,
        typer.Option(help="Measure by all items of so many days after the split time.", show_default="the next event"),
    ] = None,
    ages: Annotated[
        str | None,
        typer.Option(help="Also with histories that end so many days earlier, such as 0,1,3,7,14.", show_default="0"),
    ] = None,
    interest: Annotated[
        str | None,
        typer.Option(
            help="With --days: a column of the catalogue, such as a category, whose variety in lists is measured.",
            metavar="COLUMN",
            show_default="the run's",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Measure a run and the baselines on the test part."""
    from segue import api
    from segue.evaluation.report import Report, table
    from segue.evaluation.window.report import window_table

    depths, days_before = None if at is None else _depths(at), None if ages is None else _ages(ages)
    with MeasureDisplay(quiet=json) as display:
        report = api.evaluate(
            run, data=data, at=depths, days=days, ages=days_before, interest=interest, progress=display
        )
    if json:
        print_json(report)
    else:
        print_line(table(report) if isinstance(report, Report) else window_table(report))


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.", metavar="RUN...")],
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


def _ages(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--ages takes days with commas between, such as 0,1,3,7,14, got {text!r}.") from None


def _depths(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--at takes whole numbers with commas between, such as 1,5,10,50, got {text!r}.") from None
