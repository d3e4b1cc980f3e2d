"""New training in an empty RUN.partial: from a new model, or with `--from` from the weights of another run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from segue import folders
from segue.config.changes import refuse_another_model
from segue.config.derived import Derived, LogSettings, LogShape, candidates, derive, is_given, settings_for
from segue.config.recipes import DEFAULT_RECIPE, read_recipe
from segue.config.settings import Settings, make_settings
from segue.data.dataset import Data
from segue.errors import FolderError, SettingsError
from segue.evaluation.split_log import SplitLog
from segue.kinds import Table, kind_of
from segue.models.build import builder_name, refuse_other_builder
from segue.models.inputs import EventInputSettings
from segue.models.items.content import ContentTable
from segue.models.items.tables import DataFacts
from segue.models.sequence import SequenceModel
from segue.models.text.encoder import TextEncoder
from segue.objective.tasks.positive import PositiveEvents
from segue.recommend.jobs.embed import run_digest
from segue.recommend.recommender import Recommender
from segue.runs.measure import refuse_unmeasurable
from segue.runs.partial import PartialRecord, PartialRun, write_record
from segue.runs.read import Origin, refuse_added, settings_of, settings_tables
from segue.runs.request import TrainingRequest
from segue.training.item_codes import CODES
from segue.training.train import STATE
from segue.training.warm_start import TRAINED_ITEMS, WARM_START, write_warm_start
from segue.training.windows import training_windows


def begin(request: TrainingRequest, run: Path, data: Data, launchers: frozenset[str]) -> PartialRun:
    """Check the request against the data, then write RUN.partial; an error leaves no file."""
    origin = Recommender.open(request.from_run, encoder=request.encoder) if request.from_run is not None else None
    overrides = [*request.overrides, *encoder_override(request)]
    if origin is None:
        chosen = settings_for(request.recipe, overrides, data)
    else:
        derived = _derived_again(origin, data, overrides) if request.recipe is None else ()
        tables = _origin_tables(origin, request)
        chosen = LogSettings(make_settings(tables, [*(each.override for each in derived), *overrides]), derived)
    settings = chosen.settings
    refuse_other_builder(settings.model, request.encoder, whose="The recipe" if origin is None else str(origin.folder))
    PositiveEvents(settings.objective.positive, data.kinds).refuse_without_values(data.sequences.values)
    _refuse_missing_times(settings, data)
    refuse_unmeasurable(settings, data)
    training_windows(
        data.sequences, data.split.train_end, length=settings.model.length
    )  # refuses a log without targets
    folder = folders.partial_of(run)
    if run.exists():
        raise FolderError(
            f"{run} exists already; name another folder with --out, or continue its training with --resume --set "
            "train.epochs=…"
        )
    if folder.exists():
        raise FolderError(
            f"{folder} holds unfinished training; add --resume to continue it, or remove it to begin again."
        )
    settings.model.items.refuse_silent_catalogue(data.vocabulary)
    record = PartialRecord(
        recipe=str(request.recipe or (DEFAULT_RECIPE if origin is None else origin.manifest["recipe"])),
        digest=data.digest,
        origin=None if origin is None else Origin(folder=str(_folder(origin).absolute()), digest=run_digest(origin)),
        all_events=request.all_events,
        launchers=launchers,
        derived=chosen.derived,
        candidates=_candidates(request, chosen, overrides, data),
    )
    with folders.complete_folder(folder) as staging:
        if origin is not None:
            _write_initial_weights(origin, data, PartialRun(staging, settings, record, request.encoder))
        write_record(staging, settings, record)
    return PartialRun(folder, settings, record, request.encoder)


def _candidates(
    request: TrainingRequest, chosen: LogSettings, overrides: Sequence[str], data: Data
) -> dict[str, Table]:
    """The settings to try first: of several encoders if the recipe is `default` and the user gave minutes."""
    if request.from_run is not None or request.recipe not in (None, DEFAULT_RECIPE):
        return {}
    if not is_given("train.minutes", overrides):
        return {}
    tried = candidates(chosen, overrides, timed=bool(data.manifest["has_time"]))
    return {name: msgspec.to_builtins(settings) for name, settings in tried.items()} if len(tried) > 1 else {}


def encoder_override(request: TrainingRequest, name: str | None = None) -> list[str]:
    """The request's own encoder as `--set` takes it, under `name` if the run already has a name for it."""
    if request.encoder is None:
        return []
    return [f"model.encoder={msgspec.json.encode(name or builder_name(request.encoder)).decode()}"]


def _folder(run: Recommender) -> Path:
    assert run.folder is not None
    return run.folder


def _origin_tables(origin: Recommender, request: TrainingRequest) -> dict[str, Any]:
    """The settings of the run that training continues from; sections of a recipe replace its own."""
    refuse_added(origin.manifest, origin.folder, "continued", "continue")
    return {**settings_tables(origin), **(read_recipe(request.recipe) if request.recipe else {})}


def _derived_again(origin: Recommender, data: Data, overrides: Sequence[str]) -> tuple[Derived, ...]:
    """A limit of time that was derived from the log of a run, derived from the log that continues it."""
    key = "train.minutes"
    if is_given(key, overrides) or all(each["key"] != key for each in origin.manifest.get("derived", ())):
        return ()
    return tuple(each for each in derive(LogShape.of(SplitLog.of(data))) if each.key == key)


def _write_initial_weights(origin: Recommender, data: Data, partial: PartialRun) -> None:
    """Transfer the weights of a run to the items of `data` and write them into RUN.partial."""
    folder, settings, all_events = _folder(origin), partial.settings, bool(origin.manifest["all"])
    refuse_another_model(settings_of(origin), settings, whose=str(folder))
    _refuse_leak(origin, data)
    codes = partial.codes(CODES, data, data.split.train_end, None)
    if all_events:
        names = [STATE, *(name for name in (WARM_START, CODES, TRAINED_ITEMS) if (folder / name).exists())]
        folders.verify_contents(folder, origin.manifest, "run", names=names)
    write_warm_start(
        origin.model,
        folder,
        all_events=all_events,
        setup=partial.setup,
        facts=settings.model.items.facts(
            data.vocabulary, DataFacts(kinds=tuple(data.kinds), texts=_text_encoder(origin.model), codes=codes)
        ),
        before=origin.vocabulary,
        now=data.vocabulary,
        trained=SplitLog.of(data).training_counts > 0,
        out=partial.folder,
    )


def _text_encoder(model: SequenceModel) -> TextEncoder | None:
    """The encoder of texts that a model was trained with, the only one whose vectors it understands."""
    return model.items.texts if isinstance(model.items, ContentTable) else None


def _refuse_leak(origin: Recommender, data: Data) -> None:
    """Refuse data whose validation or test events the run was trained on."""
    before, now = origin.manifest["data"]["split"], data.manifest["split"]
    if before["kind"] != now["kind"] or before.get("valid_from", 0) > now.get("valid_from", 0):
        raise SettingsError(
            f"{origin.folder} was trained on events that {data.folder} keeps for validation and test, so its scores "
            "would mean nothing: prepare the log with the same kind of --split as before, and with --split time:WHEN "
            "a later WHEN (validation has as many events as the test, so it begins earlier when the log grows)."
        )


def _refuse_missing_times(settings: Settings, data: Data) -> None:
    """Refuse a model that reads times on a log that has an order and no times."""
    if data.manifest["has_time"]:
        return
    if settings.model.timed:
        raise SettingsError(
            f"model = {kind_of(settings.model)!r} needs the time between events, and {data.folder} has only their "
            "order: prepare the log with --time, or choose another recipe, such as default."
        )
    inputs = settings.model.inputs
    if isinstance(inputs, EventInputSettings) and inputs.times:
        raise SettingsError(
            f"model.inputs.times = {msgspec.json.encode(inputs.times).decode()} needs times, and {data.folder} has "
            "only an order: prepare the log with --time, or leave times out with --set model.inputs.times=[]."
        )
