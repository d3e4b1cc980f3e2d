"""The arguments of `segue.train`, as one value that can be sent to other processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from segue.errors import FolderError
from segue.models.build import Builder
from segue.recommend.recommender import Recommender
from segue.runs.read import refuse_added


@dataclass(frozen=True, slots=True)
class TrainingRequest:
    """What to train; `segue.api.train` documents every field."""

    data: Path
    out: Path | None = None
    recipe: str | Path | None = None
    overrides: tuple[str, ...] = ()
    encoder: Builder | None = None
    from_run: Path | None = None
    resume: bool = False
    finish: bool = False
    all_events: bool = False


def run_folder(run: Recommender | Path | str) -> Path:
    """The folder of a run that training continues from."""
    if isinstance(run, Path | str):
        return Path(run)
    if run.folder is None:
        raise FolderError("from_run was not opened from a run folder, so its settings are unknown; load a run folder.")
    refuse_added(run.manifest, run.folder, "continued", "continue")
    return run.folder
