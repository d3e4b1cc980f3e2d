"""Planted logs in which an event's kind, or the time of day, decides the next item: who is shown it learns it, and who
sees items alone cannot."""

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
    """Items round a cycle: after each event its step [users, events] says how many to leave out."""
    users, events = steps.shape
    moved = np.cumsum(steps[:, :-1] + 1, axis=1)
    starts = rng.integers(0, ITEMS, (users, 1))
    sequences = Sequences(
        offsets=np.arange(users + 1, dtype=np.int64) * events,
        items=(np.hstack((starts, starts + moved)) % ITEMS + 1).astype(np.int32).ravel(),
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
    """The step after an event is whether it came at night, in the morning or in the afternoon, on any day."""
    rng = np.random.default_rng(8)
    steps = rng.integers(0, STEPS, (300, 10))
    hours = 8 * steps + rng.integers(3, 6, steps.shape)
    days = np.cumsum(rng.integers(1, 20, steps.shape), axis=1)
    return log_of(steps, rng, BEGIN + DAY * days + 3600 * hours)


def hit_at_1(log: Log, folder: Path, *, epochs: int, facts: DataFacts = NO_FACTS, **model: Any) -> float:
    """On the test part, of the epoch that validation chose."""
    recipe = recipe_of(
        model={"kind": "pinnerformer", "width": 32, "heads": 2, "depth": 1, "length": 10, "dropout": 0.0, **model},
        objective={"loss": "softmax"},
        epochs=epochs,
        patience=epochs,
        tokens=300,
        learning_rate=5e-3,
        averaging=0.9,
    )
    trained, _ = log.learned(recipe, folder, facts=facts)
    evaluator = Evaluator(sequences=log.sequences, counts=log.counts, seen="kept")
    return float((evaluator.ranks(ModelScorer(trained), log.split.cases("test", "last")) == 1).mean())


def test_with_its_kind_in_sight_the_next_item_is_known(tmp_path: Path) -> None:
    facts = DataFacts(kinds=KINDS)
    assert hit_at_1(kind_log(), tmp_path, epochs=8, facts=facts, inputs="events", inputs__times=[]) > 0.9


def test_with_the_date_in_sight_the_next_item_is_known(tmp_path: Path) -> None:
    assert hit_at_1(clock_log(), tmp_path, epochs=16, inputs="events", inputs__times=["absolute"]) > 0.9


@pytest.mark.parametrize("log", [kind_log, clock_log])
def test_of_items_alone_a_guess_is_all_there_is(log: Any, tmp_path: Path) -> None:
    assert abs(hit_at_1(log(), tmp_path, epochs=5) - 1 / STEPS) < 0.09
