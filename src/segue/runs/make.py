"""One training from its request to its run folder: begin or resume, choose the epoch, measure, write."""

from __future__ import annotations

import atexit
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from segue import folders
from segue.config.settings import Settings
from segue.counts.counts import Counts
from segue.counts.features import ItemCounts
from segue.data.dataset import Data
from segue.errors import FolderError, SettingsError
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
from segue.runs.partial import RECORD, PartialRun, read_record
from segue.runs.plan import plan_lines, settle
from segue.runs.request import TrainingRequest
from segue.runs.resume import resume
from segue.runs.write import TrainedModel, write_run
from segue.training.counts import FittedCounts, fit_counts
from segue.training.distributed.processes import join_group, launcher_names
from segue.training.item_codes import CODES
from segue.training.loop import TrainingProgress
from segue.training.timing import timed
from segue.training.train import STATE_ALL, TrainingSetup, choose_epoch, train_for
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
            trained = _train(partial, data, group, progress, finish=request.finish)
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
    *,
    finish: bool,
) -> TrainedModel:
    """Choose the epoch on validation and measure on the test part; with `all_events`, then train on every event.
    `finish`: choose among the epochs that are done."""
    settings, sequences, n_items = partial.settings, data.sequences, len(data.vocabulary)
    log = SplitLog.of(data)
    counts = log.training_counts
    seen, _ = seen_rule(settings.evaluate, sequences, data.split)
    start = group.on_first(lambda: partial.initial_weights(WARM_START))
    texts = saved_texts(start, settings.model) if start is not None else None
    codes = group.on_first(lambda: partial.codes(CODES, data, data.split.train_end, progress))
    facts = settings.model.items.facts(data.vocabulary, DataFacts(kinds=tuple(data.kinds), texts=texts, codes=codes))
    setup = replace(partial.setup, facts=facts, progress=progress, group=group)
    if group.size == 1 and (partial.record.derived or partial.record.candidates):
        partial = _planned(partial, setup, log, seen, finish=finish)
        settings = partial.settings
        setup = replace(setup, model=settings.model, objective=settings.objective, train=settings.train)
    model, chosen = choose_epoch(setup, log, seen=seen, folder=partial.folder, warm_start=start, finish=finish)

    def show_measured(name: str, done: int, total: int) -> None:
        if progress is not None:
            epochs, loss = settings.train.epochs, float(chosen.history[-1]["loss"])
            best = chosen.best_epoch
            progress(TrainingProgress(chosen.epoch, epochs, done, total, loss, best_epoch=best, measured=name))

    fitted = group.on_first(lambda: _fit_counts(model, log, settings, seen))
    item_counts = None if fitted is None else fitted.counts
    note = ALL_EVENTS_NOTE.format(epochs=chosen.best_epoch) if partial.record.all_events else None
    evaluation = measure(model, data, settings, counts=item_counts, note=note, progress=show_measured, group=group)
    if partial.record.all_events:
        if codes is not None:
            all_codes = group.on_first(lambda: partial.all_codes(data, counts, progress))
            setup = replace(setup, facts=replace(facts, codes=all_codes))
        model, counts = train_for(
            setup,
            sequences,
            np.asarray(sequences.offsets)[1:],
            n_items,
            epochs=chosen.best_epoch,
            state_file=partial.folder / STATE_ALL,
            warm_start=group.on_first(lambda: partial.initial_weights(WARM_START_ALL)) or start,
        )
        item_counts = group.on_first(lambda: _recounted(item_counts, log, settings))
    return TrainedModel(partial, model, counts, chosen, item_counts, _worth(fitted), evaluation, seen, group.size)


def _planned(partial: PartialRun, setup: TrainingSetup, log: SplitLog, seen: SeenRule, *, finish: bool) -> PartialRun:
    """Show the plan, and choose the encoder if there are several candidates."""
    record, speed = partial.record, timed(setup, log, seen=seen)
    if setup.progress is not None and not finish:
        plan = plan_lines(record.derived, partial.settings.train, speed, list(record.candidates))
        setup.progress(TrainingProgress(0, partial.settings.train.epochs, 0, 0, 0.0, plan=plan))
    return settle(partial, setup, log, seen=seen, speed=speed, finish=finish)


def _fit_counts(model: SequenceModel, log: SplitLog, settings: Settings, seen: SeenRule) -> FittedCounts | None:
    """Item-to-item counts with weights fitted on validation; None if the settings want none."""
    if settings.counts.limits is None:
        return None
    evaluator = Evaluator.of_model(model, log, seen=seen)
    cases = log.split.cases("valid", settings.evaluate.target)
    return fit_counts(ModelScorer(model), log, cases, evaluator, settings.counts.limits)


def _recounted(item_counts: Counts | None, log: SplitLog, settings: Settings) -> Counts | None:
    """The same weights over the counts of every event."""
    if item_counts is None or settings.counts.limits is None:
        return None
    ends = np.asarray(log.sequences.offsets)[1:]
    return replace(item_counts, pairs=ItemCounts.of(log.sequences, ends, log.n_items, settings.counts.limits))


def _worth(fitted: FittedCounts | None) -> dict[str, float] | None:
    """The entry of the manifest: ndcg@10 on validation without the counts and with them."""
    return None if fitted is None else {"without": fitted.without, "with": fitted.with_counts}


def _finish(run: Path, data: Data, trained: TrainedModel) -> None:
    write_run(run, data, trained)
    shutil.rmtree(trained.partial.folder)
