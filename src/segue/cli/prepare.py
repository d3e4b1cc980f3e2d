"""`segue prepare`: log files → a data folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from segue.cli.options import Engine, Json, SparkRemote, print_result
from segue.terminal import Display


def prepare(
    files: Annotated[
        list[str],  # not Path, which takes a slash out of s3a://…
        typer.Argument(
            help="Log files: CSV, TSV, JSON lines, Parquet; plain, gzip or zstd. With --engine spark also folders, "
            "addresses such as s3a://… and the name of a table.",
            metavar="FILE...",
        ),
    ],
    out: Annotated[Path, typer.Option(help="The data folder to make.")],
    user: Annotated[str | None, typer.Option(help="Column of the user.", show_default="found by name")] = None,
    item: Annotated[str | None, typer.Option(help="Column of the item.", show_default="found by name")] = None,
    time: Annotated[str | None, typer.Option(help="Column of the time.", show_default="found by name")] = None,
    value: Annotated[str | None, typer.Option(help="Column of a number, such as a rating.")] = None,
    kind: Annotated[str | None, typer.Option(help="Column of the kind of event, such as click or buy.")] = None,
    items: Annotated[
        list[Path] | None,
        typer.Option(
            help="A catalogue: id, title and further columns. Repeat it for vectors: X.npy, with X.ids.txt beside it."
        ),
    ] = None,
    min_user: Annotated[int, typer.Option(help="Least events of a user.", min=1)] = 5,
    min_item: Annotated[int, typer.Option(help="Least events of an item.", min=1)] = 5,
    split: Annotated[str, typer.Option(help="last, or time:WHEN.")] = "last",
    time_format: Annotated[
        str | None, typer.Option(help="The format of times, such as %d.%m.%Y %H:%M.", show_default="found by content")
    ] = None,
    time_zone: Annotated[str | None, typer.Option(help="Zone of times without an offset.", show_default="UTC")] = None,
    order: Annotated[
        str | None, typer.Option(help="Column that orders events of equal time.", show_default="file and row")
    ] = None,
    drop_duplicates: Annotated[bool, typer.Option("--drop-duplicates", help="Keep one of several equal rows.")] = False,
    max_rejected: Annotated[
        str, typer.Option(help="Largest share of unusable rows; above it nothing is written.")
    ] = "1%",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the data folder if it exists.")] = False,
    engine: Engine = "local",
    spark_remote: SparkRemote = None,
    json: Json = False,
) -> None:
    """Turn log files into a data folder."""
    arguments = locals()
    from segue.data.prepare import prepare_folder
    from segue.data.settings import PrepareSettings
    from segue.data.write.summary import summary_lines

    settings = PrepareSettings(**{name: arguments[name] for name in PrepareSettings.__struct_fields__})
    with Display(quiet=json) as display:
        data = prepare_folder(files, settings, out=out, items=items, overwrite=overwrite, progress=display.stage)
    lines = [*summary_lines(data.manifest), f"Made {out}. Next: segue train {out} --out RUN"]
    print_result({"folder": str(out), **data.manifest}, *lines, json=json)
