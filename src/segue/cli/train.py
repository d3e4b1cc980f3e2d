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
    minutes: Annotated[
        float | None,
        typer.Option(
            help="Time for training and report on this machine. With much time, several encoders are tried.",
            min=0.1,
            show_default="what the log needs",
        ),
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

    options = f"{' --all' if all_events else ''}{f' --processes {processes}' if processes > 1 else ''}"
    command = f"segue train {data} --out {out} --resume{options}"
    overrides = [*([] if minutes is None else [f"train.minutes={minutes}"]), *(changes or ())]

    def interrupted() -> str:
        if not partial_of(out).exists():
            return "Interrupted before training began; nothing was written."
        state = "the finished epochs are" if api.can_finish(out) else "no epoch is finished; the settings are"
        return f"Interrupted; {state} in {partial_of(out)}. Resume with: {command}"

    with Display(quiet=json, interrupted=interrupted) as display:
        try:
            model = api.train(
                data,
                out=out,
                recipe=recipe,
                overrides=overrides,
                from_run=from_run,
                resume=resume,
                all_events=all_events,
                processes=processes,
                progress=display.step,
            )
        except KeyboardInterrupt:
            if not api.can_finish(out):
                raise
            display.line(f"Interrupted: writing the run of the best epoch so far. To train further: {command}")
            model = api.finish(data, out=out, progress=display.step)
    report = read_report(model)
    body = {"folder": str(out), **model.manifest, "report": report}
    following = f"Made {out}. Next: segue recommend {out} --history ID,ID,… or segue serve {out}"
    print_result(body, table(report), counts_sentence(model.manifest), following, json=json)
