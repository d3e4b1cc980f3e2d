"""Resume training: an interrupted one, or a finished one with more epochs or `--all`."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from segue import folders
from segue.config.changes import refuse_changes
from segue.config.derived import is_given, settings_for
from segue.config.settings import make_settings
from segue.data.dataset import Data
from segue.errors import FolderError, SettingsError
from segue.kinds import parse_toml
from segue.models.build import refuse_other_builder
from segue.runs.begin import encoder_override
from segue.runs.measure import refuse_unmeasurable
from segue.runs.partial import TRAINING_FILES, PartialRun, read_record, record_of_run, write_record
from segue.runs.read import SETTINGS
from segue.runs.request import TrainingRequest
from segue.training.state import read_training_record
from segue.training.train import STATE, reason_finished


def resume(request: TrainingRequest, run: Path, data: Data, launchers: frozenset[str]) -> PartialRun:
    """RUN.partial of an interrupted training, or a new one of the finished run. An error leaves no file."""
    folder = folders.partial_of(run)
    source = folder if folder.exists() else run
    if not source.exists():
        raise FolderError(f"There is nothing to resume: neither {run} nor {folder} exists. Train without --resume.")
    before = record_of_run(run) if source == run else read_record(folder)
    if before.digest != data.digest:
        raise FolderError(
            f"{data.folder} is not the data that {run} was begun on; give that one, or train into another folder."
        )
    tables = parse_toml((source / SETTINGS).read_bytes(), str(source / SETTINGS))
    old = make_settings(tables)
    refuse_other_builder(old.model, request.encoder, whose=str(run))
    overrides = [*request.overrides, *encoder_override(request, old.model.encoder)]
    if request.recipe:
        settings = settings_for(request.recipe, overrides, data).settings
    else:
        settings = make_settings(tables, overrides)
    refuse_changes(old, settings)
    refuse_unmeasurable(settings, data)
    candidates = {
        name: msgspec.to_builtins(make_settings(tables, overrides)) for name, tables in before.candidates.items()
    }
    all_events = request.all_events or before.all_events
    record = msgspec.structs.replace(
        before,
        all_events=all_events,
        launchers=launchers,
        derived=tuple(each for each in before.derived if not is_given(each.key, overrides)),
        candidates=candidates,
    )
    replaces = run.exists()
    if source == folder:
        write_record(folder, settings, record)
        return PartialRun(folder, settings, record, request.encoder, replaces)
    trained = read_training_record(run / STATE)
    if settings.train.minutes != old.train.minutes:
        trained.limit = settings.train.seconds
    nothing_left = reason_finished(trained, settings.train)
    if nothing_left and record.all_events == before.all_events:
        raise SettingsError(f"{run} is complete: {nothing_left} (with --set).")
    with folders.complete_folder(folder) as staging:
        copy_training_files(run, staging)
        write_record(staging, settings, record)
    return PartialRun(folder, settings, record, request.encoder, replaces)


def copy_training_files(source: Path, target: Path) -> None:
    """Copy the files that resumed training needs, from a run to RUN.partial or back."""
    for name in TRAINING_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)
