"""One training from its request to its run folder: begin or resume, choose the epoch, measure, write."""

from __future__ import annotations

import atexit
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from segue import folders
from segue.config.settings import Settings
from segue.counts.counts import Counts
from segue.counts.features import ItemCounts
from segue.data.dataset import Data
from segue.errors import FolderError, SettingsError, TrainingError
from segue.evaluation.evaluator import Evaluator, ModelScorer
from segue.evaluation.settings import SeenRule, seen_rule
from segue.evaluation.split_log import SplitLog
from segue.models.checkpoint import saved_texts
from segue.models.items.tables import DataFacts
from segue.models.sequence import SequenceModel
from segue.process_group import ProcessGroup
from segue.recommend.recommender import Recommender
from segue.runs.begin import begin
from segue.runs.measure import measure
from segue.runs.partial import RECORD, PartialRun, read_record, write_record
from segue.runs.plan import LEAST, UNTIMED, make_plan, plan_lines, settle
from segue.runs.request import TrainingRequest
from segue.runs.resume import resume
from segue.runs.write import TrainedModel, write_run
from segue.training.counts import FittedWeights, fit_counts
from segue.training.distributed.processes import join_group, launcher_names
from segue.training.item_codes import CODES
from segue.training.loop import TrainingProgress
from segue.training.train import STATE_ALL, TrainingSetup, choose_epoch, threads, train_for
from segue.training.warm_start import WARM_START, WARM_START_ALL

VISIBLE_WITHIN = 30.0  # seconds in which a file written by one machine is visible to the others
ALL_EVENTS_NOTE = (
    "The served model was trained on every event. This report is of the model that chose its {epochs} epochs and was "
    "not trained on the test part."
)


def make_run(request: TrainingRequest, *, progress: Callable[[TrainingProgress], None] | None = None) -> Recommender:
    """Train, measure and write a run; see `segue.api.train`.

    If torch's launcher started this process as one of several, each of them must call this function. They share the
    work; the first one writes the run and reports progress.
    """
    began = time.perf_counter()
    with join_group() as group:
        if group.rank > 0:
            progress = None
        data = Data.open(request.data)
        group.on_first(data.verify)
        run = group.on_first(lambda: request.out if request.out is not None else temporary_run())
        names = launcher_names(group)
        begun = group.on_first(lambda: _begin_or_resume(request, run, data, names))
        if begun is not None:
            _refuse_separate_folders(begun.folder, group)
            partial = replace(begun, encoder=request.encoder)
            trained = _train(partial, data, group, progress, None if request.finish else began)
            group.on_first(lambda: _finish(run, data, trained))
        recommender = Recommender.open(run, encoder=request.encoder)
        group.all_gather_objects(None)  # the first process removes a temporary run when it ends: all open it before
    return recommender


def temporary_run() -> Path:
    """A path for a run folder that is removed at exit."""
    holder = Path(tempfile.mkdtemp(prefix="segue-run-"))
    atexit.register(shutil.rmtree, holder, ignore_errors=True)
    return holder / "run"


def _begin_or_resume(request: TrainingRequest, run: Path, data: Data, names: frozenset[str]) -> PartialRun | None:
    """The training to do; None if these processes were restarted and the run is already written.

    Its encoder is left out: the result is sent to other processes, and each has the encoder from its own request.
    """
    if request.resume and request.from_run is not None:
        raise SettingsError("--resume continues the training in --out, whose --from run is recorded: leave --from out.")
    folder, resumed = folders.partial_of(run), request.resume
    if names and folder.exists():
        resumed = resumed or not names.isdisjoint(read_record(folder).launchers)
    elif names and (run / folders.MANIFEST).exists():
        launchers = folders.read_manifest(run, "run")["training"].get("launchers", ())
        if not names.isdisjoint(launchers):
            return None
    return replace((resume if resumed else begin)(request, run, data, names), encoder=None)


def _refuse_separate_folders(folder: Path, group: ProcessGroup) -> None:
    """Refuse machines that do not see the files of the first one."""
    path, limit = folder / RECORD, time.monotonic() + VISIBLE_WITHIN
    record = group.on_first(path.read_bytes)
    while not (visible := path.exists() and path.read_bytes() == record) and time.monotonic() < limit:
        time.sleep(0.1)
    missing = group.all_gather_objects(visible).count(False)
    if missing:
        raise FolderError(
            f"{missing} of the {group.size} processes do not see {folder}: machines that train together must share the "
            f"folder of --out, under the same path. Remove {folder} before you try again."
        )


def _train(
    partial: PartialRun,
    data: Data,
    group: ProcessGroup,
    progress: Callable[[TrainingProgress], None] | None,
    began: float | None,
) -> TrainedModel:
    """Choose the epoch on validation and measure on the test part; with `all_events`, then train on every event.
    `began`: when the time of the training began; None: without another epoch."""
    log, finish = SplitLog.of(data), began is None
    seen, _ = seen_rule(partial.settings.evaluate, data.sequences, data.split)
    start = group.on_first(lambda: partial.initial_weights(WARM_START))
    texts = saved_texts(start, partial.settings.model) if start is not None else None
    codes = group.on_first(lambda: partial.codes(CODES, data, data.split.train_end, progress))
    known = DataFacts(kinds=tuple(data.kinds), texts=texts, codes=codes)
    facts = partial.settings.model.items.facts(data.vocabulary, known)
    pairs = _pairs(partial.settings, log, data.split.train_end)
    setup = replace(partial.setup, facts=facts, progress=progress, group=group)
    partial, setup = _planned(partial, setup, log, pairs, seen=seen, began=began)
    model, chosen = choose_epoch(setup, log, seen=seen, folder=partial.folder, warm_start=start, finish=finish)
    if finish and not chosen.epoch:
        raise TrainingError("No epoch is finished, so there is no model to write: train further with --resume.")

    def show_measured(name: str, done: int, total: int) -> None:
        if progress is not None:
            epochs, loss = setup.train.epochs, float(chosen.history[-1]["loss"])
            best = chosen.best_epoch
            progress(TrainingProgress(chosen.epoch, epochs, done, total, loss, best_epoch=best, measured=name))

    fitted = None if pairs is None else group.on_first(lambda: _fitted(model, log, pairs, partial.settings, seen))
    item_counts = None if pairs is None or fitted is None or fitted.weights is None else Counts(pairs, fitted.weights)
    all_events = partial.record.all_events and not finish
    note = ALL_EVENTS_NOTE.format(epochs=chosen.best_epoch) if all_events else None
    evaluation = measure(
        model, data, partial.settings, counts=item_counts, note=note, progress=show_measured, group=group
    )
    partial = replace(partial, record=msgspec.structs.replace(partial.record, all_events=all_events))
    trained = TrainedModel(
        partial, model, log.training_counts, chosen, item_counts, _worth(fitted), evaluation, seen, group.size
    )
    return _trained_on_all(trained, setup, data, start) if all_events else trained


def _pairs(settings: Settings, log: SplitLog, ends: np.ndarray) -> ItemCounts | None:
    """Item-to-item counts of each user's events before `ends` [U]; None if the settings want none."""
    limits = settings.counts.limits
    return None if limits is None else ItemCounts.of(log.sequences, ends, log.n_items, limits)


def _planned(
    partial: PartialRun,
    setup: TrainingSetup,
    log: SplitLog,
    pairs: ItemCounts | None,
    *,
    seen: SeenRule,
    began: float | None,
) -> tuple[PartialRun, TrainingSetup]:
    """Show the plan, choose the encoder if there are several candidates, and limit the training to its time."""
    record, group = partial.record, setup.group
    if group.size > 1 or began is None:
        seconds = setup.train.seconds
        if group.size == 1:
            partial = settle(partial, setup, log, None, seen=seen)
        elif record.candidates:  # several processes try no others
            partial = replace(partial, record=msgspec.structs.replace(record, candidates={}))
            group.on_first(lambda: write_record(partial.folder, partial.settings, partial.record))
        return partial, _limited(_of(partial, setup), None if seconds is None else UNTIMED * _part(partial, seconds))
    if not (setup.train.seconds or record.derived):
        return partial, setup
    plan = make_plan(partial, setup, log, pairs, seen=seen, began=began)
    if setup.progress is not None:
        lines = plan_lines(record.derived, setup.train, plan, all_events=record.all_events)
        setup.progress(TrainingProgress(0, setup.train.epochs, 0, 0, 0.0, plan=lines))
    seconds = None if plan.seconds is None else _part(partial, plan.seconds)
    partial = settle(partial, _limited(setup, seconds and seconds * plan.share), log, plan, seen=seen)
    return partial, _limited(_of(partial, setup), seconds and max(LEAST * seconds, seconds - partial.record.spent))


def _part(partial: PartialRun, seconds: float) -> float:
    """The seconds of the training that chooses the epoch: with --all, a second one takes as long."""
    return seconds / 2 if partial.record.all_events else seconds


def _of(partial: PartialRun, setup: TrainingSetup) -> TrainingSetup:
    """The setup with the settings of RUN.partial."""
    settings = partial.settings
    return replace(setup, model=settings.model, objective=settings.objective, train=settings.train)


def _limited(setup: TrainingSetup, seconds: float | None) -> TrainingSetup:
    """The setup with this time for the training."""
    return replace(setup, train=msgspec.structs.replace(setup.train, minutes=(seconds or 0.0) / 60))


def _fitted(
    model: SequenceModel, log: SplitLog, pairs: ItemCounts, settings: Settings, seen: SeenRule
) -> FittedWeights:
    """The weights of the counts, fitted on validation."""
    cases = log.split.cases("valid", settings.evaluate.target)
    with threads(settings.train.threads):
        return fit_counts(ModelScorer(model), pairs, cases, Evaluator.of_model(model, log, seen=seen))


def _trained_on_all(trained: TrainedModel, setup: TrainingSetup, data: Data, start: Path | None) -> TrainedModel:
    """Another model that is trained on every event for as many epochs, with the counts of every event."""
    partial, chosen, group = trained.partial, trained.chosen, setup.group
    ends, log, facts = np.asarray(data.sequences.offsets)[1:], SplitLog.of(data), setup.facts
    if facts.codes is not None:
        codes = group.on_first(lambda: partial.all_codes(data, trained.counts, setup.progress))
        facts = replace(facts, codes=codes)
    # Where time ended the first training, its step size fell to 0 at its last epoch.
    planned = chosen.epoch if chosen.cut else setup.train.epochs
    model, counts = train_for(
        replace(setup, facts=facts, train=msgspec.structs.replace(setup.train, epochs=planned, minutes=0.0)),
        data.sequences,
        ends,
        log.n_items,
        epochs=chosen.best_epoch,
        state_file=partial.folder / STATE_ALL,
        warm_start=group.on_first(lambda: partial.initial_weights(WARM_START_ALL)) or start,
    )
    pairs = None if trained.item_counts is None else _pairs(partial.settings, log, ends)
    item_counts = None if trained.item_counts is None or pairs is None else replace(trained.item_counts, pairs=pairs)
    return replace(trained, model=model, counts=counts, item_counts=item_counts)


def _worth(fitted: FittedWeights | None) -> dict[str, float] | None:
    """The entry of the manifest: ndcg@10 on validation without the counts and with them."""
    return None if fitted is None else {"without": fitted.without, "with": fitted.with_counts}


def _finish(run: Path, data: Data, trained: TrainedModel) -> None:
    write_run(run, data, trained)
    shutil.rmtree(trained.partial.folder)
