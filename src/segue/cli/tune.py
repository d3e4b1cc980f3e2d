"""`segue tune`: a data folder → a recipe that suits it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from segue.cli.options import DataFolder, Json, print_result
from segue.terminal import Display, duration

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

    def interrupted() -> str:
        if not out.exists():
            return "Interrupted before the search began; nothing was written."
        limits = {"--trials": trials, "--minutes": None if minutes is None else f"{minutes:g}"}
        bounds = "".join(f" {option} {limit}" for option, limit in limits.items() if limit is not None)
        return f"Interrupted; the trials are in {out}. Resume with: segue tune {data} --out {out}{bounds} --resume"

    with Display(quiet=json, interrupted=interrupted) as display:
        tuning = search(
            data,
            out=out,
            recipe=recipe,
            trials=trials,
            minutes=minutes,
            resume=resume,
            progress=display.trial_step,
            ended=lambda record, tuning: display.line(_trial_line(record, tuning)),
        )
    best = out / "best.toml"
    body = {**msgspec.to_builtins(tuning), "best": tuning.best, "best_recipe": str(best)}
    following = f"\nMade {best}. Next: segue train {data} --out RUN --recipe {best}"
    print_result(body, tuning_table(tuning), following, json=json)


def _trial_line(record: TrialRecord, tuning: Tuning) -> str:
    """A finished trial: its score and how its settings differ from the recipe's."""
    from segue.tuning import changes_text

    score = "no score" if record.score is None else f"ndcg@10 {record.score:.4f}"
    best = " (best)" if record == tuning.best else ""
    ending = "" if record.outcome == "finished" else f", {record.outcome}"
    took = "" if record.seconds is None else f"  {duration(record.seconds)}"
    return f"trial {record.trial:3}  {score}{best}  {record.epochs} epochs{ending}{took}  {changes_text(record)}"
