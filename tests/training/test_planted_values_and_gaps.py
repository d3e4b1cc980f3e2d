"""Planted logs in which values or time gaps decide the next item: models with that input learn it, others cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cycle_logs import Log, recipe_of

from segue.data.sequences import Sequences
from segue.evaluation.evaluator import Evaluator, ModelScorer

ITEMS = 12
VALUES = 3
GAPS = np.array([60, 864_000])  # a minute and ten days


def walk(steps: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Items round a cycle: the step of each event is how many items to skip [users, events]."""
    starts = rng.integers(0, ITEMS, (len(steps), 1))
    offsets = np.cumsum(steps[:, :-1] + 1, axis=1)
    return np.asarray(np.hstack((starts, starts + offsets)) % ITEMS + 1, dtype=np.int32)


def log_of(items: np.ndarray, times: np.ndarray, values: np.ndarray | None = None) -> Log:
    users, events = items.shape
    sequences = Sequences(
        offsets=np.arange(users + 1, dtype=np.int64) * events,
        items=items.ravel(),
        times=times.ravel().astype(np.int64) * 1_000_000,
        values=None if values is None else values.ravel().astype(np.float32),
    )
    return Log.of(sequences, ITEMS)


def value_log(users: int = 400, events: int = 12) -> Log:
    """The step after an event is its value."""
    rng = np.random.default_rng(7)
    steps = rng.integers(0, VALUES, (users, events))
    return log_of(walk(steps, rng), np.tile(np.arange(events) * 3600, (users, 1)), steps + 1)


def gap_log(users: int = 400, events: int = 12) -> Log:
    """The step after an event is the time gap before it."""
    rng = np.random.default_rng(8)
    steps = rng.integers(0, len(GAPS), (users, events))
    return log_of(walk(steps, rng), 1_600_000_000 + np.cumsum(GAPS[steps], axis=1))


def hit_at_1(log: Log, folder: Path, model: dict[str, Any], epochs: int) -> float:
    """hit@1 on the test part, of the best epoch by validation."""
    recipe = recipe_of(
        model={"width": 32, "depth": 2, "length": 12, "dropout": 0.0, "positions": "oldest", **model},
        objective={"loss": "softmax", **({"temperature": 0.1} if model.get("similarity") == "cosine" else {})},
        epochs=epochs,
        patience=epochs,
        tokens=400,
        learning_rate=5e-3,
        averaging=0.9,
    )
    best, _ = log.train_until_perfect(recipe, folder)
    evaluator = Evaluator(sequences=log.sequences, counts=log.counts, seen="kept", target_time=best.target_time)
    return float((evaluator.ranks(ModelScorer(best), log.split.cases("test", "last")) == 1).mean())


SASREC = {"kind": "sasrec", "feed_forward": 1}
HSTU = {"kind": "hstu", "target_time": False}


@pytest.mark.parametrize(
    "model",
    [
        {**SASREC, "inputs": "rated", "inputs__value_edges": (1.5, 2.5)},
        {**HSTU, "inputs": "combined", "similarity": "cosine"},
    ],
    ids=["sasrec, rated", "hstu, combined"],
)
def test_with_values_as_input_the_next_item_is_learned(model: dict[str, Any], tmp_path: Path) -> None:
    assert hit_at_1(value_log(), tmp_path, model, 16) > 0.9


def test_without_values_hits_are_at_chance(tmp_path: Path) -> None:
    assert abs(hit_at_1(value_log(), tmp_path, SASREC, 8) - 1 / VALUES) < 0.05


def test_hstu_learns_from_time_gaps(tmp_path: Path) -> None:
    assert hit_at_1(gap_log(), tmp_path, HSTU, 20) > 0.9


def test_without_times_hits_are_at_chance(tmp_path: Path) -> None:
    assert abs(hit_at_1(gap_log(), tmp_path, SASREC, 8) - 1 / len(GAPS)) < 0.05
