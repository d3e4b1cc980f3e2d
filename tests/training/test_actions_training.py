"""Training with tasks of several future targets: short histories, strides, target counts and resuming."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cycle_logs import N_ITEMS, Log, cycle, recipe_of, same_weights, sequences_of, weights_of
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from segue.data.sequences import Sequences
from segue.errors import FolderError, SettingsError, TrainingError
from segue.models.items.tables import DataFacts
from segue.training.train import STATE, choose_epoch

MIXED = {
    "task": "dense-all-action",
    "task__labels": 3,
    "loss": "sampled-softmax",
    "sampler": "targets+uniform",
    "sampler__negatives": 8,
    "equal_users": True,
}
LOG = Log.of(cycle(40))


def test_target_counts_are_saved_and_restored_with_the_weights(tmp_path: Path) -> None:
    """Without the saved counts, training resumes to other weights."""
    recipe = recipe_of(epochs=3, objective=MIXED)
    whole, _ = LOG.train(recipe, tmp_path / "whole")
    for name in ("stopped", "forgetful"):
        LOG.train(recipe_of(epochs=2, objective=MIXED), tmp_path / name)
    path = tmp_path / "forgetful" / STATE
    tensors, header = load_file(path), _header(path)
    target_counts = tensors["counter.target_counts"]
    assert target_counts.shape == LOG.counts.shape and target_counts.sum() > 0
    save_file({**tensors, "counter.target_counts": torch.zeros_like(target_counts)}, path, metadata=header)
    resumed, forgetful = (LOG.train(recipe, tmp_path / name)[0] for name in ("stopped", "forgetful"))
    assert same_weights(weights_of(resumed), weights_of(whole))
    assert not same_weights(weights_of(forgetful), weights_of(whole))


def _header(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata())


def test_a_state_without_target_counts_is_refused(tmp_path: Path) -> None:
    LOG.train(recipe_of(epochs=1, objective={**MIXED, "sampler": "mixed"}), tmp_path)
    with pytest.raises(FolderError, match="cannot resume"):
        LOG.train(recipe_of(epochs=2, objective=MIXED), tmp_path)


@pytest.mark.parametrize("task", ["dense-all-action", "all-action", "next-action"])
@pytest.mark.parametrize("stride", [0.0, 0.5], ids=["newest", "strides"])
def test_a_cycle_is_learned_with_one_future_target(task: str, stride: float, tmp_path: Path) -> None:
    """Events are one second apart, so that a window of a second has the next event alone. All histories are short. A
    random order of the eleven items scores about .4."""
    seconds = {} if task == "next-action" else {"task__days": 1 / 86400, "task__labels": 4}
    recipe = recipe_of(
        epochs=25 if task == "all-action" else 10,
        objective={"task": task, **seconds},
        model={"dropout": 0.0, "length": 6, "width": 16},
        stride=stride,
        averaging=0.9,
    )
    _, record = LOG.train_until_perfect(recipe, tmp_path)
    assert record.best_score > 0.8


def test_several_future_targets_are_equally_likely(tmp_path: Path) -> None:
    """With a window of three seconds the next three items are equally likely: the first is often not the next."""
    objective = {"task": "dense-all-action", "task__days": 3 / 86400}
    model, progress = LOG.train(recipe_of(epochs=10, objective=objective, averaging=0.9), tmp_path)
    assert 0.5 < progress.best_score < 0.95
    assert model.length == 8


def test_five_events_are_enough(tmp_path: Path) -> None:
    """Validation and test take two of five events: two training positions per user remain."""
    log = Log.of(sequences_of(*[[1, 2, 3, 4, 5]] * 6))
    _, progress = log.train(recipe_of(epochs=1, objective={"task": "dense-all-action"}), tmp_path)
    assert progress.history[0]["positions"] == 6 * 2


@pytest.mark.parametrize("task", ["dense-all-action", "next-action"])
def test_a_log_without_targets_is_refused(task: str, tmp_path: Path) -> None:
    """All events have the same timestamp, as in a log without times."""
    log = cycle(5)
    log_without_times = Log.of(Sequences(offsets=log.offsets, items=log.items, times=np.zeros_like(log.times)))
    with pytest.raises(TrainingError, match=r"objective\.task\.positive.*objective\.task\.days.*'next-item'"):
        log_without_times.train(recipe_of(objective={"task": task}), tmp_path)


def test_kinds_come_from_the_facts_of_the_log(tmp_path: Path) -> None:
    log = cycle(20)
    kinds = np.asarray(log.items % 2).astype(np.uint16)
    log_with_kinds = Log.of(Sequences(offsets=log.offsets, items=log.items, times=log.times, kinds=kinds))

    def positions(positive: list[dict[str, Any]]) -> float:
        recipe = recipe_of(epochs=1, objective={"task": "next-action", "task__positive": positive})
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        setup = replace(recipe, facts=DataFacts(kinds=("look", "buy")))
        _, progress = choose_epoch(setup, log_with_kinds.whole, seen="kept", folder=folder)
        return progress.history[0]["positions"]

    assert positions([{"kind": "buy"}]) < positions([])
    with pytest.raises(SettingsError, match=r"'sell'.*it has look, buy"):
        positions([{"kind": "sell"}])
    assert N_ITEMS % 2, "kinds alternate along the cycle"
