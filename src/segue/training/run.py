"""A data set and settings → a trained model: epochs chosen on validation, or said."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from segue.data.sequences import Sequences
from segue.data.split import Split
from segue.errors import SettingsError, TrainingError
from segue.evaluation import metrics
from segue.evaluation.evaluator import Evaluator, ModelScorer
from segue.evaluation.settings import EvaluateSettings, SeenRule
from segue.evaluation.split_log import counts_before
from segue.evaluation.window.cases import validation_window
from segue.evaluation.window.evaluate import rank_targets, user_values
from segue.models.build import Builder, build_model
from segue.models.checkpoint import fill_model
from segue.models.facts import NO_FACTS, Facts
from segue.models.sequence import SequenceModel
from segue.models.settings import ModelSettings
from segue.objective.objective import Objective
from segue.objective.settings import ObjectiveSettings
from segue.objective.tasks.positive import PositiveEvents
from segue.process_group import SINGLE_PROCESS, ProcessGroup
from segue.training.loop import SCORE, TrainingProgress, Validate, exhausted, fit, training_windows
from segue.training.settings import TrainSettings
from segue.training.sparse_rows import LEAST_ROWS
from segue.training.state import TrainingRecord, TrainingState

CHOOSING, EVERYTHING = "training.safetensors", "training-all.safetensors"
"""State files, in RUN.partial while training and in the run folder afterwards."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingSetup:
    """The sections that training reads."""

    model: ModelSettings
    objective: ObjectiveSettings
    train: TrainSettings
    evaluate: EvaluateSettings
    encoder: Builder | None = None
    """The builder from outside that `model.encoder` names."""


def choose_epoch(
    recipe: TrainingSetup,
    sequences: Sequences,
    split: Split,
    counts: np.ndarray,
    *,
    seen: SeenRule,
    folder: Path,
    progress: Callable[[TrainingProgress], None] | None,
    facts: Facts = NO_FACTS,
    start: Path | None = None,
    group: ProcessGroup = SINGLE_PROCESS,
) -> tuple[SequenceModel, TrainingRecord]:
    """Train on the training part; validation chooses the epoch. The test part is not looked at.

    `counts` [V + 1] are the items' training events, `facts` what else the model is built from. `start`: a file of the
    weights to begin with, else a new model's; they are judged first, and kept if no epoch makes them better. `group`:
    the processes that share the work, all of which end with the same.
    """

    def evaluator(model: SequenceModel) -> Evaluator:
        known = model.answerable(counts)
        return Evaluator(
            sequences=sequences,
            counts=counts,
            seen=seen,
            target_time=model.target_time,
            answerable=known,
            readable=known,
            group=group,
        )

    validate = _validation(recipe, sequences, split, evaluator, facts)
    ends, epochs = split.train_end, recipe.train.epochs
    model, state = _fit(
        recipe, sequences, ends, counts, facts, epochs, validate, folder / CHOOSING, progress, start, group
    )
    return model, state.record


def _validation(
    recipe: TrainingSetup,
    sequences: Sequences,
    split: Split,
    evaluator: Callable[[SequenceModel], Evaluator],
    facts: Facts,
) -> Validate:
    """What is asked of a model after each epoch: the next events of validation, or the items of its first days."""
    settings = recipe.evaluate
    if settings.days:
        positive = PositiveEvents(recipe.objective.positive, facts.kinds)
        window = validation_window(sequences, split, settings.days, positive)

        def by_window(model: SequenceModel) -> dict[str, float]:
            result = rank_targets(evaluator(model), ModelScorer(model), window, (10,), time=window.time)
            return {name: float(values.mean()) for name, values in user_values(window, result, (10,)).items()}

        return by_window
    cases = split.cases("valid", settings.target)
    if not len(cases):
        raise TrainingError(
            "No event is left for validation, which chooses the epoch; users need at least three events under "
            "--split last."
        )

    def by_next_event(model: SequenceModel) -> dict[str, float]:
        ranks = evaluator(model).ranks(ModelScorer(model), cases)
        return {SCORE: float(metrics.ndcg(ranks, 10).mean()), "hit@10": float(metrics.hit(ranks, 10).mean())}

    return by_next_event


def train_for(
    recipe: TrainingSetup,
    sequences: Sequences,
    ends: np.ndarray,
    n_items: int,
    *,
    epochs: int,
    state_file: Path,
    progress: Callable[[TrainingProgress], None] | None,
    facts: Facts = NO_FACTS,
    start: Path | None = None,
    group: ProcessGroup = SINGLE_PROCESS,
) -> tuple[SequenceModel, np.ndarray]:
    """Train a new model, or the one of `start`, for so many epochs on what each user had before `ends` [U], judged by
    nobody; give it and the items' counts [V + 1] there."""
    counts = counts_before(sequences, ends, n_items)
    model, _ = _fit(recipe, sequences, ends, counts, facts, epochs, None, state_file, progress, start, group)
    return model, counts


def _fit(
    recipe: TrainingSetup,
    sequences: Sequences,
    ends: np.ndarray,
    counts: np.ndarray,
    facts: Facts,
    epochs: int,
    validate: Validate | None,
    state_file: Path,
    progress: Callable[[TrainingProgress], None] | None,
    start: Path | None,
    group: ProcessGroup,
) -> tuple[SequenceModel, TrainingState]:
    first = torch.Generator().manual_seed(recipe.train.seed)
    model = build_model(recipe.model, len(counts) - 1, generator=first, facts=facts, encoder=recipe.encoder)
    if start is not None:
        fill_model(model, start)
    model = model.to(device_of(recipe.train, group))
    # What an item shares with others, its content, its category or parts of its codes, would be pushed away with it.
    shared = recipe.model.items != "ids" or bool(recipe.model.category)
    objective = Objective(recipe.objective, counts, facts.kinds, length=model.length, only_trained=shared)
    stride = max(1, round(recipe.train.stride * model.length)) if recipe.train.stride else None
    windows = training_windows(sequences, ends, length=model.length + objective.extra, stride=stride)
    # Where every item is looked at, every row is used.
    rows = max(map(len, model.items.learned), default=0)
    model.items.sparse_gradients = objective.sampler is not None and rows > LEAST_ROWS
    with threads(recipe.train.threads):
        state = fit(
            model,
            objective,
            windows,
            settings=recipe.train,
            epochs=epochs,
            validate=validate,
            state_file=state_file,
            progress=progress,
            continued=start is not None,
            group=group,
        )
    return model.cpu().requires_grad_(requires_grad=False), state


def finished(record: TrainingRecord, settings: TrainSettings) -> str | None:
    """Why training that got this far has nothing left to do, or None."""
    if exhausted(record, settings.patience):
        return (
            f"it stopped after epoch {record.epoch}, as validation had not improved for {settings.patience} epochs: "
            "raise train.patience to go on"
        )
    if record.epoch >= settings.epochs:
        return f"all {settings.epochs} epochs are done: raise train.epochs to go on"
    return None


def device_of(settings: TrainSettings, group: ProcessGroup = SINGLE_PROCESS) -> torch.device:
    """The device asked for; `auto` takes CUDA where there is one, and of several each process its own."""
    available = torch.cuda.is_available()
    if settings.device == "cuda" and not available:
        raise SettingsError("train.device is 'cuda', but torch finds no CUDA device; choose 'cpu' or 'auto'.")
    if not available or settings.device == "cpu":
        return torch.device("cpu")
    if group.size == 1:
        return torch.device("cuda")
    here, devices = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    if here > devices:
        raise SettingsError(
            f"There are {here} processes on a machine with {devices} CUDA devices, and each needs its own: start "
            f"{devices} at the most, or train on CPUs with --set train.device=cpu."
        )
    return torch.device(f"cuda:{os.environ['LOCAL_RANK']}")


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use this many threads, 0 for all it has, and give back what it had."""
    before = torch.get_num_threads()
    if count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
