"""`segue train` without a recipe: the plan, the choice of an encoder, and Ctrl-C at any moment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest
from command_line import CommandLine, Said, assert_refused, tree
from step_clock import StepClock, step_clock

import segue
from segue import api
from segue.config.derived import ENCODERS
from segue.kinds import kind_of, parse_toml
from segue.models.sequence import SequenceModel
from segue.runs.plan import CANDIDATES
from segue.terminal import Display
from segue.training import timing
from segue.training import train as training
from segue.training.loop import TrainingProgress
from segue.training.train import TrainingSetup

SMALL = ("model.width=8", "train.threads=1", "train.epochs=5", "train.epoch_events=0", "train.tokens=240")
"""Five epochs of three steps on the cycle log: 15 seconds by the clock of steps, on which a report takes no time."""
SET = tuple(argument for text in SMALL for argument in ("--set", text))
MINUTES = 0.65
MUCH, LITTLE = f"train.minutes={MINUTES}", "train.minutes=0.5"  # and two seconds are for timing
EQUAL = ("weights.safetensors", "history.jsonl", "ranks.npy", "metrics.json", "items.parquet", "index.safetensors")
"""Files that are equal in equal runs."""
RUN_FILES = {*EQUAL, "counts.safetensors", "manifest.json", "settings.toml", "training.safetensors"}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StepClock:
    return step_clock(monkeypatch)


def files_of(run: Path) -> dict[str, bytes]:
    return {name: (run / name).read_bytes() for name in EQUAL}


def settings_of(folder: Path) -> dict[str, Any]:
    return parse_toml((folder / "settings.toml").read_bytes(), "settings.toml")


def record_of(partial: Path) -> dict[str, Any]:
    body = json.loads((partial / "data.json").read_bytes())
    assert isinstance(body, dict)
    return body


def history_of(run: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(row) for row in (run / "history.jsonl").read_bytes().splitlines()]


class Steps:
    """The progress of a training, which a condition interrupts as Ctrl-C does."""

    def __init__(self, until: Callable[[TrainingProgress], bool] = lambda _: False) -> None:
        self.until = until
        self.all: list[TrainingProgress] = []

    def __call__(self, step: TrainingProgress) -> None:
        self.all.append(step)
        if self.until(step):
            raise KeyboardInterrupt

    def epochs(self) -> list[tuple[str, int]]:
        """The encoder, empty for the run itself, and the number of each finished epoch."""
        return [(step.of, step.epoch) for step in self.all if step.scores is not None]


# --- the plan -----------------------------------------------------------------------------------------------------


def test_the_plan_is_shown_before_training(line: CommandLine, cycle_data: Path) -> None:
    result = line("train", cycle_data, "--out", "run", "--set", "train.epochs=2", "--set", "model.width=8")
    assert result.code == 0, result
    rows = result.err.splitlines()
    estimate = next(number for number, row in enumerate(rows) if row.startswith("Estimate for this machine:"))
    derived = json.loads((line.folder / "run" / "manifest.json").read_bytes())["derived"]
    assert {each["key"] for each in derived} >= {"model", "model.length", "train.tokens"}
    assert not {"train.epochs", "model.width"} & {each["key"] for each in derived}
    for each, row in zip(derived, rows[1:estimate], strict=True):
        assert row.split(maxsplit=2) == [each["key"], str(each["value"]), each["reason"]]
    assert "2 epochs" in rows[estimate] and rows[estimate + 1].startswith("epoch   1/2")
    assert (settings_of(line.folder / "run")["train"]["epochs"], len(history_of(line.folder / "run"))) == (2, 2)


def test_with_json_nothing_but_the_object_is_printed(line: CommandLine, cycle_data: Path) -> None:
    result = line("train", cycle_data, "--out", "run", *SET, "--set", "train.epochs=1", "--json")
    assert (result.code, result.err) == (0, "")
    body = json.loads(result.out)
    settings = settings_of(line.folder / "run")
    for each in body["derived"]:
        section, _, name = each["key"].partition(".")
        assert each["value"] == (settings[section][name] if name else settings[section]["kind"])


@pytest.mark.usefixtures("clock")
def test_timing_and_deriving_change_no_result(cycle_data: Path, tmp_path: Path) -> None:
    """A run equals one whose recipe is its settings."""
    segue.train(cycle_data, out=tmp_path / "derived", overrides=[*SMALL, "train.epochs=2", "model.dropout=0.3"])
    steps = Steps()
    recipe = tmp_path / "derived" / "settings.toml"
    given = segue.train(cycle_data, out=tmp_path / "given", recipe=recipe, progress=steps)
    assert files_of(tmp_path / "given") == files_of(tmp_path / "derived")
    (plan,) = [step.plan for step in steps.all if step.plan]
    assert "derived" not in given.manifest and len(plan) == 1, "an estimate alone"


# --- several encoders ---------------------------------------------------------------------------------------------


def planted(winner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A validation in which one encoder is best in each epoch."""
    epochs: dict[str, int] = {}

    def validation(setup: TrainingSetup, *_: object, **__: object) -> Callable[[SequenceModel], dict[str, float]]:
        name = kind_of(setup.model)

        def validate(_: SequenceModel) -> dict[str, float]:
            epochs[name] = epochs.get(name, 0) + 1
            return {"ndcg@10": (0.5 if name == winner else 0.1) + epochs[name] / 100}

        return validate

    monkeypatch.setattr(training, "validation", validation)


FIRST_EPOCHS = 3  # of three seconds each: of 37 seconds each of three encoders has a first part of 7.6


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("winner", ENCODERS)
def test_the_best_encoder_is_kept_and_continues(
    winner: str, cycle_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(winner, monkeypatch)
    partial, steps = tmp_path / "run.partial", Steps()
    tried: list[dict[str, Any]] = []

    def progress(step: TrainingProgress) -> None:
        steps(step)
        if step.plan and not tried:
            tried.append(record_of(partial)["candidates"])

    run = segue.train(cycle_data, out=tmp_path / "run", overrides=[*SMALL, MUCH], progress=progress)
    first_parts = [(name, epoch) for name in tried[0] for epoch in range(1, FIRST_EPOCHS + 1)]
    assert sorted(tried[0]) == sorted(ENCODERS)
    assert tried[0]["hstu"]["model"]["target_time"] is False
    assert steps.epochs() == [*first_parts, ("", 4), ("", 5)], "its epochs count"

    assert settings_of(tmp_path / "run")["model"]["kind"] == winner
    assert run.manifest["training"]["epochs"] == run.manifest["training"]["best_epoch"] == 5
    assert [each["value"] for each in run.manifest["derived"] if each["key"] == "model"] == [winner]
    lines = [line for step in steps.all for line in step.plan]
    assert ", ".join(tried[0]) in " ".join(lines[:-1]) and lines[-1].startswith(f"{winner} is kept")
    losses = [step.loss for step in steps.all if step.scores is not None and step.of in ("", winner)]
    assert [line["loss"] for line in history_of(tmp_path / "run")] == losses
    assert {path.name for path in (tmp_path / "run").rglob("*")} <= RUN_FILES, "nothing of the others"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]

    monkeypatch.undo()
    assert len(run.recommend(["i01", "i02"], k=3).items) == 3


@pytest.mark.usefixtures("clock")
def test_the_kept_encoder_is_trained_as_if_it_were_alone(cycle_data: Path, tmp_path: Path) -> None:
    """And is the best by its own validation."""
    steps = Steps()
    segue.train(cycle_data, out=tmp_path / "run", overrides=[*SMALL, MUCH], progress=steps)
    best: dict[str, float] = {}
    for step in steps.all:
        if step.scores is not None and step.of:
            best[step.of] = max(best.get(step.of, 0.0), step.scores["ndcg@10"])
    assert settings_of(tmp_path / "run")["model"]["kind"] == max(best, key=lambda name: best[name])
    assert best.keys() == set(ENCODERS)
    segue.train(cycle_data, out=tmp_path / "alone", recipe=tmp_path / "run" / "settings.toml")
    assert files_of(tmp_path / "alone") == files_of(tmp_path / "run")
    assert settings_of(tmp_path / "run")["train"]["minutes"] == MINUTES


@pytest.mark.usefixtures("clock")
def test_with_little_time_the_encoder_of_the_log_is_trained_alone(cycle_data: Path, tmp_path: Path) -> None:
    steps = Steps()
    segue.train(cycle_data, out=tmp_path / "run", overrides=[*SMALL, LITTLE], progress=steps)
    assert steps.epochs() == [("", epoch) for epoch in range(1, 6)]
    (plan,) = [step.plan for step in steps.all if step.plan]
    assert "encoders" not in " ".join(plan), "nothing is announced that is not done"


def stop_at_the_plan(step: TrainingProgress) -> bool:
    return bool(step.plan)


def tried_for(data: Path, out: Path, **options: Any) -> list[str]:
    """The encoders in the record of a training that is interrupted before it trains."""
    with pytest.raises(KeyboardInterrupt):
        segue.train(data, out=out, progress=Steps(lambda step: bool(step.plan) or step.epoch > 0), **options)
    return list(record_of(out.with_name(f"{out.name}.partial"))["candidates"])


@pytest.mark.usefixtures("clock")
def test_which_encoders_are_tried(cycle_data: Path, quick_recipe: Path, tmp_path: Path) -> None:
    much = [*SMALL, MUCH]
    assert sorted(tried_for(cycle_data, tmp_path / "all", overrides=much)) == sorted(ENCODERS)
    assert tried_for(cycle_data, tmp_path / "no minutes", overrides=SMALL) == []
    assert tried_for(cycle_data, tmp_path / "own encoder", overrides=[*much, "model=gru4rec"]) == []
    assert tried_for(cycle_data, tmp_path / "a recipe", overrides=[MUCH], recipe=quick_recipe) == []
    events = {"user": [f"u{n % 9}" for n in range(90)], "item": [f"i{n % 7}" for n in range(90)]}
    untimed = segue.prepare(pl.DataFrame(events), out=tmp_path / "untimed")
    assert sorted(tried_for(untimed.folder, tmp_path / "order", overrides=much)) == ["gru4rec", "sasrec"]


MIDDLES: dict[str, Callable[[TrainingProgress], bool]] = {
    "first encoder": lambda step: (step.of, step.epoch) == ("sasrec", 2) and step.done > 300,
    "second encoder": lambda step: (step.of, step.epoch) == ("gru4rec", 1) and step.done > 300,
    "after an epoch": lambda step: (step.of, step.epoch, step.scores is None) == ("gru4rec", 2, False),
    "kept encoder": lambda step: (step.of, step.epoch) == ("", 4) and step.done > 300,
}


@pytest.fixture(scope="module")
def uninterrupted(cycle_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of much time, which tried several encoders."""
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    with pytest.MonkeyPatch.context() as patch:
        step_clock(patch)
        segue.train(cycle_data, out=out, overrides=[*SMALL, MUCH])
    return out


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("middle", ["second encoder", "after an epoch", "kept encoder"])
def test_interrupted_candidates_are_resumed(middle: str, cycle_data: Path, uninterrupted: Path, tmp_path: Path) -> None:
    """To the run that the interruption delayed."""
    with pytest.raises(KeyboardInterrupt):
        segue.train(cycle_data, out=tmp_path / "run", overrides=[*SMALL, MUCH], progress=Steps(until=MIDDLES[middle]))
    assert [path.name for path in tmp_path.iterdir()] == ["run.partial"]
    run = segue.train(cycle_data, out=tmp_path / "run", resume=True)
    assert files_of(tmp_path / "run") == files_of(uninterrupted)
    assert settings_of(tmp_path / "run") == settings_of(uninterrupted)
    assert run.manifest["derived"]
    assert {path.name for path in (tmp_path / "run").rglob("*")} <= RUN_FILES
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    ("middle", "encoder", "epochs"),
    [("first encoder", "sasrec", 1), ("second encoder", "gru4rec", 0), ("after an epoch", "gru4rec", 2)],
)
def test_interrupted_candidates_are_finished(
    middle: str, encoder: str, epochs: int, cycle_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the best encoder so far, which can be trained further. A first epoch that was not finished, of 0 whole
    epochs, is a model too; it is trained anew."""
    planted("gru4rec", monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        segue.train(cycle_data, out=tmp_path / "run", overrides=[*SMALL, MUCH], progress=Steps(until=MIDDLES[middle]))
    assert api.can_finish(tmp_path / "run")
    steps = Steps()
    finished = api.finish(cycle_data, out=tmp_path / "run", progress=steps)
    assert steps.epochs() == [], "nothing is trained"
    assert settings_of(tmp_path / "run")["model"]["kind"] == encoder
    assert finished.manifest["training"]["epochs"] == len(history_of(tmp_path / "run")) == max(1, epochs)
    assert {path.name for path in (tmp_path / "run").rglob("*")} <= RUN_FILES
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert len(finished.recommend(["i01", "i02"], k=3).items) == 3

    steps = Steps()
    further = segue.train(cycle_data, out=tmp_path / "run", resume=True, progress=steps)
    assert steps.epochs() == [("", epoch) for epoch in range(epochs + 1, 6)], "no other encoder is tried again"
    assert settings_of(tmp_path / "run")["model"]["kind"] == encoder and further.manifest["training"]["epochs"] == 5


@pytest.mark.usefixtures("clock")
def test_changes_of_a_resumed_choice_hold_for_every_encoder(cycle_data: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        segue.train(
            cycle_data, out=tmp_path / "run", overrides=[*SMALL, MUCH], progress=Steps(until=MIDDLES["second encoder"])
        )
    steps, changes = Steps(), ["train.epochs=4", "train.learning_rate=5e-4"]
    run = segue.train(cycle_data, out=tmp_path / "run", resume=True, overrides=changes, progress=steps)
    assert run.manifest["training"]["epochs"] == 4 and {step.epochs for step in steps.all if step.epochs} == {4}
    train = settings_of(tmp_path / "run")["train"]
    assert (train["epochs"], train["learning_rate"]) == (4, 5e-4)


@pytest.mark.usefixtures("clock")
def test_a_choice_that_has_begun_is_finished_on_a_slower_machine(
    cycle_data: Path, tmp_path: Path, clock: StepClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no time to try several, the best of those that were tried is kept."""
    planted("gru4rec", monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        segue.train(
            cycle_data, out=tmp_path / "run", overrides=[*SMALL, MUCH], progress=Steps(until=MIDDLES["after an epoch"])
        )
    clock.step = 20.0
    run = segue.train(cycle_data, out=tmp_path / "run", resume=True)
    assert settings_of(tmp_path / "run")["model"]["kind"] == "gru4rec"
    assert run.manifest["training"]["epochs"] >= 2


def test_nothing_can_be_finished_before_the_first_epoch(cycle_data: Path, tmp_path: Path) -> None:
    assert not api.can_finish(tmp_path / "nowhere")
    with pytest.raises(KeyboardInterrupt):
        segue.train(cycle_data, out=tmp_path / "run", overrides=SMALL, progress=Steps(until=stop_at_the_plan))
    assert not api.can_finish(tmp_path / "run")
    assert (tmp_path / "run.partial" / CANDIDATES).exists() is False


def test_minutes_of_the_command_line(line: CommandLine, cycle_data: Path) -> None:
    step = ("train", cycle_data, "--out", "run")
    line.refuses(*step, "--minutes", "0.01", says=("--minutes", "0.1"), code=2)
    line.does(*step, *SET, "--set", "train.epochs=1", "--minutes", "0.1")
    assert settings_of(line.folder / "run")["train"]["minutes"] <= 0.1


# --- Ctrl-C in this process ---------------------------------------------------------------------------------------


def interrupt_at(moment: Callable[[TrainingProgress], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C once, when the command line shows this progress."""
    shown, left = Display.step, [moment]

    def step(self: Display, progress: TrainingProgress) -> None:
        shown(self, progress)
        if left and left[0](progress):
            left.clear()
            raise KeyboardInterrupt

    monkeypatch.setattr(Display, "step", step)


LATE: dict[str, Callable[[TrainingProgress], bool]] = {
    "first step": lambda step: step.epoch == 1 and not step.plan,
    "first epoch": lambda step: step.scores is not None,
    "second epoch": lambda step: step.epoch == 2 and step.scores is None,
    "measuring the last baseline": lambda step: step.measured == "session-knn",
}


def test_ctrl_c_before_the_first_step(line: CommandLine, cycle_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No run, and what is left is resumed as if nothing had happened."""
    interrupt_at(stop_at_the_plan, monkeypatch)
    result = line("train", cycle_data, "--out", "run", *SET)
    assert (result.code, result.out) == (130, "")
    assert_last_line(result, "Interrupted; no epoch is finished", f"segue train {cycle_data} --out run --resume")
    assert [path.name for path in line.folder.iterdir()] == ["run.partial"]
    assert {path.name for path in (line.folder / "run.partial").iterdir()} == {"data.json", "settings.toml"}
    body = line.answers("train", cycle_data, "--out", "run", "--resume")
    assert body["training"]["epochs"] == 5 and body["derived"]
    assert [path.name for path in line.folder.iterdir()] == ["run"]


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("moment", LATE)
def test_ctrl_c_leaves_a_run_that_is_resumed(
    moment: str, line: CommandLine, cycle_data: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_at(LATE[moment], monkeypatch)
    result = line("train", cycle_data, "--out", "run", *SET)
    assert result.code == 0 and "Traceback" not in result.err
    resume = f"segue train {cycle_data} --out run --resume"
    assert f"Interrupted: writing the run of the best epoch so far. To train further: {resume}" in result.err
    assert "ndcg@10" in result.out and "Made run." in result.out
    assert [path.name for path in line.folder.iterdir()] == ["run"]
    epochs = len(history_of(line.folder / "run"))
    assert epochs == (5 if moment.startswith("measuring") else 1)
    assert len(line.answers("recommend", "run", "--history", "i01,i02", "-k", "3")["items"]) == 3
    if epochs < 5:
        line.does("train", cycle_data, "--out", "run", "--resume")
        assert [path.name for path in line.folder.iterdir()] == ["run"]
    else:
        line.refuses("train", cycle_data, "--out", "run", "--resume", says=("run is complete", "train.epochs"))
    assert files_of(line.folder / "run") == files_of(whole)


@pytest.fixture(scope="module")
def whole(cycle_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        step_clock(patch)
        segue.train(cycle_data, out=out, overrides=SMALL)
    return out


def assert_last_line(result: Said, *words: str) -> None:
    """The last line of standard error is a sentence with these words."""
    assert "Traceback" not in result.err, result.err
    last = result.err.splitlines()[-1]
    assert not [word for word in words if word not in last], last


def test_ctrl_c_with_json(line: CommandLine, cycle_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_at(LATE["second epoch"], monkeypatch)
    result = line("train", cycle_data, "--out", "run", *SET, "--json")
    assert (result.code, result.err) == (0, "")
    assert json.loads(result.out)["training"]["epochs"] == 1


def test_a_second_ctrl_c_ends_at_once(line: CommandLine, cycle_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the run of the first one is written; the epochs are kept."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        interrupt_at(LATE["second epoch"], patch)
        patch.setattr("segue.runs.make.write_run", interrupt)
        result = line("train", cycle_data, "--out", "run", *SET)
    assert (result.code, result.out) == (130, "")
    assert_last_line(result, "Interrupted; the finished epochs are in run.partial.", "--resume")
    assert [path.name for path in line.folder.iterdir()] == ["run.partial"]
    assert line.answers("train", cycle_data, "--out", "run", "--resume")["training"]["epochs"] == 5


def test_ctrl_c_in_a_resumed_training_replaces_the_run(
    line: CommandLine, cycle_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one with more epochs; before its first new epoch, the run is as it was."""
    line.does("train", cycle_data, "--out", "run", *SET, "--set", "train.epochs=1")
    more = ("train", cycle_data, "--out", "run", "--resume", "--set", "train.epochs=5")
    with monkeypatch.context() as patch:
        interrupt_at(lambda step: step.epoch == 4 and step.scores is None, patch)
        assert line(*more).code == 0
    assert len(history_of(line.folder / "run")) == 3
    assert [path.name for path in line.folder.iterdir()] == ["run"]


# --- Ctrl-C to a process ------------------------------------------------------------------------------------------

ENDLESS = ("--set", "model.width=8", "--set", "train.epochs=1000000", "--set", "train.patience=1000000")


def interrupted(line: CommandLine, *arguments: object, once: Callable[[], bool]) -> Said:
    """The command in its own process, which gets SIGINT once a condition holds."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "segue.cli", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=line.folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    finally:
        signal.signal(signal.SIGINT, handler)
    timer = threading.Timer(120, process.kill)  # generous, for a busy machine
    timer.start()
    with process:
        while not once() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    timer.cancel()
    return Said(process.returncode, out, err)


def test_a_process_that_is_interrupted_after_an_epoch(line: CommandLine, cycle_data: Path) -> None:
    state, short = line.folder / "run.partial" / "training.safetensors", ("--set", "train.epoch_events=0")
    result = interrupted(line, "train", cycle_data, "--out", "run", *ENDLESS, *short, once=state.exists)
    assert result.code == 0, result
    assert "Traceback" not in result.err and "Interrupted: writing the run" in result.err
    assert [path.name for path in line.folder.iterdir()] == ["run"]
    epochs = len(history_of(line.folder / "run"))
    answer = line.answers("recommend", "run", "--history", "i01,i02", "-k", "3")
    assert epochs >= 1 and len(answer["items"]) == 3
    more = ("--resume", "--set", f"train.epochs={epochs + 1}")
    assert line.answers("train", cycle_data, "--out", "run", *more)["training"]["epochs"] == epochs + 1


def test_a_process_that_is_interrupted_before_the_first_epoch(
    line: CommandLine, cycle_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the timing of the plan, or in an epoch that does not end."""
    partial, endless = line.folder / "run.partial", ("--set", "train.epoch_events=1000000000")
    result = interrupted(line, "train", cycle_data, "--out", "run", *ENDLESS, *endless, once=partial.exists)
    assert result.code in (130, -signal.SIGINT)  # 130 to a shell; Python exits by the signal if it was importing
    assert_refused(result, "Interrupted", "--resume", code=result.code)
    assert not api.can_finish(line.folder / "run")
    assert [path.name for path in line.folder.iterdir()] == ["run.partial"]
    assert set(tree(partial)) == {"data.json", "settings.toml"}
    monkeypatch.setattr(timing, "SECONDS", 0.1)
    short = ("--resume", "--set", "train.epochs=1", "--set", "train.minutes=0.001")
    assert line.answers("train", cycle_data, "--out", "run", *short)["training"]["epochs"] == 1
