"""A model and its log → how fast this machine trains, validates and measures it, from a moment of real work."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import msgspec
import numpy as np

from segue.counts.features import ItemCounts
from segue.evaluation.baselines import BASELINES
from segue.evaluation.evaluator import Evaluator, ModelScorer
from segue.evaluation.settings import SeenRule
from segue.evaluation.split_log import SplitLog
from segue.models.sequence import SequenceModel
from segue.training.counts import MOST_CASES, fit_counts
from segue.training.loop import TrainingProgress
from segue.training.train import TrainingSetup, train_for, validation

SECONDS = 2.0  # of training that is timed
CASES = 256  # validation cases that are timed


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds on this machine."""

    training: float
    """Of an epoch."""
    validation: float
    report: float
    """Of what follows the training: the weights of counts are fitted, model and baselines are measured."""

    @property
    def epoch(self) -> float:
        return self.training + self.validation


def timed(setup: TrainingSetup, log: SplitLog, pairs: ItemCounts | None, *, seen: SeenRule) -> Speed:
    """Train for a moment and measure a few validation cases; the model is thrown away."""
    training, model = _training(setup, log)
    cases = log.split.cases("valid", setup.evaluate.target)
    some, evaluator = cases.spread(CASES), Evaluator.of_model(model, log, seen=seen)
    scale = len(cases) / max(1, len(some))
    most = min(setup.evaluate.cases or len(cases), len(cases)) / max(1, len(some))
    validated = _seconds(partial(validation(setup, log, seen, most=CASES), model))
    report = _seconds(partial(evaluator.measure, ModelScorer(model), some, setup.evaluate.at)) * scale
    for fit in BASELINES.values():
        began = time.perf_counter()
        baseline = fit(log)
        report += time.perf_counter() - began
        report += _seconds(partial(evaluator.measure, baseline, some, setup.evaluate.at)) * scale
    if pairs is not None:
        fitted = _seconds(partial(fit_counts, ModelScorer(model), pairs, cases, evaluator, most=CASES))
        report += fitted * min(len(cases), MOST_CASES) / max(1, len(some))
    return Speed(training, validated * (1.0 if setup.evaluate.days else max(1.0, most)), report)


def _training(setup: TrainingSetup, log: SplitLog) -> tuple[float, SequenceModel]:
    """The seconds of an epoch, and the model that was trained for a moment."""
    steps: list[tuple[float, int, int]] = []

    def watch(step: TrainingProgress) -> None:
        if step.scores is None:
            steps.append((time.perf_counter(), step.done, step.total))

    began = time.perf_counter()
    short = msgspec.structs.replace(setup.train, epochs=1, minutes=SECONDS / 60, items="random")
    trial, ends = replace(setup, train=short, progress=watch), np.asarray(log.split.train_end)
    model, _ = train_for(trial, log.sequences, ends, log.n_items, epochs=1, state_file=None)
    # The first step is slower than the others: it is left out if there are any.
    (first, before, _), (last, done, total) = steps[0] if len(steps) > 1 else (began, 0, 0), steps[-1]
    return (last - first) * total / max(1, done - before), model


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
