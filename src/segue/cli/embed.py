"""`segue embed`: a run and a log → a vector a user."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from segue.cli.options import Engine, Json, Run, SparkRemote, print_result
from segue.folders import partial_of
from segue.terminal import Display


def embed(
    run: Run,
    data: Annotated[Path, typer.Option(help="The data folder whose users are embedded.")],
    out: Annotated[Path, typer.Option(help="The folder to make; after a kill, the same command resumes.")],
    since: Annotated[
        Path | None, typer.Option(help="An earlier folder of the same run: only users with new events.")
    ] = None,
    items: Annotated[bool, typer.Option("--items", help="Write the item embeddings too.")] = False,
    engine: Engine = "local",
    spark_remote: SparkRemote = None,
    json: Json = False,
) -> None:
    """Write an embedding of every user as Parquet; its inner product with an item's is the model's score of that item,
    without item-to-item counts."""
    from segue import api

    def interrupted() -> str:
        if not partial_of(out).exists():
            return "Interrupted before anything was written."
        return f"Interrupted; the finished parts are in {partial_of(out)}. The same command resumes."

    with Display(quiet=json, interrupted=interrupted) as display:
        report = api.embed(
            run,
            data,
            out=out,
            since=since,
            items=items,
            engine=engine,
            spark_remote=spark_remote,
            progress=lambda done, total: display.show("embedding", done, total, f"{done:,} of {total:,} users"),
        )
    print_result(
        {"folder": str(out), **msgspec.to_builtins(report)},
        f"Made {out}: {report.rows:,} embeddings of width {report.width}, for {report.users:,} users; "
        f"{report.unchanged:,} have no new events, {report.unknown:,} no item that the run knows.",
        f"The folder also has {report.items:,} item embeddings." if items else "",
        json=json,
    )
