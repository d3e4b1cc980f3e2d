"""A finished run folder: its settings, its data, its report and ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from segue.config.settings import Settings, make_settings
from segue.data.dataset import Data
from segue.errors import FolderError
from segue.evaluation.compare import MeasuredRun
from segue.evaluation.report import REPORT, Report
from segue.folders import read_manifest, verify_contents
from segue.kinds import parse_toml
from segue.recommend.recommender import Recommender

SETTINGS, RANKS, HISTORY = "settings.toml", "ranks.npy", "history.jsonl"


class Origin(msgspec.Struct, frozen=True):
    """The run that training continued from."""

    folder: str
    digest: str


def refuse_added(manifest: dict[str, Any], run: Path | None, done: str, verb: str) -> None:
    """Refuse a run to which items were added: its data does not have them. `done` and `verb` name what is refused."""
    if "added" in manifest:
        added = manifest["added"]
        raise FolderError(
            f"{run} has {added['items']} items that were added after training, so it cannot be {done}: {verb} the run "
            f"that they were added to, {added['run']}."
        )


def settings_of(recommender: Recommender) -> Settings:
    """The settings that a run was trained with."""
    return make_settings(settings_tables(recommender))


def settings_tables(recommender: Recommender) -> dict[str, Any]:
    """The settings of a run as TOML tables."""
    assert recommender.folder is not None
    path = recommender.folder / SETTINGS
    return parse_toml(path.read_bytes(), str(path))


def data_of(recommender: Recommender, data: Data | Path | str | None) -> Data:
    """The data that a run was trained on: the folder in its manifest, or `data` if that is the same data."""
    trained_on = recommender.manifest["data"]
    if data is None and not Path(trained_on["folder"]).exists():
        raise FolderError(
            f"The data folder {trained_on['folder']}, which {recommender.folder} was trained on, is gone; "
            "name its new path with --data."
        )
    candidate = data if isinstance(data, Data) else Data.open(Path(data if data is not None else trained_on["folder"]))
    if candidate.digest != trained_on["digest"]:
        raise FolderError(
            f"{recommender.folder} was not trained on {candidate.folder}: its items or test cases differ. Give the "
            "data folder of that run with --data, or train a run on this one."
        )
    return candidate


def read_report(recommender: Recommender) -> Report:
    """The report that training wrote."""
    assert recommender.folder is not None
    verify_contents(recommender.folder, recommender.manifest, "run", names=(REPORT,))
    return msgspec.json.decode((recommender.folder / REPORT).read_bytes(), type=Report)


def read_measured(folder: Path) -> MeasuredRun:
    """A run's report, ranks and learning curve, for a comparison."""
    manifest = read_manifest(folder, "run")
    verify_contents(folder, manifest, "run", names=(REPORT, RANKS, HISTORY))
    return MeasuredRun(
        name=folder.name,
        data=manifest["data"]["digest"],
        report=msgspec.json.decode((folder / REPORT).read_bytes(), type=Report),
        ranks=np.load(folder / RANKS),
        history=[msgspec.json.decode(line) for line in (folder / HISTORY).read_bytes().splitlines()],
    )


def case_users(run: Path, report: Report) -> np.ndarray | None:
    """The user of each test case, because one user's cases of a split by time are correlated. None if each user has
    one case, or if the data folder is gone."""
    trained_on = read_manifest(run, "run")["data"]
    if report.split == "last" or not Path(trained_on["folder"]).exists():
        return None
    data = Data.open(trained_on["folder"])
    return data.split.cases(report.part, report.target).users if data.digest == trained_on["digest"] else None
