"""Stopped training resumes to identical numbers, on one thread."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cycle_logs import POPULARITY, Log, cycle, recipe_of, same_weights, weights_of
from safetensors.torch import save_file

from segue.errors import FolderError
from segue.models.sequence import SequenceModel
from segue.training import state
from segue.training.loop import TrainingProgress
from segue.training.state import read_training_record
from segue.training.train import STATE, STATE_ALL, TrainingSetup, train_for

LOG = Log.of(cycle())


class Stopped(KeyboardInterrupt):
    """Ctrl-C, raised by these tests alone."""


def stop_at(epoch: int, *, after_epoch: bool) -> Callable[[TrainingProgress], None]:
    """Stop in the middle of an epoch, or after it is saved."""

    def progress(step: TrainingProgress) -> None:
        epoch_ended = step.scores is not None
        if step.epoch == epoch and epoch_ended == after_epoch and step.done * 2 > step.total:
            raise Stopped

    return progress


def train_to_the_end(
    recipe: TrainingSetup, folder: Path
) -> tuple[dict[str, torch.Tensor], list[dict[str, float | int]], int]:
    """Train or resume to the end: weights, history and best epoch."""
    model, progress = LOG.train(recipe, folder)
    return weights_of(model), progress.history, progress.best_epoch


def uninterrupted(recipe: TrainingSetup) -> tuple[dict[str, torch.Tensor], list[dict[str, float | int]], int]:
    """`train_to_the_end` without a stop, once for each setup."""
    key = repr(recipe)
    if key not in _UNINTERRUPTED:
        with tempfile.TemporaryDirectory() as folder:
            _UNINTERRUPTED[key] = train_to_the_end(recipe, Path(folder))
    return _UNINTERRUPTED[key]


_UNINTERRUPTED: dict[str, tuple[dict[str, torch.Tensor], list[dict[str, float | int]], int]] = {}


def assert_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert same_weights(one[0], other[0])
    assert one[1:] == other[1:]


@pytest.mark.parametrize("objective", [{}, POPULARITY], ids=["softmax", "sampled-softmax"])
@pytest.mark.parametrize(
    ("epoch", "after_epoch"),
    [(1, False), (2, False), (2, True), (4, False)],
    ids=["first", "middle", "between", "last"],
)
def test_interrupted_and_resumed_equals_uninterrupted(
    epoch: int, after_epoch: bool, objective: dict[str, Any], tmp_path: Path
) -> None:
    recipe = recipe_of(epochs=4, objective=objective)
    with pytest.raises(Stopped):
        LOG.train(recipe, tmp_path / "stopped", progress=stop_at(epoch, after_epoch=after_epoch))
    assert_same(train_to_the_end(recipe, tmp_path / "stopped"), uninterrupted(recipe))


def test_stopped_many_times(tmp_path: Path) -> None:
    recipe = recipe_of(epochs=4)
    for epoch in (1, 2, 2, 3, 4):
        with pytest.raises(Stopped):
            LOG.train(recipe, tmp_path / "stopped", progress=stop_at(epoch, after_epoch=False))
    assert_same(train_to_the_end(recipe, tmp_path / "stopped"), uninterrupted(recipe))


def test_more_epochs_after_a_finish(tmp_path: Path) -> None:
    train_to_the_end(recipe_of(epochs=2), tmp_path / "grown")
    extended = train_to_the_end(recipe_of(epochs=4), tmp_path / "grown")
    assert len(extended[1]) == 4
    assert_same(extended, uninterrupted(recipe_of(epochs=4)))


def test_more_patience_after_an_early_stop(tmp_path: Path) -> None:
    """With a learning rate so large that the score soon stops rising."""
    short, long = (recipe_of(epochs=12, patience=patience, learning_rate=3.0) for patience in (1, 3))
    stopped = train_to_the_end(short, tmp_path / "grown")
    whole = train_to_the_end(long, tmp_path / "whole")
    assert len(stopped[1]) < len(whole[1])
    assert_same(train_to_the_end(long, tmp_path / "grown"), whole)


def test_resuming_a_finished_training_changes_nothing(tmp_path: Path) -> None:
    recipe = recipe_of(epochs=2)
    result = train_to_the_end(recipe, tmp_path)
    saved = (tmp_path / STATE).read_bytes()
    assert_same(train_to_the_end(recipe, tmp_path), result)
    assert (tmp_path / STATE).read_bytes() == saved


def test_training_on_every_event_resumes(tmp_path: Path) -> None:
    def train_on_every_event(name: str, progress: Callable[[TrainingProgress], None] | None = None) -> SequenceModel:
        (tmp_path / name).mkdir(exist_ok=True)
        model, _ = train_for(
            replace(recipe_of(), progress=progress),
            LOG.sequences,
            LOG.sequences.offsets[1:],
            len(LOG.counts) - 1,
            epochs=3,
            state_file=tmp_path / name / STATE_ALL,
        )
        return model

    with pytest.raises(Stopped):
        train_on_every_event("stopped", stop_at(2, after_epoch=False))
    assert same_weights(weights_of(train_on_every_event("stopped")), weights_of(train_on_every_event("whole")))


def test_a_kill_during_a_save_leaves_the_state_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(epochs=3)
    calls = 0

    def stop_in_second_save(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        nonlocal calls
        calls += 1
        save_file(tensors, path, metadata=metadata)
        if calls == 2:
            Path(path).write_bytes(Path(path).read_bytes()[:100])
            raise Stopped

    monkeypatch.setattr(state, "save_file", stop_in_second_save)
    with pytest.raises(Stopped):
        LOG.train(recipe, tmp_path / "stopped")
    monkeypatch.undo()
    assert read_training_record(tmp_path / "stopped" / STATE).epoch == 1
    assert_same(train_to_the_end(recipe, tmp_path / "stopped"), train_to_the_end(recipe, tmp_path / "whole"))
    assert sorted(path.name for path in (tmp_path / "stopped").iterdir()) == [STATE]


def test_the_state_file_alone_is_enough_to_resume(tmp_path: Path) -> None:
    """Training resumes from copies after each epoch to the same end: kill -9 leaves such a copy."""
    recipe = recipe_of(epochs=3)

    def copy_state(step: TrainingProgress) -> None:
        if step.scores is not None:
            (tmp_path / f"{step.epoch}").mkdir()
            shutil.copy(tmp_path / "whole" / STATE, tmp_path / f"{step.epoch}" / STATE)

    model, progress = LOG.train(recipe, tmp_path / "whole", progress=copy_state)
    for epoch in (1, 2, 3):
        assert read_training_record(tmp_path / f"{epoch}" / STATE).epoch == epoch, "saved before progress is reported"
        result = train_to_the_end(recipe, tmp_path / f"{epoch}")
        assert_same(result, (weights_of(model), progress.history, progress.best_epoch))


@pytest.mark.parametrize("damage", ["empty", "cut", "other", "foreign"])
def test_a_damaged_state_is_refused(damage: str, tmp_path: Path) -> None:
    recipe, path = recipe_of(epochs=1), tmp_path / STATE
    train_to_the_end(recipe, tmp_path)
    if damage == "foreign":
        save_file({"x": torch.zeros(2)}, path)
    else:
        content = path.read_bytes()
        path.write_bytes({"empty": b"", "cut": content[: len(content) // 2], "other": b"no tensors" * 99}[damage])
    with pytest.raises(FolderError, match="without --resume") as error:
        LOG.train(recipe_of(epochs=2), tmp_path)
    assert str(path) in str(error.value)
    with pytest.raises(FolderError, match="without --resume"):
        read_training_record(path)


@pytest.mark.parametrize("shape", [{"width": 16}, {"depth": 2}, {"kind": "sasrec"}, {"length": 9}], ids=str)
def test_the_state_of_another_model_is_refused(shape: dict[str, Any], tmp_path: Path) -> None:
    train_to_the_end(recipe_of(epochs=1), tmp_path)
    with pytest.raises(FolderError, match="cannot resume"):
        LOG.train(recipe_of(epochs=2, model=shape), tmp_path)


def test_the_state_of_a_deeper_model_is_refused(tmp_path: Path) -> None:
    train_to_the_end(recipe_of(epochs=1, model={"kind": "sasrec", "depth": 2}), tmp_path)
    with pytest.raises(FolderError, match="cannot resume"):
        LOG.train(recipe_of(epochs=2, model={"kind": "sasrec", "depth": 1}), tmp_path)
