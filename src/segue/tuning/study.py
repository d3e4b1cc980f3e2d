"""The folder of a search:

manifest.json   the recipe's name, the data's digest, the space
recipe.toml     the settings of the first trial
study.sqlite    Optuna's study, which Optuna's own tools read too
trials.csv      every trial
best.toml       a recipe: the settings of the best trial
trial/          the state of an unfinished trial, from which it is resumed
"""

from __future__ import annotations

import csv
import io
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import msgspec
import optuna
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from segue import folders
from segue.config.derived import settings_for
from segue.config.recipes import DEFAULT_RECIPE
from segue.config.settings import About, Settings, make_settings, settings_toml
from segue.data.dataset import Data
from segue.errors import FolderError, SettingsError
from segue.kinds import parse_toml
from segue.models.build import refuse_other_builder
from segue.training.train import device_of
from segue.tuning.report import Outcome, TrialRecord, Tuning
from segue.tuning.space import Space, changes, laid_over, log_facts, own_values, rounded, space_for

FORMAT = 2
RECIPE, STUDY, TRIALS, BEST, TRIAL = "recipe.toml", "study.sqlite", "trials.csv", "best.toml", "trial"
OUTCOME = "outcome"  # Optuna only knows that a trial failed
UNPRUNED_TRIALS, UNPRUNED_EPOCHS = 4, 4
"""The first trials and the first epochs of each trial, which are never pruned."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The recipe, data and space of a search; it never changes."""

    kind: Literal["tune"] = "tune"
    format: int = FORMAT
    segue: str
    optuna: str
    recipe: str
    data: dict[str, str]
    space: Space


class Search(msgspec.Struct, frozen=True, kw_only=True):
    """A search in its folder."""

    folder: Path
    recipe: str
    settings: Settings
    space: Space

    def tuning(self, study: optuna.Study) -> Tuning:
        """All trials that have begun."""
        trials = [self._record(trial) for trial in study.get_trials(deepcopy=False) if outcome_of(trial) is not None]
        return Tuning(folder=str(self.folder), recipe=self.recipe, trials=trials)

    def _record(self, trial: FrozenTrial) -> TrialRecord:
        scores = trial.intermediate_values
        best_epoch = max(scores, key=lambda epoch: (scores[epoch], -epoch), default=0)
        values = rounded(trial.params, own_values(self.settings, self.space))
        outcome, took = outcome_of(trial), trial.duration
        assert outcome is not None
        return TrialRecord(
            trial=trial.number + 1,
            outcome=outcome,
            score=scores.get(best_epoch),
            epochs=max(scores, default=0),
            best_epoch=best_epoch,
            seconds=None if took is None or outcome == "interrupted" else round(took.total_seconds(), 3),
            values=values,
            changes=changes(self.settings, values),
        )

    def write(self, tuning: Tuning) -> None:
        """Write trials.csv and best.toml, each whole or not at all."""
        folders.write_whole(self.folder / TRIALS, _csv(tuning, list(self.space)).encode())
        if (best := tuning.best) is not None:
            best_toml = settings_toml(self._best_settings(best, len(tuning.trials)))
            folders.write_whole(self.folder / BEST, best_toml.encode())

    def _best_settings(self, best: TrialRecord, trials: int) -> Settings:
        about = About(
            summary=f"Found by segue tune: trial {best.trial} of {trials}, from the recipe {self.recipe}.",
            paper=self.settings.about.paper,
            scored=f"on validation: ndcg@10 {best.score:.4f}, at epoch {best.best_epoch}",
        )
        return msgspec.structs.replace(laid_over(self.settings, best.values), about=about)


def outcome_of(trial: FrozenTrial) -> Outcome | None:
    """How a trial ended, None if it has not begun."""
    states: dict[TrialState, Outcome | None] = {
        TrialState.COMPLETE: "finished",
        TrialState.PRUNED: "pruned",
        TrialState.RUNNING: "interrupted",  # killed: no trial runs while this is called
        TrialState.WAITING: None,
    }
    return states[trial.state] if trial.state in states else trial.user_attrs.get(OUTCOME, "interrupted")


def _csv(tuning: Tuning, names: list[str]) -> str:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["trial", "outcome", "ndcg@10", "epochs", "best_epoch", "seconds", *names])
    for one in tuning.trials:
        facts = (one.trial, one.outcome, one.score, one.epochs, one.best_epoch, one.seconds)
        rows.writerow([*facts, *(one.values.get(name) for name in names)])
    return text.getvalue()


def begin(folder: Path, data: Data, recipe: str | Path | None) -> Search:
    """A new search in a new folder."""
    with folders.explained_writing(folder):
        if (folder / RECIPE).exists():
            raise FolderError(
                f"{folder} holds a search already; add --resume to continue it, or name another folder with --out."
            )
    folders.refuse_existing(folder, overwrite=None)
    settings = _settings(recipe, data)
    if settings.evaluate.days:
        raise SettingsError("`segue tune` compares trials by ndcg@10 of the next event: leave evaluate.days out.")
    device_of(settings.train)  # a missing device is refused before anything is written
    refuse_other_builder(settings.model, None, whose="The recipe")
    manifest = Manifest(
        segue=version("segue"),
        optuna=optuna.__version__,
        recipe=str(recipe or DEFAULT_RECIPE),
        data={"folder": str(data.folder.absolute()), "digest": data.digest},
        space=space_for(settings, log_facts(data, settings)),
    )
    with folders.complete_folder(folder) as staging:
        folders.write_json(staging / folders.MANIFEST, manifest)
        (staging / RECIPE).write_text(settings_toml(settings), encoding="utf-8")
    return Search(folder=folder, recipe=manifest.recipe, settings=settings, space=manifest.space)


def _settings(recipe: str | Path | None, data: Data) -> Settings:
    """The settings of the first trial. No trial depends on the speed of the machine."""
    return settings_for(recipe, ("train.minutes=0",), data).settings


def resume_search(folder: Path, data: Data, recipe: str | Path | None) -> Search:
    """A search that has begun, if it has this data and this recipe."""
    try:
        if not folder.exists():
            raise FolderError(f"There is nothing to resume: {folder} does not exist. Tune without --resume.")
        manifest = msgspec.json.decode((folder / folders.MANIFEST).read_bytes(), type=Manifest)
        tables = parse_toml((folder / RECIPE).read_bytes(), str(folder / RECIPE))
    except (OSError, msgspec.MsgspecError) as error:
        raise FolderError(
            f"{folder} is not a folder of `segue tune`, or is damaged ({error}); name another with --out."
        ) from error
    if manifest.format != FORMAT:
        raise FolderError(
            f"{folder} has tune format {manifest.format}, this segue reads format {FORMAT}; tune into another folder."
        )
    if manifest.data["digest"] != data.digest:
        raise FolderError(
            f"{data.folder} is not the data that {folder} was begun on; give that one, or tune into another folder."
        )
    settings = make_settings(tables)
    if recipe is not None and _settings(recipe, data) != settings:
        raise SettingsError(
            f"--resume cannot change the recipe: {folder} began with {manifest.recipe}. "
            "Leave --recipe out, or tune into another folder."
        )
    return Search(folder=folder, recipe=manifest.recipe, settings=settings, space=manifest.space)


@contextmanager
def open_study(folder: Path) -> Iterator[optuna.Study]:
    """Open Optuna's study in its file, created for the first trial. Optuna's log is silent meanwhile."""
    path, verbosity = (folder / STUDY).absolute(), optuna.logging.get_verbosity()
    if (folder / TRIALS).exists() and not path.is_file():
        raise FolderError(f"{path} is missing, so the search cannot be resumed. Tune into another folder.")
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    storage: optuna.storages.RDBStorage | None = None
    try:
        # A path inside the URL could not hold a question mark.
        engine = {"creator": lambda: sqlite3.connect(path)}
        storage = optuna.storages.RDBStorage("sqlite://", engine_kwargs=engine)
        pruner = optuna.pruners.MedianPruner(n_startup_trials=UNPRUNED_TRIALS, n_warmup_steps=UNPRUNED_EPOCHS)
        yield optuna.create_study(
            storage=storage, study_name="segue", direction="maximize", pruner=pruner, load_if_exists=True
        )
    except (SQLAlchemyError, sqlite3.Error, optuna.exceptions.StorageInternalError) as error:
        reason = str(error.__cause__ or error).splitlines()[0].removesuffix(".")
        raise FolderError(
            f"{path} cannot be read or written ({reason}); check the disk and its permissions, or tune into another "
            "folder."
        ) from error
    finally:
        if storage is not None:
            storage.remove_session()
            storage.engine.dispose()
        optuna.logging.set_verbosity(verbosity)
