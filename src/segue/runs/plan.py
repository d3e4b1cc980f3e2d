"""The plan of a training: what was derived from the log, how long it will take, and the choice of an encoder."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from segue.config.derived import Derived
from segue.config.settings import make_settings
from segue.counts.features import ItemCounts
from segue.errors import TrainingError
from segue.evaluation.settings import SeenRule
from segue.evaluation.split_log import SplitLog
from segue.folders import partial_of
from segue.runs.partial import PartialRun, write_record
from segue.training.loop import TrainingProgress
from segue.training.settings import TrainSettings
from segue.training.state import read_training_record
from segue.training.timing import Speed, timed
from segue.training.train import STATE, TrainingSetup, choose_epoch

CANDIDATES = "candidates"  # a folder in RUN.partial
FIRST_PART = 0.35  # share of its time that each candidate is trained for before the best is chosen
LEAST = 0.25  # share of train.minutes that is left for training, however long the report takes
UNTIMED = 0.8  # share of train.minutes for training by several processes, whose speed is not measured


@dataclass(frozen=True, slots=True)
class Plan:
    """The time of a training."""

    names: tuple[str, ...]
    """The encoders to try; empty: there is nothing to choose."""
    speed: Speed
    seconds: float | None
    """For training, validation included; None is no limit."""

    @property
    def share(self) -> float:
        """The share of the seconds that the encoder which is kept has."""
        return 1 / (1 + FIRST_PART * max(0, len(self.names) - 1))


def make_plan(
    partial: PartialRun, setup: TrainingSetup, log: SplitLog, pairs: ItemCounts | None, *, seen: SeenRule, began: float
) -> Plan:
    """Time the training of RUN.partial. `began`: when the time of train.minutes began, by `perf_counter`."""
    speed, limit = timed(setup, log, pairs, seen=seen), setup.train.seconds
    if limit is None:
        return Plan((), speed, None)
    seconds = max(LEAST * limit, limit - (time.perf_counter() - began) - speed.report - speed.validation)
    begun = (partial.folder / CANDIDATES).exists()
    enough = begun or 2 * speed.epoch * setup.train.epochs < seconds
    return Plan(tuple(partial.record.candidates) if enough else (), speed, seconds)


def plan_lines(
    derived: Sequence[Derived], train: TrainSettings, plan: Plan, *, all_events: bool = False
) -> tuple[str, ...]:
    """The plan for a terminal."""
    rows = [[each.key, str(each.value), each.reason] for each in derived]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(2)]
    lines = [f"  {key:{widths[0]}}  {value:>{widths[1]}}  {reason}" for key, value, reason in rows]
    seconds, epoch = train.epochs * plan.speed.epoch / plan.share, plan.speed.epoch
    cut = plan.seconds is not None and seconds > plan.seconds
    takes = f"{min(seconds, plan.seconds or seconds) / 60:.1f} minutes of training"
    whole = f"{train.epochs} epochs of {epoch:.1f} s" + (", cut by train.minutes" if cut else "")
    whole += ", and as long on every event" if all_events else ""
    if plan.names:
        tried = ", ".join(plan.names)
        whole += f"; encoders: {tried}; the best on validation after {FIRST_PART:.0%} of its time is kept"
    return (
        *(["Derived from the log (change any of it by --set):", *lines] if derived else []),
        f"Estimate for this machine: {takes} ({whole}), then {plan.speed.report / 60:.1f} minutes for the report. "
        "Ctrl-C writes the best epoch so far.",
    )


def settle(
    partial: PartialRun, setup: TrainingSetup, log: SplitLog, plan: Plan | None, *, seen: SeenRule
) -> PartialRun:
    """Choose one of the candidates of RUN.partial, if it has any: each is trained for the first part of its time, and
    the best on validation keeps its state. Without a plan, none is trained any more."""
    record, folder = partial.record, partial.folder / CANDIDATES
    if not record.candidates:
        return partial
    for name in () if plan is None else plan.names:
        settings = make_settings(record.candidates[name])
        own = replace(setup, model=settings.model, objective=settings.objective)
        try:
            _train_first_part(own, log, seen=seen, folder=folder / name, name=name)
        except TrainingError:  # another encoder is kept
            (folder / name / STATE).unlink(missing_ok=True)
    states = {name: path for name in record.candidates if (path := folder / name / STATE).exists()}
    settings, derived, spent = partial.settings, record.derived, 0.0
    if states:
        records = {name: read_training_record(path) for name, path in states.items()}
        scores = {name: each.best_score for name, each in records.items()}
        best = max(scores, key=lambda name: scores[name])
        spent = sum(each.elapsed for name, each in records.items() if name != best)
        settings = make_settings(record.candidates[best])
        shutil.copyfile(states[best], partial.folder / STATE)
        figures = ", ".join(f"{name} {score:.4f}" for name, score in scores.items())
        chosen = Derived("model", best, f"the best on validation after {FIRST_PART:.0%} of its time: {figures}")
        derived = (chosen, *(each for each in derived if each.key != "model"))
        if setup.progress is not None:
            setup.progress(TrainingProgress(0, 0, 0, 0, 0.0, plan=(f"{best} is kept, {chosen.reason}.",)))
    settled = msgspec.structs.replace(record, candidates={}, derived=derived, spent=spent)
    write_record(partial.folder, settings, settled)
    shutil.rmtree(folder, ignore_errors=True)
    return replace(partial, settings=settings, record=settled)


class _FirstPartDone(Exception):  # noqa: N818  # not an error: the candidate has had its time
    """The first part of a candidate's time is over."""


def _train_first_part(setup: TrainingSetup, log: SplitLog, *, seen: SeenRule, folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    limit, state = FIRST_PART * (setup.train.seconds or 0.0), folder / STATE

    def watch(step: TrainingProgress) -> None:
        if setup.progress is not None:
            setup.progress(replace(step, of=name))
        if step.scores is not None and read_training_record(state).elapsed >= limit:
            raise _FirstPartDone

    if state.exists() and read_training_record(state).elapsed >= limit:
        return
    with suppress(_FirstPartDone):
        choose_epoch(replace(setup, progress=watch), log, seen=seen, folder=folder)


def finished_epochs(run: Path) -> int:
    """The most epochs that a model in RUN.partial has finished."""
    folder = partial_of(run)
    states = [folder / STATE, *folder.glob(f"{CANDIDATES}/*/{STATE}")]
    return max((read_training_record(state).epoch for state in states if state.exists()), default=0)
