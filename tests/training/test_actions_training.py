"""Training with tasks that look ahead: short histories, strides, what is counted and taken up again."""

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


def test_what_was_counted_is_taken_up_with_the_weights(tmp_path: Path) -> None:
    """The counts are saved, and without it the same training would end elsewhere."""
    recipe = recipe_of(epochs=3, objective=MIXED)
    whole, _ = LOG.chosen(recipe, tmp_path / "whole")
    for name in ("stopped", "forgetful"):
        LOG.chosen(recipe_of(epochs=2, objective=MIXED), tmp_path / name)
    path = tmp_path / "forgetful" / STATE
    tensors, header = load_file(path), _header(path)
    counted = tensors["counter.target_counts"]
    assert counted.shape == LOG.counts.shape and counted.sum() > 0
    save_file({**tensors, "counter.target_counts": torch.zeros_like(counted)}, path, metadata=header)
    resumed, forgetful = (LOG.chosen(recipe, tmp_path / name)[0] for name in ("stopped", "forgetful"))
    assert same_weights(weights_of(resumed), weights_of(whole))
    assert not same_weights(weights_of(forgetful), weights_of(whole))


def _header(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata())


def test_a_state_that_counted_nothing_is_refused_with_a_sentence(tmp_path: Path) -> None:
    LOG.chosen(recipe_of(epochs=1, objective={**MIXED, "sampler": "mixed"}), tmp_path)
    with pytest.raises(FolderError, match="cannot resume"):
        LOG.chosen(recipe_of(epochs=2, objective=MIXED), tmp_path)


@pytest.mark.parametrize("task", ["dense-all-action", "all-action", "next-action"])
@pytest.mark.parametrize("stride", [0.0, 0.5], ids=["newest", "strides"])
def test_a_cycle_is_learned_by_looking_one_event_ahead(task: str, stride: float, tmp_path: Path) -> None:
    """Events are a second apart, so that a window of a second holds the next alone. All histories are short. Any order
    of the eleven items would score about .4."""
    seconds = {} if task == "next-action" else {"task__days": 1 / 86400, "task__labels": 4}
    recipe = recipe_of(
        epochs=25 if task == "all-action" else 10,
        objective={"task": task, **seconds},
        model={"dropout": 0.0, "length": 6, "width": 16},
        stride=stride,
        averaging=0.9,
    )
    _, record = LOG.learned(recipe, tmp_path)
    assert record.best_score > 0.8


def test_looking_further_ahead_spreads_the_answers(tmp_path: Path) -> None:
    """With a window of three seconds the three next items are as likely: the next one is often not the first."""
    objective = {"task": "dense-all-action", "task__days": 3 / 86400}
    model, progress = LOG.chosen(recipe_of(epochs=10, objective=objective, averaging=0.9), tmp_path)
    assert 0.5 < progress.best_score < 0.95
    assert model.length == 8


def test_five_events_are_enough(tmp_path: Path) -> None:
    """Of users of five events the validation and test take two: two questions each are left."""
    log = Log.of(sequences_of(*[[1, 2, 3, 4, 5]] * 6))
    _, progress = log.chosen(recipe_of(epochs=1, objective={"task": "dense-all-action"}), tmp_path)
    assert progress.history[0]["positions"] == 6 * 2


@pytest.mark.parametrize("task", ["dense-all-action", "next-action"])
def test_a_log_of_which_nothing_can_be_asked_says_so(task: str, tmp_path: Path) -> None:
    """Everything happened at one moment, as in a log without times."""
    log = cycle(5)
    still = Log.of(Sequences(offsets=log.offsets, items=log.items, times=np.zeros_like(log.times)))
    with pytest.raises(TrainingError, match=r"objective\.task\.positive.*objective\.task\.days.*'next-item'"):
        still.chosen(recipe_of(objective={"task": task}), tmp_path)


def test_kinds_come_from_the_facts_of_the_log(tmp_path: Path) -> None:
    log = cycle(20)
    kinds = np.asarray(log.items % 2).astype(np.uint16)
    bought = Log.of(Sequences(offsets=log.offsets, items=log.items, times=log.times, kinds=kinds))

    def positions(positive: list[dict[str, Any]]) -> float:
        recipe = recipe_of(epochs=1, objective={"task": "next-action", "task__positive": positive})
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        setup = replace(recipe, facts=DataFacts(kinds=("look", "buy")))
        _, progress = choose_epoch(setup, bought.whole, seen="kept", folder=folder)
        return progress.history[0]["positions"]

    assert positions([{"kind": "buy"}]) < positions([])
    with pytest.raises(SettingsError, match=r"'sell'.*it has look, buy"):
        positions([{"kind": "sell"}])
    assert N_ITEMS % 2, "so that kinds go round with the items"
