"""`segue tune`: a data folder → a recipe that suits it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from segue.cli.options import DataFolder, Json, print_json
from segue.terminal import TuneDisplay, duration, print_error, print_line

if TYPE_CHECKING:
    from segue.tuning import TrialRecord, Tuning


def tune(
    data: DataFolder,
    out: Annotated[Path, typer.Option(help="The folder of the search.")],
    recipe: Annotated[
        str | None,
        typer.Option(help="The first trial: a name of `segue recipes`, or a FILE.toml.", show_default="default"),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(
            help="Trials, those before --resume included.", min=1, show_default="20, unless --minutes is given"
        ),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="How long this search may take.", show_default="no limit")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a search, interrupted or not.")] = False,
    json: Json = False,
) -> None:
    """Search for the loss, length, width and other settings that suit a data folder; the result is a recipe."""
    from segue.tuning import tune as search
    from segue.tuning import tuning_table

    with TuneDisplay(quiet=json) as display:
        try:
            tuning = search(
                data,
                out=out,
                recipe=recipe,
                trials=trials,
                minutes=minutes,
                resume=resume,
                progress=display,
                ended=lambda record, tuning: display.line(_trial_line(record, tuning)),
            )
        except KeyboardInterrupt:
            display.stop()
            print_error(_resume_hint(data, out, trials, minutes))
            sys.exit(130)
    best = out / "best.toml"
    if json:
        print_json({**msgspec.to_builtins(tuning), "best": tuning.best, "best_recipe": str(best)})
        return
    print_line(tuning_table(tuning))
    print_line(f"\nMade {best}. Next: segue train {data} --out RUN --recipe {best}")


def _trial_line(record: TrialRecord, tuning: Tuning) -> str:
    """A finished trial: its score and how its settings differ from the recipe's."""
    from segue.tuning import changes_text

    score = "no score" if record.score is None else f"ndcg@10 {record.score:.4f}"
    best = " (best)" if record == tuning.best else ""
    ending = "" if record.outcome == "finished" else f", {record.outcome}"
    took = "" if record.seconds is None else f"  {duration(record.seconds)}"
    return f"trial {record.trial:3}  {score}{best}  {record.epochs} epochs{ending}{took}  {changes_text(record)}"


def _resume_hint(data: Path, out: Path, trials: int | None, minutes: float | None) -> str:
    """The message after Ctrl-C."""
    if not out.exists():
        return "Interrupted before the search began; nothing was written."
    bounds = ("" if trials is None else f" --trials {trials}") + ("" if minutes is None else f" --minutes {minutes:g}")
    return f"Interrupted; the trials are in {out}. Resume with: segue tune {data} --out {out}{bounds} --resume"
