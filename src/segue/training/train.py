"""A log and settings → a trained model, for a given number of epochs or for the epoch that validation chooses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from segue.data.sequences import Sequences
from segue.data.split import Cases, Split
from segue.errors import SettingsError, TrainingError
from segue.evaluation import metrics
from segue.evaluation.evaluator import Evaluator, ModelScorer
from segue.evaluation.settings import EvaluateSettings, SeenRule
from segue.evaluation.split_log import SplitLog, counts_before
from segue.evaluation.window.cases import validation_window
from segue.evaluation.window.evaluate import rank_targets, user_values
from segue.models.build import Builder, build_model
from segue.models.checkpoint import fill_model
from segue.models.encoders import ModelSettings
from segue.models.items.tables import NO_FACTS, DataFacts
from segue.models.sequence import SequenceModel
from segue.objective.objective import Objective
from segue.objective.settings import ObjectiveSettings
from segue.objective.tasks.positive import PositiveEvents
from segue.process_group import SINGLE_PROCESS, ProcessGroup
from segue.training.initial_items import begin_with_companions
from segue.training.loop import SCORE, TrainingCallback, Validate, exhausted, fit, out_of_time
from segue.training.settings import TrainSettings
from segue.training.sparse_rows import LEAST_ROWS
from segue.training.state import TrainingRecord, TrainingState
from segue.training.windows import training_windows

STATE, STATE_ALL = "training.safetensors", "training-all.safetensors"
"""State files of the training that chooses the epoch, and of training on every event, in RUN.partial and in the run."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingSetup:
    """Settings, facts of the log and processes, which all trainings of a run share."""

    model: ModelSettings
    objective: ObjectiveSettings
    train: TrainSettings
    evaluate: EvaluateSettings
    encoder: Builder | None = None
    """The builder of the external encoder that `model.encoder` names."""
    facts: DataFacts = NO_FACTS
    progress: TrainingCallback | None = None
    group: ProcessGroup = SINGLE_PROCESS
    """The processes that share the work; all of them get the same result."""


def choose_epoch(
    setup: TrainingSetup,
    log: SplitLog,
    *,
    seen: SeenRule,
    folder: Path,
    warm_start: Path | None = None,
    finish: bool = False,
) -> tuple[SequenceModel, TrainingRecord]:
    """Train on the training part and return the model of the epoch with the best validation score.

    The test part is not used. `finish`: without another epoch. `warm_start`: a file with the first weights. They are
    validated as epoch 0 and returned if no epoch is better.
    """
    counts, ends, epochs = log.training_counts, log.split.train_end, 0 if finish else setup.train.epochs
    validate = validation(setup, log, seen)
    model, state = _fit(setup, log.sequences, ends, counts, epochs, folder / STATE, warm_start, validate)
    return model, state.record


def validation(setup: TrainingSetup, log: SplitLog, seen: SeenRule, *, most: int | None = None) -> Validate:
    """The validation after each epoch: on the next events or, with `evaluate.days`, on the items of the first days.
    `most`: next events that are enough; None is all."""
    settings = setup.evaluate

    def evaluator(model: SequenceModel) -> Evaluator:
        return Evaluator.of_model(model, log, seen=seen, group=setup.group)

    if settings.days:
        positive = PositiveEvents(setup.objective.positive, setup.facts.kinds)
        window = validation_window(log.sequences, log.split, settings.days, positive)

        def by_window(model: SequenceModel) -> dict[str, float]:
            result = rank_targets(evaluator(model), ModelScorer(model), window, (10,), time=window.time)
            return {name: float(values.mean()) for name, values in user_values(window, result, (10,)).items()}

        return by_window
    cases = validation_cases(log.split, settings)
    limits = [limit for limit in (most, settings.cases) if limit]
    cases = cases.spread(min(limits)) if limits else cases

    def by_next_event(model: SequenceModel) -> dict[str, float]:
        ranks = evaluator(model).ranks(ModelScorer(model), cases)
        return {SCORE: float(metrics.ndcg(ranks, 10).mean()), "hit@10": float(metrics.hit(ranks, 10).mean())}

    return by_next_event


def _companions(
    table: Tensor, model: SequenceModel, sequences: Sequences, ends: np.ndarray, train: TrainSettings
) -> Tensor:
    """A table [V + 1, D] that begins with companions."""
    with threads(train.threads):
        return begin_with_companions(
            table, sequences, ends, model.items.n_items, members=model.members, seed=train.seed
        )


def validation_cases(split: Split, settings: EvaluateSettings) -> Cases:
    """The next events that validation measures; refused if there are none."""
    cases = split.cases("valid", settings.target)
    if not len(cases):
        raise TrainingError(
            "No event is left for validation, which chooses the epoch; users need at least three events under "
            "--split last."
        )
    return cases


def train_for(
    setup: TrainingSetup,
    sequences: Sequences,
    ends: np.ndarray,
    n_items: int,
    *,
    epochs: int,
    state_file: Path | None,
    warm_start: Path | None = None,
) -> tuple[SequenceModel, np.ndarray]:
    """Train for a number of epochs, without validation, on each user's events before `ends` [U]. Without a `state_file`
    nothing is saved.

    Return the model and the number of those events by item [V + 1].
    """
    counts = counts_before(sequences, ends, n_items)
    model, _ = _fit(setup, sequences, ends, counts, epochs, state_file, warm_start, validate=None)
    return model, counts


def _fit(
    setup: TrainingSetup,
    sequences: Sequences,
    ends: np.ndarray,
    counts: np.ndarray,
    epochs: int,
    state_file: Path | None,
    warm_start: Path | None,
    validate: Validate | None,
) -> tuple[SequenceModel, TrainingState]:
    """Train on each user's events before `ends` [U], which are `counts` [V + 1] by item."""
    facts, generator = setup.facts, torch.Generator().manual_seed(setup.train.seed)
    model = build_model(setup.model, len(counts) - 1, generator=generator, facts=facts, encoder=setup.encoder)
    if warm_start is not None:
        fill_model(model, warm_start)
    elif setup.train.items == "companions":
        for table in model.items.learned:
            table.data = setup.group.on_first(partial(_companions, table.data, model, sequences, ends, setup.train))
    model = model.to(device_of(setup.train, setup.group))
    # With content, categories or codes, items share weights: a negative would push away all items that share them.
    shared = setup.model.items.shared
    objective = Objective(setup.objective, counts, facts.kinds, length=model.length, only_trained=shared)
    stride = max(1, round(setup.train.stride * model.length)) if setup.train.stride else None
    windows = training_windows(sequences, ends, length=model.length + objective.extra, stride=stride)
    # Without a sampler every item is scored, so every row of the table has a gradient.
    rows = max(map(len, model.items.learned), default=0)
    model.items.sparse_gradients = objective.sampler is not None and rows > LEAST_ROWS
    with threads(setup.train.threads):
        state = fit(
            model,
            objective,
            windows,
            settings=setup.train,
            epochs=epochs,
            validate=validate,
            state_file=state_file,
            progress=setup.progress,
            warm=warm_start is not None,
            group=setup.group,
        )
    return model.cpu().requires_grad_(requires_grad=False), state


def reason_finished(record: TrainingRecord, settings: TrainSettings) -> str | None:
    """Why this training has nothing left to do, or None."""
    if record.interrupted:
        return None
    if exhausted(record, settings.patience):
        return (
            f"it stopped after epoch {record.epoch}, as validation had not improved for {settings.patience} epochs: "
            "raise train.patience to continue"
        )
    if out_of_time(record):
        return "its time is over: raise train.minutes to continue"
    if record.epoch >= settings.epochs:
        return f"all {settings.epochs} epochs are done: raise train.epochs to continue"
    return None


def device_of(settings: TrainSettings, group: ProcessGroup = SINGLE_PROCESS) -> torch.device:
    """The device of `train.device`. With `auto` it is CUDA if there is any; each process of several has its own."""
    available = torch.cuda.is_available()
    if settings.device == "cuda" and not available:
        raise SettingsError("train.device is 'cuda', but torch finds no CUDA device; choose 'cpu' or 'auto'.")
    if not available or settings.device == "cpu":
        return torch.device("cpu")
    if group.size == 1:
        return torch.device("cuda")
    processes, devices = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    if processes > devices:
        raise SettingsError(
            f"There are {processes} processes on a machine with {devices} CUDA devices, and each needs its own: start "
            f"at most {devices}, or train on CPUs with --set train.device=cpu."
        )
    return torch.device(f"cuda:{os.environ['LOCAL_RANK']}")


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use this many threads, 0 for all, and restore the number afterwards."""
    before = torch.get_num_threads()
    if count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
