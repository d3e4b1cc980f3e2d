"""Several processes train and evaluate like one, restart if one dies, and resume each other's training."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from command_line import CommandLine
from cycle_logs import recipe_of
from hypothesis import given, settings
from hypothesis import strategies as st
from process_pair import (
    CASES,
    DROPLESS,
    LOG,
    evaluations,
    run_as_one_of_two,
    sampled_gradients,
    train_and_choose,
    train_case,
    train_one_epoch,
)
from safetensors.torch import load_file
from torch import Tensor

from segue import api
from segue.data.batch import Batch, cut_evenly, take
from segue.errors import FolderError, SettingsError
from segue.objective.batch_shard import BatchShard
from segue.objective.tasks.examples import Examples, Task, TaskFacts
from segue.objective.tasks.masked_item import MaskedItem
from segue.objective.tasks.next_item import NextItem
from segue.objective.tasks.recency import Recency
from segue.process_group import SINGLE_PROCESS
from segue.runs import make
from segue.runs.read import read_report
from segue.terminal import Display, print_error, print_line
from segue.training.distributed import processes
from segue.training.distributed.process_group import TorchProcessGroup
from segue.training.distributed.processes import run_on_processes
from segue.training.loop import TrainingProgress
from segue.tuning import tune


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, cycle_data: Path) -> Path:
    """A folder with the results of two processes."""
    folder, messages = tmp_path_factory.mktemp("pair"), list[bytes]()
    train_one_epoch(folder)
    run_on_processes(2, run_as_one_of_two, (folder, cycle_data), receive=messages.append, restarts=0)
    assert sorted(messages) == [b"process 0 of 2", b"process 1 of 2"]
    return folder


def result_of(pair: Path, process: int, name: str) -> dict[str, Tensor]:
    return {
        key.removeprefix(f"{name}/"): value
        for key, value in load_file(pair / f"learned{process}.safetensors").items()
        if key.startswith(f"{name}/")
    }


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor], *, within: float) -> None:
    assert one.keys() == other.keys() and one
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], atol=within, rtol=0, msg=f"{name} differs by more than {within}")


def without(weights: dict[str, Tensor], names: set[str]) -> dict[str, Tensor]:
    return {name: weight for name, weight in weights.items() if name not in names}


@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_like_one(name: str, pair: Path, tmp_path: Path) -> None:
    together, alone = result_of(pair, 0, name), train_case(CASES[name], tmp_path / "alone")
    assert_close(together, alone, within=1e-7)
    assert_close(together, result_of(pair, 1, name), within=0)


def test_two_processes_have_the_sampled_gradients_of_one(pair: Path) -> None:
    assert_close(result_of(pair, 0, "sampled"), sampled_gradients(), within=1e-12)


def test_two_processes_evaluate_exactly_like_one(pair: Path) -> None:
    alone = json.loads(json.dumps(evaluations()))
    for process in (0, 1):
        together = json.loads((pair / f"report{process}.json").read_bytes())
        assert {name: together[name] for name in alone} == alone


def test_one_process_resumes_two_and_two_resume_one(pair: Path, tmp_path: Path) -> None:
    recipe = recipe_of(epochs=3, model=DROPLESS)
    whole, by_one = train_and_choose(recipe, tmp_path / "whole"), train_and_choose(recipe, pair / "from two processes")
    for other in (result_of(pair, 0, "resumed by two"), by_one):
        # A key's bias does not change attention: its gradient and its changes are rounding errors.
        key_biases = {name for name in whole if name.endswith("key_value.bias")}
        assert key_biases
        assert_close(without(other, key_biases), without(whole, key_biases), within=1e-6)


def test_two_stopped_processes_resume_to_the_same_weights(pair: Path) -> None:
    """With dropout, which each process samples for itself."""
    assert_close(result_of(pair, 0, "resumed"), result_of(pair, 0, "whole"), within=0)


def test_every_process_raises_the_same_error(pair: Path) -> None:
    messages = [json.loads((pair / f"report{process}.json").read_bytes())["refusal"] for process in (0, 1)]
    assert messages[0] == messages[1]
    assert messages[0].startswith("FolderError: ") and "exists already" in messages[0]


def test_a_run_completes_if_a_process_is_killed(
    line: CommandLine, cycle_data: Path, quick_recipe: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`segue train --processes 2 --all`, with one process killed by kill -9 after the first epoch."""
    changes = [f"--set=train.{change}" for change in ("epochs=5", "patience=5", "tokens=60", "learning_rate=1e-3")]
    with killing(line.folder / "run.partial" / "training.safetensors") as killed_pids:
        body = line.answers(
            "train", cycle_data, "--out", "run", "--recipe", quick_recipe, "--all", "--processes", 2, *changes
        )
    assert killed_pids(), "no process was killed"
    assert "A process died; all were started again and resume from the last saved state." in caplog.messages
    assert body["training"]["processes"] == 2
    assert body["training"]["epochs"] == 5
    assert not (line.folder / "run.partial").exists()
    line.does("train", cycle_data, "--out", "alone", "--recipe", quick_recipe, "--all", *changes)
    alone = api.load("alone")
    assert isinstance(alone, api.Recommender) and alone.manifest["training"]["processes"] == 1
    scores = [body["training"]["best_score"], alone.manifest["training"]["best_score"]]
    assert scores[0] == pytest.approx(scores[1], abs=1e-3)
    assert body["report"]["metrics"]["ndcg@10"] == pytest.approx(read_report(alone).metrics["ndcg@10"], abs=1e-3)


class killing:  # noqa: N801  # a context manager
    """Kill one of this process's workers as soon as a file exists."""

    def __init__(self, when: Path) -> None:
        self._when = when
        self._killed: list[int] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._wait, daemon=True)

    def __enter__(self) -> Callable[[], list[int]]:
        self._thread.start()
        return lambda: self._killed

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _wait(self) -> None:
        while not self._when.exists():
            if self._over.wait(0.01):
                return
        workers = [one for one in psutil.Process().children() if is_worker(one)]
        self._killed.append(workers[-1].pid)
        os.kill(workers[-1].pid, signal.SIGKILL)


def is_worker(process: psutil.Process) -> bool:
    return any("spawn_main" in word for word in process.cmdline())


lengths_of_users = st.lists(st.integers(1, 30), min_size=1, max_size=40).map(np.array)


@given(lengths=lengths_of_users, parts=st.integers(1, 5))
def test_each_user_is_in_one_shard_and_shards_are_even(lengths: np.ndarray, parts: int) -> None:
    cuts = cut_evenly(lengths, parts)
    assert len(cuts) == parts + 1 and cuts[0] == 0 and cuts[-1] == len(lengths)
    assert (np.diff(cuts) >= 0).all()
    tokens = [int(lengths[first:last].sum()) for first, last in pairwise(cuts)]
    assert max(abs(count - lengths.sum() / parts) for count in tokens) <= lengths.max()


TASKS: dict[str, Task] = {
    "next-item": NextItem(),
    "masked-item": MaskedItem(share=0.3, most=5, last=0.5),
    "recency": Recency(share=0.4, cuts=3),
}


@pytest.mark.parametrize("task", TASKS)
@settings(max_examples=50)
@given(
    size=st.integers(1, 3),
    lengths=st.lists(st.integers(2, 12), min_size=1, max_size=12).map(np.array),
    seed=st.integers(0, 99),
)
def test_every_target_belongs_to_one_process_and_has_the_same_state(
    task: str, size: int, lengths: np.ndarray, seed: int
) -> None:
    count = int(lengths.sum())
    batch = Batch(items=np.arange(1, count + 1), times=np.arange(count), lengths=lengths)
    examples = TASKS[task](batch, np.random.default_rng(seed), TaskFacts(mask=99))
    parts = [BatchShard.of(examples, TorchProcessGroup(rank, size)) for rank in range(size)]
    rows = np.concatenate([part.own_rows for part in parts])
    assert sorted(rows) == list(range(len(examples.targets)))
    for part in parts:
        np.testing.assert_array_equal(part.own.targets, examples.targets[part.own_rows])
        np.testing.assert_array_equal(target_states(part.own), target_states(examples)[part.own_rows])


def target_states(examples: Examples) -> np.ndarray:
    """Distinguish all states: by the user's first item, the number of events before, and the event."""
    lengths = examples.inputs.lengths
    first, positions = np.cumsum(lengths) - lengths, np.arange(lengths.sum())
    owner = np.repeat(np.arange(len(lengths)), lengths)
    targets = positions if examples.positions is None else examples.positions
    return np.stack((examples.inputs.times[first[owner]], positions - first[owner], examples.inputs.times), axis=1)[
        targets
    ]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_user_once_per_epoch(size: int) -> None:
    windows, parts = LOG.windows(recipe_of()), []
    for batch in windows.batches(60, np.random.default_rng(0)):
        cuts = cut_evenly(batch.lengths, size)
        parts += [take(batch, np.arange(first, last)) for first, last in pairwise(cuts)]
    users = sorted(
        tuple(user) for part in parts for user in np.split(part.items, np.cumsum(part.lengths)[:-1]) if len(user)
    )
    rows = zip(windows.starts, windows.ends, strict=True)
    assert users == sorted(tuple(LOG.sequences.items[start:end]) for start, end in rows)


def train_under_launcher(
    launcher: str, monkeypatch: pytest.MonkeyPatch, data: Path, out: Path, **more: Any
) -> api.Recommender:
    """Train as one of several processes of a launcher."""
    monkeypatch.setattr(make, "launcher_names", lambda _: frozenset({launcher, "another machine's"}))
    return api.train(data, out=out, overrides=["train.epochs=2", "model.width=8", "model.depth=1"], **more)


def test_only_the_same_launcher_resumes_its_training(
    cycle_data: Path, quick_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun also restarts processes after an error: that must not resume an older training."""

    def fail_after_epoch(step: TrainingProgress) -> None:
        if step.scores is not None:
            raise ZeroDivisionError

    train_again = partial(
        train_under_launcher, monkeypatch=monkeypatch, data=cycle_data, out=tmp_path / "run", recipe=quick_recipe
    )
    with pytest.raises(ZeroDivisionError):
        train_again("a", progress=fail_after_epoch)
    monkeypatch.setattr(make, "launcher_names", lambda _: frozenset({"b"}))
    with pytest.raises(FolderError, match="holds unfinished training; add --resume"):
        api.train(cycle_data, out=tmp_path / "run", recipe=quick_recipe)
    model = train_again("a")
    assert model.manifest["training"]["epochs"] == 2 and not (tmp_path / "run.partial").exists()
    assert train_again("a").manifest == model.manifest, "it died after the end of training"
    assert train_again("a", resume=True).manifest == model.manifest
    monkeypatch.setattr(make, "launcher_names", lambda _: frozenset({"b"}))
    with pytest.raises(FolderError, match="exists already"):
        api.train(cycle_data, out=tmp_path / "run", recipe=quick_recipe)


def test_machines_that_do_not_share_the_folder_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of one process is empty, or has files of another training."""
    monkeypatch.setattr(TorchProcessGroup, "all_gather_objects", lambda _, thing: [True, thing])
    monkeypatch.setattr(TorchProcessGroup, "on_first", lambda *_: b"of this training")
    monkeypatch.setattr(make, "VISIBLE_WITHIN", 0.0)
    partial = tmp_path / "run.partial"
    partial.mkdir()
    for content in (None, b"of another"):
        if content is not None:
            (partial / "data.json").write_bytes(content)
        with pytest.raises(FolderError, match=r"1 of the 2 processes do not see .*: .* must share the folder"):
            make._refuse_separate_folders(partial, TorchProcessGroup(1, 2))
    (partial / "data.json").write_bytes(b"of this training")
    make._refuse_separate_folders(partial, TorchProcessGroup(1, 2))


def test_each_training_of_a_program_has_its_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setattr(TorchProcessGroup, "all_gather_objects", lambda _, thing: [thing, "another machine's"])

    def names() -> list[frozenset[str]]:
        monkeypatch.setattr(processes, "_trainings", itertools.count())
        return [processes.launcher_names(TorchProcessGroup(0, 2)) for _ in range(2)]

    first, second = names()
    assert first & second == {"another machine's"} and len(first) == 2
    assert names() == [first, second], "the same names after a restart"
    assert processes.launcher_names(SINGLE_PROCESS) == frozenset()


def test_ignored_signals_stay_ignored(tmp_path: Path) -> None:
    """As `nohup` and background jobs of a shell require."""
    signals_by_disposition = {}
    handlers = signal.getsignal(signal.SIGHUP)
    try:
        for disposition in (signal.SIG_IGN, signal.SIG_DFL):
            signal.signal(signal.SIGHUP, disposition)
            signals_by_disposition[disposition] = processes._launch_config(2, 0, tmp_path).signals_to_handle
    finally:
        signal.signal(signal.SIGHUP, handlers)
    assert (
        "SIGHUP" not in signals_by_disposition[signal.SIG_IGN] and "SIGTERM" in signals_by_disposition[signal.SIG_IGN]
    )
    assert "SIGHUP" in signals_by_disposition[signal.SIG_DFL]


def test_an_error_of_the_receiver_terminates_even_if_ctrl_c_is_ignored() -> None:
    terminated = threading.Event()
    handlers = [
        signal.signal(signal.SIGINT, signal.SIG_IGN),
        signal.signal(signal.SIGTERM, lambda *_: terminated.set()),
    ]
    try:
        with processes._Receiver(lambda _: 1 / 0) as receiver:  # type: ignore[arg-type]
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.sendto(b"word", str(receiver.address))
            limit = time.monotonic() + 10
            while not terminated.is_set():  # handlers run between bytecodes, not during a wait
                assert time.monotonic() < limit
                time.sleep(0.01)
    finally:
        for kind, handler in zip((signal.SIGINT, signal.SIGTERM), handlers, strict=True):
            signal.signal(kind, handler)
    assert isinstance(receiver.error, ZeroDivisionError)


def test_messages_arrive_with_a_long_path_of_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address of a socket has at most about a hundred characters."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    messages = list[bytes]()
    with processes._Receiver(messages.append) as receiver, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"word", str(receiver.address))
    assert messages == [b"word"]


def test_a_search_under_torchrun_is_refused(cycle_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SettingsError, match="without torchrun"):
        tune(cycle_data, out=tmp_path / "search", trials=1)


def test_zero_processes_are_refused(line: CommandLine, cycle_data: Path) -> None:
    line.refuses("train", cycle_data, "--out", "run", "--processes", 0, says=("--processes", "1"), code=2)
    with pytest.raises(SettingsError, match="at least 1, got 0"):
        api.train(cycle_data, processes=0)


def test_processes_with_torchrun_are_refused(cycle_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SettingsError, match="leave --processes out"):
        api.train(cycle_data, processes=2)


@pytest.mark.parametrize(("rank", "printed"), [("0", True), ("1", False)])
def test_only_the_first_process_prints(
    rank: str, printed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("RANK", rank)
    print_line("out")
    print_error("err")
    Display().line("shown")
    assert capsys.readouterr() == (("out\n", "err\nshown\n") if printed else ("", ""))


def test_an_encoder_that_processes_cannot_import_is_refused(cycle_data: Path) -> None:
    with pytest.raises(SettingsError, match="cannot import: with processes above 1"):
        api.train(cycle_data, processes=2, encoder=lambda *_: None)  # type: ignore[arg-type]


def test_the_package_runs_with_python_m() -> None:
    process = subprocess.run([sys.executable, "-m", "segue", "--version"], capture_output=True, text=True, check=True)
    assert process.stdout.startswith("segue ")
