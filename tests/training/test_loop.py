from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cycle_logs import N_ITEMS, POPULARITY, Log, cycle, recipe_of, same_weights, sequences_of, weights_of
from settings_tables import objective_settings

from segue.data.batch import Batch
from segue.data.sequences import Sequences
from segue.errors import SettingsError, TrainingError
from segue.evaluation.evaluator import Evaluator, ModelScorer
from segue.models.sequence import SequenceModel
from segue.objective.objective import Objective
from segue.objective.tasks.examples import Examples
from segue.training.distributed.process_group import TorchProcessGroup
from segue.training.loop import TrainingProgress
from segue.training.settings import TrainSettings
from segue.training.state import TrainingRecord
from segue.training.train import STATE_ALL, TrainingSetup, device_of, reason_finished, threads, train_for
from segue.training.windows import training_windows


class Script:
    """A validation that returns given scores and records the weights it gets."""

    def __init__(self, *scores: float) -> None:
        self.scores = scores
        self.weights: list[dict[str, torch.Tensor]] = []

    def __call__(self, model: SequenceModel) -> dict[str, float]:
        self.weights.append(weights_of(model))
        return {"ndcg@10": self.scores[len(self.weights) - 1]}


def test_the_planted_cycle_is_learned(tmp_path: Path) -> None:
    """With repeated items; test_recipes has every recipe."""
    log = Log.of(cycle(150))
    recipe = recipe_of(model={"width": 16}, epochs=14, patience=14, tokens=200, averaging=0.9, learning_rate=2e-2)
    model, _ = log.train_until_perfect(recipe, tmp_path)
    ranks = Evaluator(sequences=log.sequences, counts=log.counts, seen="kept").ranks(
        ModelScorer(model), log.split.cases("test")
    )
    assert len(ranks) == 150
    assert (ranks == 1).mean() > 0.95


def test_early_stop_restores_the_best_epoch(tmp_path: Path) -> None:
    validation = Script(0.1, 0.5, 0.5, 0.4)
    model, state = Log.of(cycle()).fit(recipe_of(epochs=50, patience=2), tmp_path / "state", validation)
    assert len(validation.weights) == 4, "two epochs without a better score; the first has an equal one"
    assert state.record.best_epoch == 2 and state.record.best_score == 0.5
    assert same_weights(weights_of(model), validation.weights[1])
    assert not same_weights(validation.weights[1], validation.weights[3])
    assert not model.training
    assert [line["ndcg@10"] for line in state.record.history] == [0.1, 0.5, 0.5, 0.4]
    assert [line["epoch"] for line in state.record.history] == [1, 2, 3, 4]


def test_patience_is_counted_from_the_last_better_epoch(tmp_path: Path) -> None:
    validation = Script(0.1, 0.05, 0.2, 0.1, 0.3, 0.2, 0.1)
    _, state = Log.of(cycle(20)).fit(recipe_of(epochs=50, patience=2), tmp_path / "state", validation)
    assert state.record.epoch == 7 and state.record.best_epoch == 5


def test_with_scores_of_zero_the_first_epoch_is_best(tmp_path: Path) -> None:
    _, state = Log.of(cycle(20)).fit(recipe_of(epochs=9, patience=3), tmp_path / "state", Script(0, 0, 0, 0))
    assert state.record.epoch == 4 and state.record.best_epoch == 1


def test_without_validation_the_last_epoch_is_best(tmp_path: Path) -> None:
    log = Log.of(cycle(20))
    model, state = log.fit(recipe_of(epochs=3, patience=1, averaging=0), tmp_path / "state", None)
    assert state.record.epoch == state.record.best_epoch == 3
    validated, _ = log.fit(recipe_of(epochs=3, averaging=0), tmp_path / "other", Script(0.1, 0.2, 0.3))
    assert same_weights(weights_of(model), weights_of(validated))


def test_without_averaging_the_last_weights_are_validated_and_saved(tmp_path: Path) -> None:
    """Validation gets the weights after the last step, and these are the result. Averaging changes no step."""
    log, weights_by_step = Log.of(cycle()), []

    class Recorder(Objective):
        def loss(self, model: SequenceModel, *rest: Any) -> torch.Tensor:
            weights_by_step.append(weights_of(model))
            return super().loss(model, *rest)

    validated = {}
    for averaging in (0.0, 0.9):
        validation, recipe = Script(0.1, 0.2), recipe_of(epochs=2, averaging=averaging)
        model, _ = log.fit(
            recipe, tmp_path / f"{averaging}", validation, objective=Recorder(recipe.objective, log.counts)
        )
        assert same_weights(weights_of(model), validation.weights[1])
        validated[averaging] = validation.weights
    half = len(weights_by_step) // 2
    assert all(
        same_weights(one, other) for one, other in zip(weights_by_step[:half], weights_by_step[half:], strict=True)
    )
    second_epoch = half // 2
    assert same_weights(weights_by_step[second_epoch], validated[0.0][0]), (
        "the second epoch starts from the validated weights"
    )
    assert not same_weights(weights_by_step[second_epoch], validated[0.9][0])


def test_every_user_once_per_epoch_in_a_new_order(tmp_path: Path) -> None:
    """Each user has a unique first item; training uses all but the last two events."""
    users = [[user, *[40] * length] for user, length in enumerate([3, 4, 5, 6] * 9, start=1)]
    log, batches = Log.of(sequences_of(*users), n_items=40), []

    class Recorder(Objective):
        def examples(self, batch: Batch, rng: np.random.Generator) -> Examples:
            batches.append(batch)
            return super().examples(batch, rng)

    recipe = recipe_of(epochs=2, tokens=30)
    _, state = log.fit(recipe, tmp_path / "state", None, objective=Recorder(recipe.objective, log.counts))
    epochs: list[list[int]] = [[], []]
    for index, batch in enumerate(batches):
        assert batch.lengths.sum() <= 30
        epochs[index >= len(batches) // 2] += [item for item in batch.items.tolist() if item != 40]
    assert all(sorted(epoch) == list(range(1, 37)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    positions = sum(length - 2 for length in [3, 4, 5, 6] * 9)
    assert [line["positions"] for line in state.record.history] == [positions] * 2


def test_windows_are_the_newest_events_of_users_with_two() -> None:
    """Length 3 + 1; users with one, two, three, four and seven training events."""
    log = sequences_of([1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7])
    windows = training_windows(log, log.offsets[1:], length=4)
    events = [log.items[start:end].tolist() for start, end in zip(windows.starts, windows.ends, strict=True)]
    assert events == [[1, 2], [1, 2, 3], [1, 2, 3, 4], [4, 5, 6, 7]]
    assert windows.events == 1 + 2 + 3 + 3


def test_with_a_stride_older_windows_come_before_the_newest() -> None:
    """Users of two, five and nine events; windows of four, three apart. A window of one event has no target."""
    log = sequences_of([1], [1, 2], [1, 2, 3, 4, 5], list(range(1, 10)))
    windows = training_windows(log, log.offsets[1:], length=4, stride=3)
    events = [log.items[start:end].tolist() for start, end in zip(windows.starts, windows.ends, strict=True)]
    assert events == [[1, 2], [1, 2, 3, 4], [2, 3, 4, 5], [1, 2, 3, 4], [3, 4, 5, 6], [6, 7, 8, 9]]
    newest = training_windows(log, log.offsets[1:] - 1, length=4, stride=100)
    events = [log.items[start:end].tolist() for start, end in zip(newest.starts, newest.ends, strict=True)]
    assert events == [[1, 2, 3, 4], [1, 2, 3, 4], [5, 6, 7, 8]], "the last event of each user is held out"


def test_short_users_under_split_last() -> None:
    """One event: no pair; two: a training pair; three: a validation and a test case, but no training pair."""
    log = Log.of(sequences_of([1], [2, 3], [4, 5, 6], [7, 8, 9, 10]), n_items=10)
    windows = training_windows(log.sequences, log.split.train_end, length=9)
    events = [log.sequences.items[start:end].tolist() for start, end in zip(windows.starts, windows.ends, strict=True)]
    assert events == [[2, 3], [7, 8]]
    assert log.sequences.items[log.split.cases("valid").targets].tolist() == [5, 9]
    assert log.sequences.items[log.split.cases("test").targets].tolist() == [6, 10]


def test_a_log_without_training_or_validation_events_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="No user has two events"):
        Log.of(sequences_of([1, 2, 3], [4, 5, 6])).train(recipe_of(), tmp_path)
    with pytest.raises(TrainingError, match="No event is left for validation"):
        Log.of(sequences_of([1, 2], [4, 5])).train(recipe_of(), tmp_path)


def test_a_decay_ends_with_the_planned_epochs(tmp_path: Path) -> None:
    """Without warm-up, the last of n steps has 1/n of the learning rate."""
    log, recipe = Log.of(cycle()), recipe_of(epochs=2, warmup=0, decay=1.0, learning_rate=0.8, tokens=10_000)
    _, state = log.fit(recipe, tmp_path / "state", None)
    assert state.record.step == 2 and state.adamw.param_groups[0]["lr"] == pytest.approx(0.4)
    later = recipe_of(epochs=4, warmup=0, decay=1.0, learning_rate=0.8, tokens=10_000)
    _, state = log.fit(later, tmp_path / "state", None)
    assert state.adamw.param_groups[0]["lr"] == pytest.approx(0.2), "the fourth of four steps"


def test_without_decay_the_learning_rate_does_not_depend_on_the_number_of_epochs(tmp_path: Path) -> None:
    log, short, long = Log.of(cycle()), Script(0.1, 0.2), Script(0.1, 0.2, 0.3, 0.4, 0.5)
    _, short_run = log.fit(recipe_of(epochs=2), tmp_path / "short", short)
    _, whole = log.fit(recipe_of(epochs=5), tmp_path / "long", long)
    assert all(same_weights(one, other) for one, other in zip(short.weights, long.weights[:2], strict=True))
    assert short_run.record.history == whole.record.history[:2]


@pytest.mark.parametrize("objective", [{}, POPULARITY], ids=["softmax", "sampled-softmax"])
def test_the_seed_decides_everything(objective: dict[str, Any], tmp_path: Path) -> None:
    log = Log.of(cycle(20))
    recipes = [recipe_of(objective=objective, seed=seed) for seed in (3, 3, 4)]
    runs = [log.train(recipe, tmp_path / f"{run}") for run, recipe in enumerate(recipes)]
    weights, histories = [weights_of(model) for model, _ in runs], [progress.history for _, progress in runs]
    assert same_weights(weights[0], weights[1]) and histories[0] == histories[1]
    assert not same_weights(weights[0], weights[2]) and histories[0] != histories[2]


def test_global_random_states_are_unchanged_and_without_effect(tmp_path: Path) -> None:
    log, weights = Log.of(cycle(20)), []
    for run, seed in enumerate((1, 2)):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
            before = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
            model, _ = log.train(recipe_of(objective=POPULARITY), tmp_path / f"{run}")
            assert torch.equal(torch.get_rng_state(), before[0])
            assert random.getstate() == before[1] and repr(np.random.get_state()) == before[2]
            weights.append(weights_of(model))
    assert same_weights(*weights)


def with_permuted_last_items(log: Sequences, seed: int = 5) -> Sequences:
    """A log whose users' last items are permuted among users."""
    items, last = log.items.copy(), log.offsets[1:] - 1
    items[last] = items[np.random.default_rng(seed).permutation(last)]
    assert (items != log.items).sum() > len(last) / 2
    return Sequences(offsets=log.offsets, items=items, times=log.times)


def test_the_test_part_has_no_effect_on_training(tmp_path: Path) -> None:
    """No weight, best epoch or line of the history depends on the users' last items."""
    log = cycle()
    original, original_progress = Log.of(log).train(recipe_of(), tmp_path / "true", seen="excluded")
    other, other_progress = Log.of(with_permuted_last_items(log)).train(
        recipe_of(), tmp_path / "other", seen="excluded"
    )
    assert same_weights(weights_of(original), weights_of(other))
    assert original_progress.history == other_progress.history
    assert original_progress.best_epoch == other_progress.best_epoch


def test_progress_is_reported_at_every_step_and_after_every_epoch(tmp_path: Path) -> None:
    steps: list[TrainingProgress] = []
    _, progress = Log.of(cycle()).train(recipe_of(epochs=2), tmp_path, progress=steps.append)
    ends = [step for step in steps if step.scores is not None]
    assert [step.epoch for step in ends] == [1, 2]
    assert [step.scores for step in ends] == [
        {name: line[name] for name in ("ndcg@10", "hit@10")} for line in progress.history
    ]
    assert [step.loss for step in ends] == [line["loss"] for line in progress.history]
    within_epochs = [step for step in steps if step.scores is None]
    assert {step.epoch for step in within_epochs} == {1, 2} and all(step.epochs == 2 for step in steps)
    for epoch in (1, 2):
        done = [step.done for step in within_epochs if step.epoch == epoch]
        assert done == sorted(set(done)) and done[-1] == within_epochs[0].total == progress.history[0]["positions"]
    assert all(step.tokens_per_second > 0 and step.seconds_left >= 0 for step in steps)
    assert within_epochs[0].seconds_left > 0 and steps[-1].seconds_left == 0


def test_history_has_only_reproducible_values(tmp_path: Path) -> None:
    _, progress = Log.of(cycle(20)).train(recipe_of(epochs=2), tmp_path)
    assert [set(line) for line in progress.history] == [{"epoch", "loss", "positions", "ndcg@10", "hit@10"}] * 2
    assert len(progress.seconds) == 2


class NonFiniteLoss(Objective):
    """An objective whose loss at a given step is not finite."""

    def __init__(self, at: int, value: float, counts: np.ndarray) -> None:
        super().__init__(objective_settings(), counts)
        self.steps_left, self.value = at, value

    def loss(self, *arguments: Any) -> torch.Tensor:
        self.steps_left -= 1
        return super().loss(*arguments) * (self.value if self.steps_left == 0 else 1)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_loss_stops_and_keeps_the_last_saved_state(value: float, tmp_path: Path) -> None:
    log, recipe, file = Log.of(cycle()), recipe_of(epochs=3), tmp_path / "state"
    validation = Script(0.1, 0.2, 0.3)
    batches = len(list(log.windows(recipe).batches(recipe.train.tokens, np.random.default_rng(0))))
    assert batches > 2
    with pytest.raises(TrainingError, match=f"{value} in epoch 2") as error:
        log.fit(recipe, file, validation, objective=NonFiniteLoss(batches + 2, value, log.counts))
    assert "train.learning_rate" in str(error.value) and "--resume" in str(error.value)
    resumed, state = log.fit(recipe, file, validation)
    assert state.record.epoch == 3
    whole, _ = log.fit(recipe, tmp_path / "whole", Script(0.1, 0.2, 0.3))
    assert same_weights(weights_of(resumed), weights_of(whole)), "the saved state is that of epoch 1"


def test_no_state_is_saved_before_the_end_of_the_first_epoch(tmp_path: Path) -> None:
    log = Log.of(cycle())
    with pytest.raises(TrainingError, match="epoch 1"):
        log.fit(recipe_of(), tmp_path / "state", None, objective=NonFiniteLoss(1, float("nan"), log.counts))
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("validated", [True, False], ids=["validated", "every event"])
def test_a_model_that_diverges_in_the_last_step_of_an_epoch_is_not_saved(validated: bool, tmp_path: Path) -> None:
    """One step per epoch, far too large: its weights first show in the next epoch's loss."""
    log = Log.of(cycle())

    def train(recipe: TrainingSetup) -> SequenceModel:
        if validated:
            return log.train(recipe, tmp_path)[0]
        state, ends = tmp_path / STATE_ALL, log.sequences.offsets[1:]
        return train_for(recipe, log.sequences, ends, N_ITEMS, epochs=4, state_file=state)[0]

    with pytest.raises(TrainingError, match=r"train\.learning_rate"):
        train(recipe_of(epochs=4, tokens=10_000, learning_rate=1e38, warmup=0))
    model = train(recipe_of(epochs=4, tokens=10_000))
    assert all(torch.isfinite(weight).all() for weight in model.state_dict().values())


def test_train_for_uses_every_event(tmp_path: Path) -> None:
    """Item 11 is always last: cold in training with validation, but in training on every event."""
    log = Log.of(sequences_of(*([1, 2, 3, 4, 11] for _ in range(20))))
    assert log.counts[11] == 0
    recipe = recipe_of(epochs=9, model={"dropout": 0.0})
    steps: list[TrainingProgress] = []
    state, ends = tmp_path / STATE_ALL, log.sequences.offsets[1:]
    with_progress = replace(recipe, progress=steps.append)
    model, counts = train_for(with_progress, log.sequences, ends, 11, epochs=2, state_file=state)
    assert counts.tolist() == [0, 20, 20, 20, 20, 0, 0, 0, 0, 0, 0, 20]
    assert steps[-1].epoch == steps[-1].epochs == 2 and steps[-1].total == 20 * 4
    assert not model.training and not any(weight.requires_grad for weight in model.parameters())
    _, training_counts = train_for(recipe, log.sequences, ends - 1, 11, epochs=1, state_file=tmp_path / "fewer")
    assert training_counts.tolist() == [0, 20, 20, 20, 20, 0, 0, 0, 0, 0, 0, 0]


def test_a_trained_model_is_in_eval_mode_without_gradients(tmp_path: Path) -> None:
    model, _ = Log.of(cycle(20)).train(recipe_of(epochs=1), tmp_path)
    assert not model.training and not any(weight.requires_grad for weight in model.parameters())


@pytest.fixture
def two_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_the_number_of_threads_is_restored(tmp_path: Path) -> None:
    threads_in_training: list[int] = []

    def watch(_: TrainingProgress) -> None:
        threads_in_training.append(torch.get_num_threads())

    Log.of(cycle(20)).train(recipe_of(epochs=1, threads=1), tmp_path, progress=watch)
    assert set(threads_in_training) == {1} and torch.get_num_threads() == 2
    with pytest.raises(ZeroDivisionError), threads(1):
        _ = 1 / 0
    assert torch.get_num_threads() == 2
    with threads(0):
        assert torch.get_num_threads() == 2


def test_a_missing_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SettingsError, match=r"train\.device is 'cuda'.*'cpu' or 'auto'"):
        device_of(TrainSettings(device="cuda"))
    assert device_of(TrainSettings(device="auto")).type == device_of(TrainSettings(device="cpu")).type == "cpu"


def test_every_process_needs_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for processes_per_machine, rank in (("2", "1"), ("4", "3")):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes_per_machine)
        monkeypatch.setenv("LOCAL_RANK", rank)
        if processes_per_machine == "2":
            assert device_of(TrainSettings(), TorchProcessGroup(1, 4)) == torch.device("cuda:1")
        else:
            with pytest.raises(SettingsError, match=r"4 processes on a machine with 2 CUDA devices.*at most 2"):
                device_of(TrainSettings(), TorchProcessGroup(3, 4))
    assert device_of(TrainSettings(device="cpu"), TorchProcessGroup(3, 4)).type == "cpu"


def test_reasons_why_training_is_finished() -> None:
    settings = TrainSettings(epochs=10, patience=3)
    assert reason_finished(TrainingRecord(epoch=4, best_epoch=2), settings) is None
    assert "raise train.patience" in (reason_finished(TrainingRecord(epoch=5, best_epoch=2), settings) or "")
    assert "raise train.epochs" in (reason_finished(TrainingRecord(epoch=10, best_epoch=9), settings) or "")
