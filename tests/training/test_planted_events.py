"""Planted logs in which an event's kind, or the time of day, decides the next item: a model with that input learns
it, a model of items alone cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cycle_logs import Log, recipe_of

from segue.data.sequences import Sequences
from segue.evaluation.evaluator import Evaluator, ModelScorer
from segue.models.items.tables import NO_FACTS, DataFacts

ITEMS, STEPS = 12, 3
KINDS = ("buy", "look", "save@home")
DAY, BEGIN = 86_400, 1_600_041_600  # seconds; a midnight


def log_of(steps: np.ndarray, rng: np.random.Generator, times: np.ndarray, *, kinds: bool = False) -> Log:
    """Items round a cycle: the step of each event [users, events] is how many items to skip."""
    users, events = steps.shape
    offsets = np.cumsum(steps[:, :-1] + 1, axis=1)
    starts = rng.integers(0, ITEMS, (users, 1))
    sequences = Sequences(
        offsets=np.arange(users + 1, dtype=np.int64) * events,
        items=(np.hstack((starts, starts + offsets)) % ITEMS + 1).astype(np.int32).ravel(),
        times=times.ravel().astype(np.int64) * 1_000_000,
        kinds=steps.astype(np.uint16).ravel() if kinds else None,
    )
    return Log.of(sequences, ITEMS)


def kind_log() -> Log:
    """The step after an event is its kind."""
    rng = np.random.default_rng(7)
    steps = rng.integers(0, STEPS, (300, 10))
    return log_of(steps, rng, np.tile(BEGIN + 3600 * np.arange(10), (300, 1)), kinds=True)


def clock_log() -> Log:
    """The step after an event is its time of day: night, morning or afternoon."""
    rng = np.random.default_rng(8)
    steps = rng.integers(0, STEPS, (300, 10))
    hours = 8 * steps + rng.integers(3, 6, steps.shape)
    days = np.cumsum(rng.integers(1, 20, steps.shape), axis=1)
    return log_of(steps, rng, BEGIN + DAY * days + 3600 * hours)


def hit_at_1(log: Log, folder: Path, *, epochs: int, facts: DataFacts = NO_FACTS, **model: Any) -> float:
    """hit@1 on the test part, of the best epoch by validation."""
    recipe = recipe_of(
        model={"kind": "pinnerformer", "width": 32, "heads": 2, "depth": 1, "length": 10, "dropout": 0.0, **model},
        objective={"loss": "softmax"},
        epochs=epochs,
        patience=epochs,
        tokens=300,
        learning_rate=5e-3,
        averaging=0.9,
    )
    best, _ = log.train_until_perfect(recipe, folder, facts=facts)
    evaluator = Evaluator(sequences=log.sequences, counts=log.counts, seen="kept")
    return float((evaluator.ranks(ModelScorer(best), log.split.cases("test", "last")) == 1).mean())


def test_with_kinds_as_input_the_next_item_is_learned(tmp_path: Path) -> None:
    facts = DataFacts(kinds=KINDS)
    assert hit_at_1(kind_log(), tmp_path, epochs=8, facts=facts, inputs="events", inputs__times=[]) > 0.9


def test_with_times_as_input_the_next_item_is_learned(tmp_path: Path) -> None:
    assert hit_at_1(clock_log(), tmp_path, epochs=16, inputs="events", inputs__times=["absolute"]) > 0.9


@pytest.mark.parametrize("log", [kind_log, clock_log])
def test_with_items_alone_hits_are_at_chance(log: Any, tmp_path: Path) -> None:
    assert abs(hit_at_1(log(), tmp_path, epochs=5) - 1 / STEPS) < 0.09
