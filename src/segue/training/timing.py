"""A model and its log → how fast this machine trains and validates it, from a moment of real work."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from segue.evaluation.settings import SeenRule
from segue.evaluation.split_log import SplitLog
from segue.training.loop import TrainingProgress
from segue.training.settings import TRAINED
from segue.training.train import STATE, TrainingSetup, train_for, validation

SECONDS = 2.0  # of training that is timed
CASES = 256  # validation cases that are timed


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of an epoch on this machine."""

    training: float
    validation: float

    @property
    def epoch(self) -> float:
        return self.training + self.validation


def timed(setup: TrainingSetup, log: SplitLog, *, seen: SeenRule) -> Speed:
    """Train for a moment and validate a few cases; the model is thrown away."""
    steps: list[tuple[float, int, int]] = []

    def watch(step: TrainingProgress) -> None:
        if step.scores is None:
            steps.append((time.perf_counter(), step.done, step.total))

    began = time.perf_counter()
    short = msgspec.structs.replace(setup.train, epochs=1, minutes=SECONDS / 60 / TRAINED)
    trial, ends = replace(setup, train=short, progress=watch), np.asarray(log.split.train_end)
    with tempfile.TemporaryDirectory(prefix="segue-timing-") as folder:
        model, _ = train_for(trial, log.sequences, ends, log.n_items, epochs=1, state_file=Path(folder) / STATE)
    # The first step is slower than the others: it is left out if there are any.
    (first, before, _), (last, done, total) = steps[0] if len(steps) > 1 else (began, 0, 0), steps[-1]
    cases = len(log.split.cases("valid", setup.evaluate.target))
    few = validation(setup, log, seen, most=CASES)
    middle = time.perf_counter()
    few(model)
    return Speed(
        training=(last - first) * total / max(1, done - before),
        validation=(time.perf_counter() - middle) * max(1.0, cases / CASES),
    )
