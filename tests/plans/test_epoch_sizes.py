"""`train.epoch_events`: an epoch is a random part of the log, the whole log, or several passes over it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cycle_logs import Log, cycle, recipe_of, same_weights, sequences_of, weights_of
from hypothesis import given
from hypothesis import strategies as st

from segue.data.batch import Batch
from segue.training.loop import TrainingProgress
from segue.training.train import TrainingSetup
from segue.training.windows import Windows, training_windows

LOG = Log.of(cycle())


class Stopped(KeyboardInterrupt):
    """Ctrl-C, raised by these tests alone."""


def windows_of(lengths: list[int]) -> Windows:
    """One window for each length; its user's number is the item of all its events."""
    log = sequences_of(*([user] * length for user, length in enumerate(lengths, start=1)))
    return training_windows(log, log.offsets[1:], length=max(lengths))


def epoch_of(windows: Windows, wanted: int, rng: np.random.Generator, *, tokens: int = 12) -> list[Batch]:
    return list(windows.batches(tokens, rng, events=wanted))


def users_in(batches: list[Batch]) -> Counter[int]:
    """How often each user's window is read."""
    users: Counter[int] = Counter()
    for batch in batches:
        assert batch.users is not None
        users.update(batch.users.tolist())
    return users


def events_in(batches: list[Batch]) -> int:
    """All events but the first of each window, which is no target."""
    return sum(len(batch.items) - len(batch.lengths) for batch in batches)


lengths = st.lists(st.integers(2, 9), min_size=1, max_size=30)
sizes = st.integers(0, 400)


@given(lengths, sizes, st.integers(0, 2**32))
def test_an_epoch_reads_about_as_many_events_as_wanted(lengths: list[int], wanted: int, seed: int) -> None:
    """Fewer than the log has: less than a window fewer. Otherwise whole passes, the nearest number of them."""
    windows = windows_of(lengths)
    batches = epoch_of(windows, wanted, np.random.default_rng(seed))
    users, read = users_in(batches), events_in(batches)
    if 0 < wanted < windows.events:
        assert wanted - max(lengths) < read <= wanted or len(users) == 1
        assert set(users.values()) == {1}, "no window twice"
    else:
        passes = max(1, read // windows.events)
        assert abs(passes * windows.events - wanted) <= windows.events / 2 or passes == 1
        assert users == dict.fromkeys(range(len(lengths)), passes)
        assert read == windows.epoch_events(wanted)


@given(lengths, sizes, st.integers(0, 2**32))
def test_windows_are_whole_whatever_the_size_of_an_epoch(lengths: list[int], wanted: int, seed: int) -> None:
    for batch in epoch_of(windows_of(lengths), wanted, np.random.default_rng(seed)):
        assert batch.users is not None
        assert batch.lengths.tolist() == [lengths[user] for user in batch.users]
        assert batch.items.tolist() == np.repeat(batch.users + 1, batch.lengths).tolist()


@given(lengths, st.integers(0, 2**32))
def test_zero_reads_every_window_once(lengths: list[int], seed: int) -> None:
    windows = windows_of(lengths)
    batches = epoch_of(windows, 0, np.random.default_rng(seed))
    assert users_in(batches) == dict.fromkeys(range(len(lengths)), 1)
    assert events_in(batches) == windows.events == windows.epoch_events(0)


def test_a_part_of_the_log_is_another_one_in_each_epoch() -> None:
    """Every window is read equally often over many epochs, long ones like short ones."""
    windows, rng = windows_of([2, 9] * 20), np.random.default_rng(4)
    epochs = [users_in(epoch_of(windows, windows.events // 4, rng)) for _ in range(400)]
    assert all(epochs[number] != epochs[number + 1] for number in range(30))
    often = sum(epochs, Counter())
    assert often.keys() == set(range(40)), "every window is possible"
    share = np.array([often[user] for user in range(40)]) / 400
    assert 0.15 < share.min() <= share.max() < 0.4, "about a quarter"
    assert abs(share[::2].mean() - share[1::2].mean()) < 0.05


def test_several_passes_are_read_in_one_random_order() -> None:
    """A log of a few short windows fills batches with its passes."""
    windows = windows_of([4] * 30)
    batches = epoch_of(windows, 3 * windows.events, np.random.default_rng(0))
    order = [user for batch in batches if batch.users is not None for user in batch.users.tolist()]
    passes = [order[start : start + 30] for start in (0, 30, 60)]
    assert passes[0] != passes[1] != passes[2] != passes[0]
    assert len(epoch_of(windows_of([2]), 100, np.random.default_rng(0), tokens=20)) == 10


def test_windows_of_a_stride_are_a_part_of_the_log_too() -> None:
    log = sequences_of(*([user] * 40 for user in range(1, 6)))
    windows = training_windows(log, log.offsets[1:], length=8, stride=7)
    batches = epoch_of(windows, 50, np.random.default_rng(1))
    assert len(windows.starts) > 25
    assert 50 - 7 < events_in(batches) <= 50 and len(users_in(batches)) > 1


# --- in training --------------------------------------------------------------------------------------------------


def steps_of(recipe: TrainingSetup, folder: Path) -> tuple[list[TrainingProgress], list[int]]:
    """The progress of a training, and the targets of each epoch: next-item has one for each event that is read."""
    steps: list[TrainingProgress] = []
    _, record = LOG.train(recipe, folder, progress=steps.append)
    return steps, [int(line["positions"]) for line in record.history]


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.9, 1.0, 1.4, 2.6])
def test_progress_reports_the_events_that_were_read(share: float, tmp_path: Path) -> None:
    recipe = recipe_of(epochs=2)
    whole = LOG.windows(recipe).events
    wanted = round(share * whole)
    recipe = recipe_of(epochs=2, epoch_events=wanted)
    steps, targets = steps_of(recipe, tmp_path)
    expected = LOG.windows(recipe).epoch_events(wanted)
    assert {step.total for step in steps} == {expected}
    for epoch in (1, 2):
        done = [step.done for step in steps if step.epoch == epoch and step.scores is None]
        assert done == sorted(set(done)) and done[-1] == targets[epoch - 1]
        assert expected - recipe.model.length <= done[-1] <= expected or done[-1] <= recipe.model.length
    if 0 < wanted < whole:
        assert max(targets) < whole
    else:
        assert targets == [whole * max(1, round(share))] * 2


@pytest.mark.parametrize("share", [0.3, 2.0])
def test_interrupted_and_resumed_equals_uninterrupted(share: float, tmp_path: Path) -> None:
    """The random part of the log is the same one after --resume."""
    recipe = recipe_of(epochs=3, epoch_events=round(share * LOG.windows(recipe_of()).events), tokens=40)

    def stop(step: TrainingProgress) -> None:
        if step.epoch == 2 and 2 * step.done > step.total:
            raise Stopped

    with pytest.raises(Stopped):
        LOG.train(recipe, tmp_path / "stopped", progress=stop)
    resumed, resumed_record = LOG.train(recipe, tmp_path / "stopped")
    whole, record = LOG.train(recipe, tmp_path / "whole")
    assert same_weights(weights_of(resumed), weights_of(whole))
    assert resumed_record.history == record.history and len(record.history) == 3


def test_parts_of_the_log_are_validated_as_often_as_there_are_epochs(tmp_path: Path) -> None:
    """Four epochs of a quarter read as many events as one of the whole log, within a window each."""
    recipe = recipe_of(epochs=1)
    whole = LOG.windows(recipe).events
    quarters = replace(recipe, train=recipe_of(epochs=4, epoch_events=whole // 4).train)
    steps, targets = steps_of(quarters, tmp_path)
    assert len([step for step in steps if step.scores is not None]) == 4
    assert 0 <= 4 * (whole // 4) - sum(targets) <= 4 * recipe.model.length
