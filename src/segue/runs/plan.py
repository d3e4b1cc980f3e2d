"""The plan of a training: what was derived from the log, how long it will take, and the choice of an encoder."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from segue.config.derived import Derived
from segue.config.settings import make_settings
from segue.evaluation.settings import SeenRule
from segue.evaluation.split_log import SplitLog
from segue.folders import partial_of
from segue.runs.partial import PartialRun, write_record
from segue.training.loop import TrainingProgress
from segue.training.settings import TrainSettings
from segue.training.state import read_training_record
from segue.training.timing import Speed
from segue.training.train import STATE, TrainingSetup, choose_epoch

CANDIDATES = "candidates"  # a folder in RUN.partial
FIRST_PART = 0.35  # share of its time that each candidate is trained for before the best is chosen


def plan_lines(derived: Sequence[Derived], train: TrainSettings, speed: Speed, names: Sequence[str]) -> tuple[str, ...]:
    """The plan for a terminal."""
    rows = [[each.key, str(each.value), each.reason] for each in derived]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(2)]
    lines = [f"  {key:{widths[0]}}  {value:>{widths[1]}}  {reason}" for key, value, reason in rows]
    if len(names) > 1:
        tried = ", ".join(names)
        lines.append(f"  encoders: {tried}; the best on validation after {FIRST_PART:.0%} of its time is kept")
    seconds, limit = train.epochs * speed.epoch, train.seconds
    cut = limit is not None and seconds > limit
    takes = f"{min(seconds, limit or seconds) / 60:.1f} minutes of training"
    whole = f"{train.epochs} epochs of {speed.epoch:.1f} s" + (", cut by train.minutes" if cut else "")
    return (
        *(["Derived from the log; --set changes any of it:", *lines] if derived else []),
        f"Estimate for this machine: {takes} ({whole}), then the report. Ctrl-C writes the best epoch so far.",
    )


def settle(
    partial: PartialRun, setup: TrainingSetup, log: SplitLog, *, seen: SeenRule, speed: Speed, finish: bool
) -> PartialRun:
    """Choose one of the candidates of RUN.partial, if it has any: each is trained for the first part of its time, and
    the best on validation keeps its state. With `finish`, none is trained any more."""
    record = partial.record
    if not record.candidates:
        return partial
    train = partial.settings.train
    enough = train.seconds is not None and 2 * speed.epoch * train.epochs < train.seconds
    names = list(record.candidates)[: None if enough else 1]
    minutes = train.minutes / (FIRST_PART * len(names) + 1 - FIRST_PART)
    for name in names if len(names) > 1 and not finish else ():
        settings = make_settings(record.candidates[name], [f"train.minutes={minutes}"])
        own = replace(setup, model=settings.model, objective=settings.objective, train=settings.train)
        _train_first_part(own, log, seen=seen, folder=partial.folder / CANDIDATES / name, name=name)
    states = {name: path for name in names if (path := partial.folder / CANDIDATES / name / STATE).exists()}
    settings = partial.settings
    if states:
        best = max(states, key=lambda name: read_training_record(states[name]).best_score)
        settings = make_settings(record.candidates[best], [f"train.minutes={minutes}"])
        states[best].replace(partial.folder / STATE)
    write_record(partial.folder, settings, settled := msgspec.structs.replace(record, candidates={}))
    shutil.rmtree(partial.folder / CANDIDATES, ignore_errors=True)
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
