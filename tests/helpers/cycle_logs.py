"""A planted log, in which items follow a cycle, so that the next item is known; and short trainings on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from settings_tables import BUILDERS, model_settings, objective_settings

from segue.data.sequences import Sequences
from segue.data.split import Split, split_last
from segue.evaluation.settings import EvaluateSettings, SeenRule
from segue.evaluation.split_log import SplitLog
from segue.models.build import build_model
from segue.models.items.tables import NO_FACTS, DataFacts
from segue.models.sequence import SequenceModel
from segue.objective.objective import Objective
from segue.training.loop import TrainingProgress, Validate, fit
from segue.training.settings import TrainSettings
from segue.training.state import TrainingRecord, TrainingState, read_training_record
from segue.training.train import STATE, TrainingSetup, choose_epoch
from segue.training.windows import Windows, training_windows

N_ITEMS = 11
PERFECT = 0.99
POPULARITY = {"loss": "sampled-softmax", "sampler": "popularity", "sampler__negatives": 8, "sampler__power": 0.75}


def sequences_of(*users: Sequence[int]) -> Sequences:
    lengths = [len(user) for user in users]
    return Sequences(
        offsets=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        items=np.array([item for user in users for item in user], dtype=np.int32),
        times=np.array([position * 1_000_000 for length in lengths for position in range(length)], dtype=np.int64),
    )


def cycle(users: int = 60, *, seed: int = 0) -> Sequences:
    """Each user starts at a random item and follows the cycle for five to fourteen events."""
    rng = np.random.default_rng(seed)
    walks = zip(rng.integers(0, N_ITEMS, users), rng.integers(5, 15, users), strict=True)
    return sequences_of(
        *([(first_item + position) % N_ITEMS + 1 for position in range(length)] for first_item, length in walks)
    )


def recipe_of(
    *, model: dict[str, Any] | None = None, objective: dict[str, Any] | None = None, **train: Any
) -> TrainingSetup:
    """A small setup: dropout uses every source of randomness, and one thread makes results identical."""
    kind = BUILDERS[(model or {}).get("kind", "esasrec")]
    narrow = {"feed_forward": 1} if "feed_forward" in kind.__struct_fields__ else {}
    shape = {"width": 8, "depth": 1, "length": 8, "dropout": 0.1, **narrow, **(model or {})}
    steps = {"epochs": 3, "tokens": 150, "learning_rate": 1e-2, "warmup": 5, "threads": 1, "device": "cpu", **train}
    return TrainingSetup(
        model=model_settings(**shape),
        objective=objective_settings(**(objective or {})),
        train=msgspec.convert(steps, TrainSettings),
        evaluate=EvaluateSettings(),
    )


class _LearnedError(Exception):
    """The validation score is PERFECT."""


@dataclass(frozen=True, slots=True, eq=False)
class Log:
    """A log with its split and its training counts."""

    whole: SplitLog
    counts: np.ndarray

    @staticmethod
    def of(sequences: Sequences, n_items: int = N_ITEMS) -> Log:
        whole = SplitLog(sequences, split_last(sequences), n_items)
        return Log(whole, whole.training_counts)

    @property
    def sequences(self) -> Sequences:
        return self.whole.sequences

    @property
    def split(self) -> Split:
        return self.whole.split

    def train(
        self,
        recipe: TrainingSetup,
        folder: Path,
        *,
        seen: SeenRule = "kept",
        progress: Callable[[TrainingProgress], None] | None = None,
        facts: DataFacts = NO_FACTS,
    ) -> tuple[SequenceModel, TrainingRecord]:
        folder.mkdir(exist_ok=True)
        setup = replace(recipe, progress=progress, facts=facts)
        return choose_epoch(setup, self.whole, seen=seen, folder=folder)

    def train_until_perfect(
        self, recipe: TrainingSetup, folder: Path, *, seen: SeenRule = "kept", facts: DataFacts = NO_FACTS
    ) -> tuple[SequenceModel, TrainingRecord]:
        """`train`, but end once the validation score is PERFECT."""

        def stop_if_perfect(step: TrainingProgress) -> None:
            if step.scores is not None and step.scores["ndcg@10"] >= PERFECT:
                raise _LearnedError

        with suppress(_LearnedError):
            return self.train(recipe, folder, seen=seen, progress=stop_if_perfect, facts=facts)
        epochs = read_training_record(folder / STATE).epoch  # the state was saved before `stop_if_perfect` was called
        finished = replace(recipe, train=msgspec.structs.replace(recipe.train, epochs=epochs))
        return self.train(finished, folder, seen=seen, facts=facts)

    def windows(self, recipe: TrainingSetup) -> Windows:
        return training_windows(self.sequences, self.split.train_end, length=recipe.model.length + 1)

    def fit(
        self, recipe: TrainingSetup, state_file: Path, validate: Validate | None, *, objective: Objective | None = None
    ) -> tuple[SequenceModel, TrainingState]:
        """Train with a custom validation."""
        generator = torch.Generator().manual_seed(recipe.train.seed)
        model = build_model(recipe.model, len(self.counts) - 1, generator=generator)
        state = fit(
            model,
            objective or Objective(recipe.objective, self.counts),
            self.windows(recipe),
            settings=recipe.train,
            epochs=recipe.train.epochs,
            validate=validate,
            state_file=state_file,
        )
        return model, state


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in model.state_dict().items()}


def same_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys() and one
    return all(torch.equal(weight, other[name]) for name, weight in one.items())
