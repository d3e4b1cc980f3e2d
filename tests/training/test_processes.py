"""Several processes learn and measure what one does; one that dies is started again; any number goes on."""

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
from process_pair import CASES, DROPLESS, LOG, be_one_of_two, begin_alone, chosen, drawn_gradients, learned, measured
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
    """What two processes found, in a folder."""
    folder, heard = tmp_path_factory.mktemp("pair"), list[bytes]()
    begin_alone(folder)
    run_on_processes(2, be_one_of_two, (folder, cycle_data), receive=heard.append, restarts=0)
    assert sorted(heard) == [b"process 0 of 2", b"process 1 of 2"]
    return folder


def found_by(pair: Path, process: int, name: str) -> dict[str, Tensor]:
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
def test_two_learn_what_one_does(name: str, pair: Path, tmp_path: Path) -> None:
    together, alone = found_by(pair, 0, name), learned(CASES[name], tmp_path / "alone")
    assert_close(together, alone, within=1e-7)
    assert_close(together, found_by(pair, 1, name), within=0)


def test_two_learn_from_draws_what_one_does(pair: Path) -> None:
    assert_close(found_by(pair, 0, "draws"), drawn_gradients(), within=1e-12)


def test_two_measure_what_one_does_to_the_last_user(pair: Path) -> None:
    alone = json.loads(json.dumps(measured()))
    for process in (0, 1):
        together = json.loads((pair / f"report{process}.json").read_bytes())
        assert {name: together[name] for name in alone} == alone


def test_any_number_goes_on(pair: Path, tmp_path: Path) -> None:
    recipe = recipe_of(epochs=3, model=DROPLESS)
    whole, by_one = chosen(recipe, tmp_path / "whole"), chosen(recipe, pair / "begun by two")
    for other in (found_by(pair, 0, "goes on"), by_one):
        # A key's bias moves no attention: its gradient is rounding and nothing else, and so is where it goes.
        free = {name for name in whole if name.endswith("key_value.bias")}
        assert free
        assert_close(without(other, free), without(whole, free), within=1e-6)


def test_two_that_are_stopped_and_go_on_end_where_they_would_have(pair: Path) -> None:
    """With dropout, which each of them draws for itself."""
    assert_close(found_by(pair, 0, "in two goes"), found_by(pair, 0, "whole"), within=0)


def test_what_is_refused_is_refused_by_each_in_the_same_words(pair: Path) -> None:
    said = [json.loads((pair / f"report{process}.json").read_bytes())["refusal"] for process in (0, 1)]
    assert said[0] == said[1]
    assert said[0].startswith("FolderError: ") and "exists already" in said[0]


def test_one_is_killed_and_the_run_ends_complete(
    line: CommandLine, cycle_data: Path, quick_recipe: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`segue train --processes 2 --all`, of which one dies by kill -9 after the first epoch."""
    changes = [f"--set=train.{change}" for change in ("epochs=5", "patience=5", "tokens=60", "learning_rate=1e-3")]
    with killing(line.folder / "run.partial" / "training.safetensors") as killed:
        body = line.answers(
            "train", cycle_data, "--out", "run", "--recipe", quick_recipe, "--all", "--processes", 2, *changes
        )
    assert killed(), "nothing was killed"
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


class killing:  # noqa: N801  # reads as what it does
    """Kills one of the processes that this one has started as soon as a file is there."""

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
def test_users_are_shared_out_each_once_and_evenly(lengths: np.ndarray, parts: int) -> None:
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
def test_every_question_is_one_processs_and_asked_of_the_same_state(
    task: str, size: int, lengths: np.ndarray, seed: int
) -> None:
    count = int(lengths.sum())
    batch = Batch(items=np.arange(1, count + 1), times=np.arange(count), lengths=lengths)
    examples = TASKS[task](batch, np.random.default_rng(seed), TaskFacts(mask=99))
    parts = [BatchShard.of(examples, TorchProcessGroup(rank, size)) for rank in range(size)]
    taken = np.concatenate([part.own_rows for part in parts])
    assert sorted(taken) == list(range(len(examples.targets)))
    for part in parts:
        np.testing.assert_array_equal(part.own.targets, examples.targets[part.own_rows])
        np.testing.assert_array_equal(states_asked(part.own), states_asked(examples)[part.own_rows])


def states_asked(examples: Examples) -> np.ndarray:
    """The user's first item, the number of events up to the state, and the event: they tell all states apart."""
    lengths = examples.inputs.lengths
    first, places = np.cumsum(lengths) - lengths, np.arange(lengths.sum())
    owner = np.repeat(np.arange(len(lengths)), lengths)
    asked = places if examples.positions is None else examples.positions
    return np.stack((examples.inputs.times[first[owner]], places - first[owner], examples.inputs.times), axis=1)[asked]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_user_once_an_epoch(size: int) -> None:
    windows, seen = LOG.windows(recipe_of()), []
    for batch in windows.batches(60, np.random.default_rng(0)):
        cuts = cut_evenly(batch.lengths, size)
        seen += [take(batch, np.arange(first, last)) for first, last in pairwise(cuts)]
    found = sorted(
        tuple(user) for part in seen for user in np.split(part.items, np.cumsum(part.lengths)[:-1]) if len(user)
    )
    rows = zip(windows.starts, windows.ends, strict=True)
    assert found == sorted(tuple(LOG.sequences.items[start:end]) for start, end in rows)


def begun_by(launcher: str, monkeypatch: pytest.MonkeyPatch, data: Path, out: Path, **more: Any) -> api.Recommender:
    """A training that is told it is one of several, which some launcher has started."""
    monkeypatch.setattr(make, "launcher_names", lambda _: frozenset({launcher, "another machine's"}))
    return api.train(data, out=out, overrides=["train.epochs=2", "model.width=8", "model.depth=1"], **more)


def test_what_a_launcher_began_goes_on_and_nothing_else_does(
    cycle_data: Path, quick_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun starts processes again when they are refused, too: that must not take up what was there before."""

    def dies(step: TrainingProgress) -> None:
        if step.scores is not None:
            raise ZeroDivisionError

    again = partial(begun_by, monkeypatch=monkeypatch, data=cycle_data, out=tmp_path / "run", recipe=quick_recipe)
    with pytest.raises(ZeroDivisionError):
        again("a", progress=dies)
    monkeypatch.setattr(make, "launcher_names", lambda _: frozenset({"b"}))
    with pytest.raises(FolderError, match="holds unfinished training; add --resume"):
        api.train(cycle_data, out=tmp_path / "run", recipe=quick_recipe)
    made = again("a")
    assert made.manifest["training"]["epochs"] == 2 and not (tmp_path / "run.partial").exists()
    assert again("a").manifest == made.manifest, "it died when all was done"
    assert again("a", resume=True).manifest == made.manifest
    monkeypatch.setattr(make, "launcher_names", lambda _: frozenset({"b"}))
    with pytest.raises(FolderError, match="exists already"):
        api.train(cycle_data, out=tmp_path / "run", recipe=quick_recipe)


def test_machines_that_do_not_share_the_folder_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One has nothing there, or what was left there by a training before."""
    monkeypatch.setattr(TorchProcessGroup, "all_gather_objects", lambda _, thing: [True, thing])
    monkeypatch.setattr(TorchProcessGroup, "on_first", lambda *_: b"of this training")
    monkeypatch.setattr(make, "VISIBLE_WITHIN", 0.0)
    partial = tmp_path / "run.partial"
    partial.mkdir()
    for there in (None, b"of another"):
        if there is not None:
            (partial / "data.json").write_bytes(there)
        with pytest.raises(FolderError, match=r"1 of the 2 processes do not see .*: .* must share the folder"):
            make._refuse_separate_folders(partial, TorchProcessGroup(1, 2))
    (partial / "data.json").write_bytes(b"of this training")
    make._refuse_separate_folders(partial, TorchProcessGroup(1, 2))


def test_each_training_of_a_program_has_names_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setattr(TorchProcessGroup, "all_gather_objects", lambda _, thing: [thing, "another machine's"])

    def names() -> list[frozenset[str]]:
        monkeypatch.setattr(processes, "_trainings", itertools.count())
        return [processes.launcher_names(TorchProcessGroup(0, 2)) for _ in range(2)]

    first, second = names()
    assert first & second == {"another machine's"} and len(first) == 2
    assert names() == [first, second], "when it is started again"
    assert processes.launcher_names(SINGLE_PROCESS) == frozenset()


def test_signals_that_are_ignored_stay_so(tmp_path: Path) -> None:
    """As `nohup` and a shell's background want it, however these tests were started."""
    handled = {}
    before = signal.getsignal(signal.SIGHUP)
    try:
        for disposition in (signal.SIG_IGN, signal.SIG_DFL):
            signal.signal(signal.SIGHUP, disposition)
            handled[disposition] = processes._launch_config(2, 0, tmp_path).signals_to_handle
    finally:
        signal.signal(signal.SIGHUP, before)
    assert "SIGHUP" not in handled[signal.SIG_IGN] and "SIGTERM" in handled[signal.SIG_IGN]
    assert "SIGHUP" in handled[signal.SIG_DFL]


def test_an_error_of_the_receiver_ends_everything_though_ctrl_c_is_ignored() -> None:
    ended = threading.Event()
    before = [signal.signal(signal.SIGINT, signal.SIG_IGN), signal.signal(signal.SIGTERM, lambda *_: ended.set())]
    try:
        with processes._Receiver(lambda _: 1 / 0) as receiver:  # type: ignore[arg-type]
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as words:
                words.sendto(b"word", str(receiver.address))
            limit = time.monotonic() + 10
            while not ended.is_set():  # handlers have their turn between two steps, not in one that waits
                assert time.monotonic() < limit
                time.sleep(0.01)
    finally:
        for kind, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(kind, handler)
    assert isinstance(receiver.error, ZeroDivisionError)


def test_processes_are_heard_wherever_temporary_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address of a socket has at most a hundred characters or so."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    heard = list[bytes]()
    with processes._Receiver(heard.append) as receiver, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as words:
        words.sendto(b"word", str(receiver.address))
    assert heard == [b"word"]


def test_a_search_is_not_shared_out(cycle_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SettingsError, match="without torchrun"):
        tune(cycle_data, out=tmp_path / "search", trials=1)


def test_a_number_of_processes_that_is_none_is_refused(line: CommandLine, cycle_data: Path) -> None:
    line.refuses("train", cycle_data, "--out", "run", "--processes", 0, says=("--processes", "1"), code=2)
    with pytest.raises(SettingsError, match="at least 1, got 0"):
        api.train(cycle_data, processes=0)


def test_torchrun_says_how_many_there_are(cycle_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SettingsError, match="leave --processes out"):
        api.train(cycle_data, processes=2)


@pytest.mark.parametrize(("rank", "speaks"), [("0", True), ("1", False)])
def test_of_several_only_the_first_speaks(
    rank: str, speaks: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("RANK", rank)
    print_line("out")
    print_error("err")
    Display().line("shown")
    assert capsys.readouterr() == (("out\n", "err\nshown\n") if speaks else ("", ""))


def test_an_encoder_that_others_cannot_import_is_refused(cycle_data: Path) -> None:
    with pytest.raises(SettingsError, match="cannot import: with processes above 1"):
        api.train(cycle_data, processes=2, encoder=lambda *_: None)  # type: ignore[arg-type]


def test_the_package_is_a_command_which_is_what_torchrun_starts() -> None:
    said = subprocess.run([sys.executable, "-m", "segue", "--version"], capture_output=True, text=True, check=True)
    assert said.stdout.startswith("segue ")
