"""A data folder and a recipe → the recipe that suits the data best: `space` defines the settings to try, `search`
tries them, `study` stores the trials in a folder, `report` shows them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from segue.data.dataset import Data
from segue.errors import SegueError, SettingsError
from segue.tuning.report import TrialRecord, Tuning, changes_text, tuning_table

if TYPE_CHECKING:
    from segue.training.loop import TrainingProgress

__all__ = ["TrialRecord", "Tuning", "changes_text", "tune", "tuning_table"]


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
    """Search for better settings than a recipe's and write them as a recipe, `out`/best.toml.

    The first trial is the recipe itself. Trials are compared by NDCG@10 on validation, of the model alone, without
    item-to-item counts; the test part is not used.
    trials: how many, those before a resume included; 20 unless `minutes` is given. minutes: how long this call may
    take. progress: called with the trial's number and the progress of its training. ended: called after each trial.
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
        raise SettingsError("A search runs in one process: start it without torchrun.")
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
