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
    """A validation that returns given scores and keeps the weights it was shown."""

    def __init__(self, *scores: float) -> None:
        self.scores = scores
        self.shown: list[dict[str, torch.Tensor]] = []

    def __call__(self, model: SequenceModel) -> dict[str, float]:
        self.shown.append(weights_of(model))
        return {"ndcg@10": self.scores[len(self.shown) - 1]}


def test_the_planted_cycle_is_learned(tmp_path: Path) -> None:
    """With repeats; of every builder see test_recipes."""
    log = Log.of(cycle(150))
    recipe = recipe_of(model={"width": 16}, epochs=14, patience=14, tokens=200, averaging=0.9, learning_rate=2e-2)
    model, _ = log.learned(recipe, tmp_path)
    ranks = Evaluator(sequences=log.sequences, counts=log.counts, seen="kept").ranks(
        ModelScorer(model), log.split.cases("test")
    )
    assert len(ranks) == 150
    assert (ranks == 1).mean() > 0.95


def test_early_stop_restores_the_best_epoch(tmp_path: Path) -> None:
    validation = Script(0.1, 0.5, 0.5, 0.4)
    model, state = Log.of(cycle()).fitted(recipe_of(epochs=50, patience=2), tmp_path / "state", validation)
    assert len(validation.shown) == 4, "two epochs without a better score, of which the first was as good"
    assert state.record.best_epoch == 2 and state.record.best_score == 0.5
    assert same_weights(weights_of(model), validation.shown[1])
    assert not same_weights(validation.shown[1], validation.shown[3])
    assert not model.training
    assert [line["ndcg@10"] for line in state.record.history] == [0.1, 0.5, 0.5, 0.4]
    assert [line["epoch"] for line in state.record.history] == [1, 2, 3, 4]


def test_patience_is_counted_from_the_last_better_epoch(tmp_path: Path) -> None:
    validation = Script(0.1, 0.05, 0.2, 0.1, 0.3, 0.2, 0.1)
    _, state = Log.of(cycle(20)).fitted(recipe_of(epochs=50, patience=2), tmp_path / "state", validation)
    assert state.record.epoch == 7 and state.record.best_epoch == 5


def test_a_score_of_nothing_still_chooses_an_epoch(tmp_path: Path) -> None:
    _, state = Log.of(cycle(20)).fitted(recipe_of(epochs=9, patience=3), tmp_path / "state", Script(0, 0, 0, 0))
    assert state.record.epoch == 4 and state.record.best_epoch == 1


def test_without_validation_every_epoch_is_used_and_the_last_kept(tmp_path: Path) -> None:
    log = Log.of(cycle(20))
    model, state = log.fitted(recipe_of(epochs=3, patience=1, averaging=0), tmp_path / "state", None)
    assert state.record.epoch == state.record.best_epoch == 3
    validated, _ = log.fitted(recipe_of(epochs=3, averaging=0), tmp_path / "other", Script(0.1, 0.2, 0.3))
    assert same_weights(weights_of(model), weights_of(validated))


def test_averaging_of_nothing_keeps_the_last_weights(tmp_path: Path) -> None:
    """Validation is shown what the last step made, and that is what is kept. Averaging changes no step."""
    log, seen = Log.of(cycle()), []

    class Watched(Objective):
        def loss(self, model: SequenceModel, *rest: Any) -> torch.Tensor:
            seen.append(weights_of(model))
            return super().loss(model, *rest)

    shown = {}
    for averaging in (0.0, 0.9):
        validation, recipe = Script(0.1, 0.2), recipe_of(epochs=2, averaging=averaging)
        model, _ = log.fitted(
            recipe, tmp_path / f"{averaging}", validation, objective=Watched(recipe.objective, log.counts)
        )
        assert same_weights(weights_of(model), validation.shown[1])
        shown[averaging] = validation.shown
    half = len(seen) // 2
    assert all(same_weights(one, other) for one, other in zip(seen[:half], seen[half:], strict=True))
    second_epoch = half // 2
    assert same_weights(seen[second_epoch], shown[0.0][0]), "what the second epoch began with is what was validated"
    assert not same_weights(seen[second_epoch], shown[0.9][0])


def test_every_user_once_an_epoch_in_another_order_each_time(tmp_path: Path) -> None:
    """Each user has an item of its own, first in its history; all but the last two of its events are learned from."""
    users = [[user, *[40] * length] for user, length in enumerate([3, 4, 5, 6] * 9, start=1)]
    log, met = Log.of(sequences_of(*users), n_items=40), []

    class Watched(Objective):
        def examples(self, batch: Batch, rng: np.random.Generator) -> Examples:
            met.append(batch)
            return super().examples(batch, rng)

    recipe = recipe_of(epochs=2, tokens=30)
    _, state = log.fitted(recipe, tmp_path / "state", None, objective=Watched(recipe.objective, log.counts))
    epochs: list[list[int]] = [[], []]
    for place, batch in enumerate(met):
        assert batch.lengths.sum() <= 30
        epochs[place >= len(met) // 2] += [item for item in batch.items.tolist() if item != 40]
    assert all(sorted(epoch) == list(range(1, 37)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    supervised = sum(length - 2 for length in [3, 4, 5, 6] * 9)
    assert [line["positions"] for line in state.record.history] == [supervised] * 2


def test_windows_are_the_newest_events_of_users_with_two() -> None:
    """Length 3 + 1; users of one, two, three, four and seven training events."""
    log = sequences_of([1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7])
    windows = training_windows(log, log.offsets[1:], length=4)
    found = [log.items[start:end].tolist() for start, end in zip(windows.starts, windows.ends, strict=True)]
    assert found == [[1, 2], [1, 2, 3], [1, 2, 3, 4], [4, 5, 6, 7]]
    assert windows.events == 1 + 2 + 3 + 3


def test_with_a_stride_older_windows_come_before_the_newest() -> None:
    """Users of two, five and nine events; windows of four, three apart. A window of one event teaches nothing."""
    log = sequences_of([1], [1, 2], [1, 2, 3, 4, 5], list(range(1, 10)))
    windows = training_windows(log, log.offsets[1:], length=4, stride=3)
    found = [log.items[start:end].tolist() for start, end in zip(windows.starts, windows.ends, strict=True)]
    assert found == [[1, 2], [1, 2, 3, 4], [2, 3, 4, 5], [1, 2, 3, 4], [3, 4, 5, 6], [6, 7, 8, 9]]
    newest = training_windows(log, log.offsets[1:] - 1, length=4, stride=100)
    found = [log.items[start:end].tolist() for start, end in zip(newest.starts, newest.ends, strict=True)]
    assert found == [[1, 2, 3, 4], [1, 2, 3, 4], [5, 6, 7, 8]], "the last event of each user was not to be seen"


def test_short_users_under_split_last() -> None:
    """One event: nothing to learn; two: a training pair; three: a validation and a test case, but no pair."""
    log = Log.of(sequences_of([1], [2, 3], [4, 5, 6], [7, 8, 9, 10]), n_items=10)
    windows = training_windows(log.sequences, log.split.train_end, length=9)
    found = [log.sequences.items[start:end].tolist() for start, end in zip(windows.starts, windows.ends, strict=True)]
    assert found == [[2, 3], [7, 8]]
    assert log.sequences.items[log.split.cases("valid").targets].tolist() == [5, 9]
    assert log.sequences.items[log.split.cases("test").targets].tolist() == [6, 10]


def test_nothing_to_learn_from_is_said(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="No user has two events"):
        Log.of(sequences_of([1, 2, 3], [4, 5, 6])).chosen(recipe_of(), tmp_path)
    with pytest.raises(TrainingError, match="No event is left for validation"):
        Log.of(sequences_of([1, 2], [4, 5])).chosen(recipe_of(), tmp_path)


def test_a_decay_ends_with_the_planned_epochs(tmp_path: Path) -> None:
    """With the warm-up over from the start, the last step of a loop of n steps takes 1/n of the step size."""
    log, recipe = Log.of(cycle()), recipe_of(epochs=2, warmup=0, decay=1.0, learning_rate=0.8, tokens=10_000)
    _, state = log.fitted(recipe, tmp_path / "state", None)
    assert state.record.step == 2 and state.adamw.param_groups[0]["lr"] == pytest.approx(0.4)
    later = recipe_of(epochs=4, warmup=0, decay=1.0, learning_rate=0.8, tokens=10_000)
    _, state = log.fitted(later, tmp_path / "state", None)
    assert state.adamw.param_groups[0]["lr"] == pytest.approx(0.2), "planned anew: the fourth of four steps"


def test_the_step_size_does_not_depend_on_the_number_of_epochs(tmp_path: Path) -> None:
    log, short, long = Log.of(cycle()), Script(0.1, 0.2), Script(0.1, 0.2, 0.3, 0.4, 0.5)
    _, brief = log.fitted(recipe_of(epochs=2), tmp_path / "short", short)
    _, whole = log.fitted(recipe_of(epochs=5), tmp_path / "long", long)
    assert all(same_weights(one, other) for one, other in zip(short.shown, long.shown[:2], strict=True))
    assert brief.record.history == whole.record.history[:2]


@pytest.mark.parametrize("objective", [{}, POPULARITY], ids=["softmax", "sampled-softmax"])
def test_the_seed_decides_everything(objective: dict[str, Any], tmp_path: Path) -> None:
    log = Log.of(cycle(20))
    recipes = [recipe_of(objective=objective, seed=seed) for seed in (3, 3, 4)]
    runs = [log.chosen(recipe, tmp_path / f"{run}") for run, recipe in enumerate(recipes)]
    weights, histories = [weights_of(model) for model, _ in runs], [progress.history for _, progress in runs]
    assert same_weights(weights[0], weights[1]) and histories[0] == histories[1]
    assert not same_weights(weights[0], weights[2]) and histories[0] != histories[2]


def test_global_random_states_are_left_alone_and_have_no_say(tmp_path: Path) -> None:
    log, found = Log.of(cycle(20)), []
    for run, seed in enumerate((1, 2)):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
            before = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
            model, _ = log.chosen(recipe_of(objective=POPULARITY), tmp_path / f"{run}")
            assert torch.equal(torch.get_rng_state(), before[0])
            assert random.getstate() == before[1] and repr(np.random.get_state()) == before[2]
            found.append(weights_of(model))
    assert same_weights(*found)


def permuted(log: Sequences, seed: int = 5) -> Sequences:
    """The users' last items dealt out among them anew."""
    items, last = log.items.copy(), log.offsets[1:] - 1
    items[last] = items[np.random.default_rng(seed).permutation(last)]
    assert (items != log.items).sum() > len(last) / 2
    return Sequences(offsets=log.offsets, items=items, times=log.times)


def test_the_test_part_has_no_say(tmp_path: Path) -> None:
    """No weight, no chosen epoch and no line of the history depends on the users' last items."""
    log = cycle()
    true, true_progress = Log.of(log).chosen(recipe_of(), tmp_path / "true", seen="excluded")
    other, other_progress = Log.of(permuted(log)).chosen(recipe_of(), tmp_path / "other", seen="excluded")
    assert same_weights(weights_of(true), weights_of(other))
    assert true_progress.history == other_progress.history
    assert true_progress.best_epoch == other_progress.best_epoch


def test_progress_is_told_at_every_step_and_after_every_epoch(tmp_path: Path) -> None:
    steps: list[TrainingProgress] = []
    _, progress = Log.of(cycle()).chosen(recipe_of(epochs=2), tmp_path, progress=steps.append)
    ends = [step for step in steps if step.scores is not None]
    assert [step.epoch for step in ends] == [1, 2]
    assert [step.scores for step in ends] == [
        {name: line[name] for name in ("ndcg@10", "hit@10")} for line in progress.history
    ]
    assert [step.loss for step in ends] == [line["loss"] for line in progress.history]
    inside = [step for step in steps if step.scores is None]
    assert {step.epoch for step in inside} == {1, 2} and all(step.epochs == 2 for step in steps)
    for epoch in (1, 2):
        done = [step.done for step in inside if step.epoch == epoch]
        assert done == sorted(set(done)) and done[-1] == inside[0].total == progress.history[0]["positions"]
    assert all(step.tokens_per_second > 0 and step.seconds_left >= 0 for step in steps)
    assert inside[0].seconds_left > 0 and steps[-1].seconds_left == 0


def test_history_holds_nothing_but_what_repeats(tmp_path: Path) -> None:
    _, progress = Log.of(cycle(20)).chosen(recipe_of(epochs=2), tmp_path)
    assert [set(line) for line in progress.history] == [{"epoch", "loss", "positions", "ndcg@10", "hit@10"}] * 2
    assert len(progress.seconds) == 2


class Explodes(Objective):
    """The loss of the given step is not finite."""

    def __init__(self, at: int, value: float, counts: np.ndarray) -> None:
        super().__init__(objective_settings(), counts)
        self.left, self.value = at, value

    def loss(self, *given: Any) -> torch.Tensor:
        self.left -= 1
        return super().loss(*given) * (self.value if self.left == 0 else 1)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_state(value: float, tmp_path: Path) -> None:
    log, recipe, file = Log.of(cycle()), recipe_of(epochs=3), tmp_path / "state"
    validation = Script(0.1, 0.2, 0.3)
    batches = len(list(log.windows(recipe).batches(recipe.train.tokens, np.random.default_rng(0))))
    assert batches > 2
    with pytest.raises(TrainingError, match=f"{value} in epoch 2") as caught:
        log.fitted(recipe, file, validation, objective=Explodes(batches + 2, value, log.counts))
    assert "train.learning_rate" in str(caught.value) and "--resume" in str(caught.value)
    again, state = log.fitted(recipe, file, validation)
    assert state.record.epoch == 3
    whole, _ = log.fitted(recipe, tmp_path / "whole", Script(0.1, 0.2, 0.3))
    assert same_weights(weights_of(again), weights_of(whole)), "the kept state is that of the end of epoch 1"


def test_no_state_is_kept_before_the_first_epoch_is_done(tmp_path: Path) -> None:
    log = Log.of(cycle())
    with pytest.raises(TrainingError, match="epoch 1"):
        log.fitted(recipe_of(), tmp_path / "state", None, objective=Explodes(1, float("nan"), log.counts))
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("validated", [True, False], ids=["validated", "every event"])
def test_a_model_that_diverges_in_the_last_step_of_an_epoch_is_not_kept(validated: bool, tmp_path: Path) -> None:
    """One step an epoch, and far too large: what it makes is first met by the next epoch's loss."""
    log = Log.of(cycle())

    def train(recipe: TrainingSetup) -> SequenceModel:
        if validated:
            return log.chosen(recipe, tmp_path)[0]
        state, ends = tmp_path / STATE_ALL, log.sequences.offsets[1:]
        return train_for(recipe, log.sequences, ends, N_ITEMS, epochs=4, state_file=state)[0]

    with pytest.raises(TrainingError, match=r"train\.learning_rate"):
        train(recipe_of(epochs=4, tokens=10_000, learning_rate=1e38, warmup=0))
    taken_up = train(recipe_of(epochs=4, tokens=10_000))
    assert all(torch.isfinite(weight).all() for weight in taken_up.state_dict().values())


def test_every_event_is_learned_from_in_the_end(tmp_path: Path) -> None:
    """The item 11 is only ever the last one: the run that chooses never meets it, the one for serving does."""
    log = Log.of(sequences_of(*([1, 2, 3, 4, 11] for _ in range(20))))
    assert log.counts[11] == 0
    recipe = recipe_of(epochs=9, model={"dropout": 0.0})
    steps: list[TrainingProgress] = []
    state, ends = tmp_path / STATE_ALL, log.sequences.offsets[1:]
    watched = replace(recipe, progress=steps.append)
    model, counts = train_for(watched, log.sequences, ends, 11, epochs=2, state_file=state)
    assert counts.tolist() == [0, 20, 20, 20, 20, 0, 0, 0, 0, 0, 0, 20]
    assert steps[-1].epoch == steps[-1].epochs == 2 and steps[-1].total == 20 * 4
    assert not model.training and not any(weight.requires_grad for weight in model.parameters())
    _, fewer = train_for(recipe, log.sequences, ends - 1, 11, epochs=1, state_file=tmp_path / "fewer")
    assert fewer.tolist() == [0, 20, 20, 20, 20, 0, 0, 0, 0, 0, 0, 0]


def test_a_chosen_model_is_ready_to_answer(tmp_path: Path) -> None:
    model, _ = Log.of(cycle(20)).chosen(recipe_of(epochs=1), tmp_path)
    assert not model.training and not any(weight.requires_grad for weight in model.parameters())


@pytest.fixture
def two_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_threads_are_given_back(tmp_path: Path) -> None:
    during: list[int] = []

    def watch(_: TrainingProgress) -> None:
        during.append(torch.get_num_threads())

    Log.of(cycle(20)).chosen(recipe_of(epochs=1, threads=1), tmp_path, progress=watch)
    assert set(during) == {1} and torch.get_num_threads() == 2
    with pytest.raises(ZeroDivisionError), threads(1):
        _ = 1 / 0
    assert torch.get_num_threads() == 2
    with threads(0):
        assert torch.get_num_threads() == 2


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SettingsError, match=r"train\.device is 'cuda'.*'cpu' or 'auto'"):
        device_of(TrainSettings(device="cuda"))
    assert device_of(TrainSettings(device="auto")).type == device_of(TrainSettings(device="cpu")).type == "cpu"


def test_every_process_needs_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for here, rank in (("2", "1"), ("4", "3")):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
        monkeypatch.setenv("LOCAL_RANK", rank)
        if here == "2":
            assert device_of(TrainSettings(), TorchProcessGroup(1, 4)) == torch.device("cuda:1")
        else:
            with pytest.raises(SettingsError, match=r"4 processes on a machine with 2 CUDA devices.*at most 2"):
                device_of(TrainSettings(), TorchProcessGroup(3, 4))
    assert device_of(TrainSettings(device="cpu"), TorchProcessGroup(3, 4)).type == "cpu"


def test_why_there_is_nothing_left_to_do() -> None:
    settings = TrainSettings(epochs=10, patience=3)
    assert reason_finished(TrainingRecord(epoch=4, best_epoch=2), settings) is None
    assert "raise train.patience" in (reason_finished(TrainingRecord(epoch=5, best_epoch=2), settings) or "")
    assert "raise train.epochs" in (reason_finished(TrainingRecord(epoch=10, best_epoch=9), settings) or "")
