"""`segue train`: a data folder → a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from segue.cli.options import DataFolder, Json, print_result
from segue.folders import partial_of
from segue.terminal import Display


def train(
    data: DataFolder,
    out: Annotated[Path, typer.Option(help="The run folder to make.")],
    recipe: Annotated[
        str | None, typer.Option(help="A name of `segue recipes`, or a FILE.toml.", show_default="default")
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value, instead of the recipe's. Repeatable.")
    ] = None,
    from_run: Annotated[
        Path | None, typer.Option("--from", help="A run to continue from, on a log that has grown.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume interrupted training, or add epochs.")] = False,
    all_events: Annotated[
        bool, typer.Option("--all", help="When the epochs are chosen, train on every event, for serving.")
    ] = False,
    processes: Annotated[int, typer.Option(help="Processes of this machine that share every batch.", min=1)] = 1,
    json: Json = False,
) -> None:
    """Train a model on a data folder and measure it."""
    from segue import api
    from segue.evaluation.report import table
    from segue.evaluation.verdict import counts_sentence
    from segue.runs.read import read_report

    def interrupted() -> str:
        if not partial_of(out).exists():
            return "Interrupted before training began; nothing was written."
        command = f"segue train {data} --out {out} --resume" + (f" --processes {processes}" if processes > 1 else "")
        return f"Interrupted; the finished epochs are in {partial_of(out)}. Resume with: {command}"

    with Display(quiet=json, interrupted=interrupted) as display:
        model = api.train(
            data,
            out=out,
            recipe=recipe,
            overrides=changes or (),
            from_run=from_run,
            resume=resume,
            all_events=all_events,
            processes=processes,
            progress=display.step,
        )
    report = read_report(model)
    body = {"folder": str(out), **model.manifest, "report": report}
    following = f"Made {out}. Next: segue recommend {out} --history ID,ID,… or segue serve {out}"
    print_result(body, table(report), counts_sentence(model.manifest), following, json=json)
