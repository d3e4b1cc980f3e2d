"""`segue demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from segue.cli.options import Json, print_result


def demo(
    no_serve: Annotated[
        bool, typer.Option("--no-serve", help="Stop after the recommendations, without the service.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="The folder to keep everything in.", show_default="demo, in the cache folder")
    ] = None,
    port: Annotated[int, typer.Option(help="The port of the service.")] = 8000,
    json: Json = False,
) -> None:
    """Show the whole path on a shop's log: prepare, train, evaluate, recommend, then serve."""
    from segue.demo import run_demo

    print_result(run_demo(out=out, serve=not no_serve, port=port, quiet=json), json=json)
