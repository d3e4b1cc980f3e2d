"""`train.minutes` and the timing of a plan, under a clock that moves by a second at each step."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from command_line import CommandLine
from cycle_logs import Log, cycle, recipe_of, same_weights, sequences_of, weights_of
from hypothesis import given
from hypothesis import strategies as st
from step_clock import StepClock, step_clock

import segue
from segue.counts.features import ItemCounts
from segue.counts.settings import FittedCountsSettings
from segue.data.split import Cases
from segue.errors import TrainingError
from segue.evaluation.baselines import BASELINES
from segue.evaluation.evaluator import Evaluator, ModelScorer
from segue.evaluation.settings import EvaluateSettings
from segue.models.sequence import SequenceModel
from segue.training import loop, timing
from segue.training.loop import LATE, out_of_time
from segue.training.optimiser import set_learning_rate
from segue.training.state import TrainingRecord, TrainingState
from segue.training.timing import timed
from segue.training.train import TrainingSetup, reason_finished, validation_cases

LOG = Log.of(cycle())
RATE = 0.8


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StepClock:
    return step_clock(monkeypatch)


def limited(seconds: float, **train: Any) -> TrainingSetup:
    """A setup that may train for so many seconds, with a step size that falls to 0 by then."""
    options = {"epochs": 50, "patience": 50, "warmup": 0, "decay": 1.0, "learning_rate": RATE, **train}
    return recipe_of(minutes=seconds / 60, **options)


def steps_of_an_epoch(recipe: TrainingSetup) -> int:
    return len(list(LOG.windows(recipe).batches(recipe.train.tokens, np.random.default_rng(0))))


STEPS = steps_of_an_epoch(recipe_of(tokens=60))


def rising() -> Callable[[SequenceModel], dict[str, float]]:
    """A validation that is better after each epoch and takes no time."""
    scores = iter(np.linspace(0.01, 0.9, 60).tolist())
    return lambda _: {"ndcg@10": next(scores)}


def last_step_size(state: TrainingState) -> float:
    return float(state.adamw.param_groups[0]["lr"])


def test_the_log_has_epochs_of_several_steps() -> None:
    assert STEPS > 6, "or the tests below show little"


@pytest.mark.parametrize(
    ("epochs_of_time", "epochs"), [(0.05, 1), (0.6, 1), (1.3, 1), (1.7, 2), (2.3, 2), (2.7, 3), (4.0, 4)]
)
def test_training_ends_after_the_epoch_that_leaves_less_than_half_an_epoch(
    epochs_of_time: float, epochs: int, clock: StepClock, tmp_path: Path
) -> None:
    began, seconds = clock.now, epochs_of_time * STEPS
    model, state = LOG.fit(limited(seconds, tokens=60), tmp_path / "state", rising())
    assert state.record.epoch == state.record.best_epoch == epochs
    assert len(state.record.history) == len(state.record.seconds) == epochs
    assert state.record.elapsed == clock.now - began <= max(1, seconds + 1)
    assert not model.training


@given(st.floats(0.01, 9), st.integers(1, 6))
def test_no_epoch_begins_with_less_than_half_its_time(epochs_of_time: float, epochs: int) -> None:
    """Whatever the epochs so far took on average."""
    record = TrainingRecord(epoch=epochs, elapsed=60.0 * epochs, limit=60.0 * epochs_of_time)  # one minute an epoch
    assert out_of_time(record) == (epochs_of_time - epochs < 0.5)
    assert not out_of_time(TrainingRecord(epoch=epochs, elapsed=60.0 * epochs)), "no limit"


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("epochs_of_time", [0.6, 1.7, 2.7, 4.0])
def test_the_step_size_is_near_zero_at_the_end_of_the_time(epochs_of_time: float, tmp_path: Path) -> None:
    """A time that ends within an epoch cuts it, so the last step has almost no step size."""
    seconds = epochs_of_time * STEPS
    _, state = LOG.fit(limited(seconds, tokens=60), tmp_path / "state", rising())
    assert 0 <= last_step_size(state) <= RATE * (2 / seconds + LATE)
    whole = LOG.windows(limited(seconds, tokens=60)).events
    cut = [line["positions"] < whole for line in state.record.history]
    assert cut == [False] * (len(cut) - 1) + [epochs_of_time % 1 > 0]


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    "recipe",
    [limited(4 * STEPS, epochs=100, tokens=60), limited(100 * STEPS, epochs=4, tokens=60)],
    ids=["time", "epochs"],
)
def test_the_step_size_falls_until_the_end_that_comes_first(recipe: TrainingSetup, tmp_path: Path) -> None:
    """Four epochs, as there is time for no more, or as no more are wanted; half of the step size is left after two."""
    sizes: list[float] = []

    def recorded(adamw: torch.optim.AdamW, *arguments: Any, **options: Any) -> None:
        set_learning_rate(adamw, *arguments, **options)
        sizes.append(float(adamw.param_groups[0]["lr"]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "set_learning_rate", recorded)
        _, state = LOG.fit(recipe, tmp_path / "state", rising())
    assert state.record.epoch == 4 and len(sizes) == 4 * STEPS
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == RATE and sizes[2 * STEPS] == pytest.approx(RATE / 2, abs=RATE * 2 * LATE)
    assert sizes[-1] <= RATE * (2 / (4 * STEPS) + LATE)


@pytest.mark.usefixtures("clock")
def test_without_decay_the_step_size_stays(tmp_path: Path) -> None:
    _, state = LOG.fit(limited(2.7 * STEPS, decay=0.0, tokens=60), tmp_path / "state", rising())
    assert state.record.epoch == 3 and last_step_size(state) == RATE


def test_validation_is_a_part_of_the_time(clock: StepClock, tmp_path: Path) -> None:
    """As slow as training, it leaves half of the epochs."""
    scores = rising()

    def slow(model: SequenceModel) -> dict[str, float]:
        clock.now += STEPS
        return scores(model)

    _, state = LOG.fit(limited(6 * STEPS, tokens=60), tmp_path / "state", slow)
    assert state.record.epoch == 3
    assert state.record.elapsed == 6 * STEPS and state.record.seconds == [STEPS] * 3, "epochs' seconds are of training"


@pytest.mark.usefixtures("clock")
def test_without_minutes_there_is_no_limit(tmp_path: Path) -> None:
    _, state = LOG.fit(limited(0, epochs=5, tokens=60), tmp_path / "state", rising())
    assert state.record.epoch == 5 and state.record.elapsed == 5 * STEPS


@pytest.mark.parametrize("step", [0.0, 0.37, 1.0])
def test_training_that_time_does_not_cut_does_not_depend_on_the_clock(
    step: float, clock: StepClock, tmp_path: Path
) -> None:
    """Results are repeatable bit for bit, whatever the speed of the machine."""
    unlimited, _ = LOG.fit(limited(0, epochs=3, tokens=60), tmp_path / "unlimited", rising())
    clock.step = step
    model, state = LOG.fit(limited(3.4 * STEPS, epochs=3, tokens=60), tmp_path / "limited", rising())
    assert state.record.epoch == 3 and state.record.elapsed == pytest.approx(3 * STEPS * step)
    assert same_weights(weights_of(model), weights_of(unlimited))


def test_resumed_training_remembers_the_time_that_it_took(clock: StepClock, tmp_path: Path) -> None:
    """Time between the two trainings does not count, and more time continues."""
    few = limited(2.2 * STEPS, tokens=60)
    _, state = LOG.fit(few, tmp_path / "state", rising())
    assert state.record.epoch == 2
    clock.now += 1e6
    _, state = LOG.fit(few, tmp_path / "state", rising())
    assert state.record.epoch == 2, "nothing is left"
    assert "time is over: raise train.minutes" in (reason_finished(state.record, few.train) or "")
    more = limited(4.2 * STEPS, tokens=60)
    _, state = LOG.fit(more, tmp_path / "state", rising())
    assert state.record.epoch == 4 and last_step_size(state) <= RATE * (3 / (4.2 * STEPS) + LATE)


def test_resume_after_the_time_is_over(line: CommandLine, cycle_data: Path, quick_recipe: Path) -> None:
    """By the real clock: twelve epochs do not fit into a few milliseconds."""
    limit = ("--set", "train.epochs=12", "--set", "train.patience=12", "--set", "train.minutes=0.0001")
    body = line.answers("train", cycle_data, "--out", "run", "--recipe", quick_recipe, *limit)
    assert 1 <= body["training"]["epochs"] < 12
    says = ("run is complete", "its time is over: raise train.minutes")
    line.refuses("train", cycle_data, "--out", "run", "--resume", says=says)
    line.refuses("train", cycle_data, "--out", "run", "--resume", "--set", "train.minutes=0.00005", says=says[:1])
    body = line.answers("train", cycle_data, "--out", "run", "--resume", "--minutes", "30")
    assert body["training"]["epochs"] == 12
    assert "train.epochs" in line.refuses("train", cycle_data, "--out", "run", "--resume", says=("12 epochs are done",))
    assert isinstance(segue.load("run"), segue.Recommender)


# --- the timing of a plan -----------------------------------------------------------------------------------------

ALIKE = Log.of(sequences_of(*([1 + user % 11] * 8 for user in range(60))))


def recipe_of_equal_steps() -> TrainingSetup:
    """Twelve steps of five users, each with six training events."""
    return recipe_of(tokens=30, epochs=40, patience=40)


@pytest.mark.parametrize("seconds", [2.0, 5.0, 1000.0])
def test_an_epoch_is_extrapolated_from_a_few_steps(
    seconds: float, clock: StepClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes a second: no more than the time that is allowed, or than an epoch, is spent."""

    def validation(*_: object, most: int) -> Callable[[SequenceModel], dict[str, float]]:
        def validate(_: SequenceModel) -> dict[str, float]:
            clock.now += most / 10
            return {}

        return validate

    monkeypatch.setattr(timing, "validation", validation)
    monkeypatch.setattr(timing, "SECONDS", seconds)
    monkeypatch.setattr(timing, "CASES", 20)
    began = clock.now
    speed = timed(recipe_of_equal_steps(), ALIKE.whole, None, seen="kept")
    assert speed.training == pytest.approx(12)
    assert speed.validation == pytest.approx(20 / 10 * 60 / 20), "twenty of the sixty cases are timed"
    assert speed.report == 0, "measuring takes no time on this clock"
    assert speed.epoch == speed.training + speed.validation
    assert clock.now - began == pytest.approx(min(seconds, 12) + 2)


@pytest.mark.usefixtures("clock")
def test_an_epoch_of_one_step_is_timed() -> None:
    speed = timed(recipe_of(tokens=10_000), ALIKE.whole, None, seen="kept")
    assert speed.training == pytest.approx(1) and speed.validation == 0


@pytest.mark.usefixtures("clock")
def test_the_size_of_an_epoch_is_a_part_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "SECONDS", 3.0)
    recipe = recipe_of_equal_steps()
    for events, steps in ((0, 12), (150, 6), (600, 24)):
        sized = replace(recipe, train=msgspec.structs.replace(recipe.train, epoch_events=events))
        assert timed(sized, ALIKE.whole, None, seen="kept").training == pytest.approx(steps)


def test_timing_writes_no_file_and_measures_few_cases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of each baseline, as of the model."""
    measured: list[int] = []
    measure_of = Evaluator.measure

    def measure(self: Evaluator, scorer: Any, cases: Cases, *rest: Any, **options: Any) -> Any:
        measured.append(len(cases))
        return measure_of(self, scorer, cases, *rest, **options)

    monkeypatch.setattr(Evaluator, "measure", measure)
    monkeypatch.setattr(timing, "CASES", 7)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    split, limits = LOG.whole, FittedCountsSettings().limits
    assert limits is not None
    pairs = ItemCounts.of(split.sequences, split.split.train_end, split.n_items, limits)
    speed = timed(recipe_of(), split, pairs, seen="kept")
    assert min(speed.training, speed.validation, speed.report) > 0
    assert measured[0] == 7 and measured.count(7) == 2 + len(BASELINES), "and once the validation"
    assert list(tmp_path.iterdir()) == []


def test_timing_refuses_what_training_refuses() -> None:
    with pytest.raises(TrainingError, match="No user has two events"):
        timed(recipe_of(), Log.of(sequences_of([1, 2, 3], [4, 5, 6])).whole, None, seen="kept")
    with pytest.raises(TrainingError, match="No event is left for validation"):
        timed(recipe_of(), Log.of(sequences_of([1, 2], [4, 5])).whole, None, seen="kept")


@given(st.integers(1, 300), st.integers(1, 300))
def test_a_few_cases_are_spread_over_all(n_cases: int, most: int) -> None:
    rows = np.arange(n_cases)
    cases = Cases(users=rows, starts=rows * 3, targets=rows * 3 + 2)
    few = cases.spread(most)
    assert len(few) == min(n_cases, most)
    assert (np.diff(few.users) > 0).all() and (few.starts == few.users * 3).all()
    assert (few.targets == few.starts + 2).all()
    assert few.users[0] == 0 and (most == 1 or few.users[-1] == n_cases - 1)
    if most > 1:
        assert np.diff(few.users).max(initial=1) <= np.ceil(n_cases / (len(few) - 1 or 1))


def test_some_validation_cases_choose_the_epoch(tmp_path: Path) -> None:
    """One epoch, by five cases: the score is that of the returned model on them."""
    recipe = replace(recipe_of(epochs=1), evaluate=EvaluateSettings(cases=5))
    model, record = LOG.train(recipe, tmp_path)
    five = validation_cases(LOG.split, recipe.evaluate).spread(5)
    ranks = Evaluator.of_model(model, LOG.whole, seen="kept").ranks(ModelScorer(model), five)
    assert len(ranks) == 5 and record.history[0]["hit@10"] == pytest.approx(float((ranks <= 10).mean()))
