"""A data folder and a recipe → the recipe that fits the data best: `space` says what is tried, `search` tries it,
`study` keeps it in a folder, `report` shows it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from segue.data.dataset import Data
from segue.errors import SegueError, SettingsError
from segue.training.loop import TrainingProgress
from segue.tuning.report import TrialRecord, Tuning, changes_text, tuning_table

__all__ = ["TrainingProgress", "TrialRecord", "Tuning", "changes_text", "tune", "tuning_table"]


def tune(
    data: Data | Path | str,
    *,
    out: Path | str,
    recipe: str | Path | None = None,
    trials: int | None = None,
    minutes: float | None = None,
    resume: bool = False,
    progress: Callable[[int, TrainingProgress], None] | None = None,
    ended: Callable[[TrialRecord, Tuning], None] | None = None,
) -> Tuning:
    """Search for better settings than a recipe's; `out`/best.toml is then a recipe to train with.

    The first trial is the recipe as it is. Validation's NDCG@10 judges; the test part is not looked at.
    trials: how many, counted over every resume; 20 unless `minutes` is given. minutes: how long, this time.
    progress: told the trial's number and how its training is getting on. ended: told of each trial that is over.
    """
    if trials is not None and trials < 1:
        raise SettingsError(f"--trials must be at least 1, got {trials}.")
    if minutes is not None and not minutes > 0:
        raise SettingsError(f"--minutes must be above 0, got {minutes:g}.")
    try:
        from segue.training.distributed.processes import launched
        from segue.tuning.search import search
    except ImportError as error:
        raise SegueError(
            "Tuning needs optuna, which is not installed or not complete; run `pip install 'segue[tune]'`."
        ) from error
    if launched():
        raise SettingsError("A search is done by one process: start it without torchrun.")
    return search(
        data if isinstance(data, Data) else Data.open(Path(data)),
        out=Path(out),
        recipe=recipe,
        trials=trials,
        minutes=minutes,
        resume=resume,
        progress=progress,
        ended=ended,
    )
