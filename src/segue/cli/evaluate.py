"""`segue evaluate` and `segue compare`: runs → a report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from segue.cli.options import Html, Json, MovedData, Run, print_result, write_page
from segue.errors import InputError
from segue.terminal import Display

N = TypeVar("N", int, float)


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
    from segue.evaluation.report import Report, WindowReport, table
    from segue.evaluation.verdict import counts_sentence
    from segue.folders import read_manifest

    depths = _numbers(at, int, "--at takes whole numbers with commas between, such as 1,5,10,50")
    days_before = _numbers(ages, float, "--ages takes days with commas between, such as 0,1,3,7,14")
    either: Callable[..., Report | WindowReport] = api.evaluate  # which report it returns depends on `days`
    with Display(quiet=json) as display:
        report = either(
            run,
            data=data,
            at=depths,
            days=days,
            ages=days_before,
            interest=interest,
            progress=lambda name, done, total: display.stage(f"measuring {name}", done, total),
        )
    print_result(report, table(report), counts_sentence(read_manifest(run, "run")), json=json)


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
    print_result(comparison, comparison_table(comparison), f"Wrote {html}." if html is not None else "", json=json)


def _numbers(text: str | None, number: Callable[[str], N], expected: str) -> list[N] | None:
    """The numbers of an option that may be left out."""
    try:
        return None if text is None else [number(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"{expected}, got {text!r}.") from None
