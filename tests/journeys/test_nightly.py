"""`segue embed` every night: every user's embedding, incremental runs, kills and resumes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from command_line import CommandLine
from planted_logs import cycle_log

import segue
from segue.errors import FolderError
from segue.folders import read_manifest
from segue.recommend.jobs import embed as embed_module

USERS = 60
ONE_USER_PER_PART = (
    "import segue.recommend.jobs.embed as embed; embed.PART_USERS = 1; from segue.cli import main; main()"  # many parts
)


def users_of(folder: Path) -> pl.DataFrame:
    return pl.read_parquet(folder / "users" / "*.parquet")


def history_of(data: Path, user: str) -> list[Any]:
    log = segue.load(data)
    assert isinstance(log, segue.Data)
    number = log.users.number(user)
    assert number is not None
    begin, end = log.sequences.offsets[number : number + 2]
    return log.vocabulary.ids(np.asarray(log.sequences.items[begin:end]))


@pytest.fixture(name="longer_data", scope="module")
def longer_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The next day: u003 and u050 have new events, u010 one more event in the past, n1 and n2 are new; n2 has only an
    item that the run does not know."""
    folder = tmp_path_factory.mktemp("grown")
    first = cycle_log().splitlines()
    time_of = {row.split(",")[0]: int(row.split(",")[2]) for row in first[1:]}  # the newest
    more = [f"{user},i0{step},{time_of[user] + step + 1}" for user in ("u003", "u050") for step in range(3)]
    more += [f"u010,i02,{time_of['u010'] - 7}"]
    more += [f"n1,i0{step},{1_700_000_000 + step}" for step in range(5)]
    more += [f"n2,new,{1_700_000_000 + step}" for step in range(5)]
    (folder / "log.csv").write_text("\n".join([*first, *more]) + "\n")
    segue.prepare(folder / "log.csv", out=folder / "data")
    return folder / "data"


def test_every_user_has_a_row(line: CommandLine, cycle_run: Path, cycle_data: Path) -> None:
    result = line.answers("embed", cycle_run, "--data", cycle_data, "--out", "night", "--items")
    assert result == {"folder": "night", "users": USERS, "rows": USERS, "unknown": 0, "unchanged": 0, "items": 12} | {
        "parts": 1,
        "width": 16,
    }
    night = line.folder / "night"
    table = users_of(night)
    assert table.schema == {
        "user": pl.String,
        "events": pl.Int64,
        "time": pl.Datetime("us", "UTC"),
        "embedding": pl.Array(pl.Float32, 16),
    }
    assert table["user"].to_list() == [f"u{number:03}" for number in range(USERS)]
    assert table["events"].to_list() == [14] * USERS
    assert table["time"][2] == datetime.fromtimestamp(1_600_000_000 + 97 * 2 + 3600 * 13, UTC)
    model = segue.load(cycle_run)
    assert isinstance(model, segue.Recommender)
    expected = model.embed([history_of(cycle_data, user) for user in table["user"]])
    assert np.allclose(table["embedding"].to_numpy(), expected, atol=1e-6)
    items = pl.read_parquet(night / "items" / "*.parquet")
    scores = table["embedding"].to_numpy()[:1] @ items["embedding"].to_numpy().T
    best = items["item"][int(scores.argmax())]
    assert model.recommend(history_of(cycle_data, "u000"), k=1, keep_seen=True).ids == [best]


def test_a_finished_folder_names_its_run_and_data(line: CommandLine, cycle_run: Path, cycle_data: Path) -> None:
    assert "60 embeddings of width 16" in line.does("embed", cycle_run, "--data", cycle_data, "--out", "night")
    night = line.folder / "night"
    manifest = read_manifest(night, "embeddings")
    assert manifest["run"]["folder"] == str(cycle_run)
    assert manifest["data"]["digest"] == segue.Data.open(cycle_data).digest
    assert not (line.folder / "night.partial").exists()
    assert not (night / "items").exists()
    before = {path: path.stat().st_mtime_ns for path in night.rglob("*")}
    line.does("embed", cycle_run, "--data", cycle_data, "--out", "night")  # again: nothing to do
    assert {path: path.stat().st_mtime_ns for path in night.rglob("*")} == before


def test_only_new_events_since(
    line: CommandLine, cycle_run: Path, cycle_data: Path, longer_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line.does("embed", cycle_run, "--data", cycle_data, "--out", "first")
    monkeypatch.setattr(embed_module, "PART_USERS", 7)  # parts may differ from those of the night before
    result = line.answers("embed", cycle_run, "--data", longer_data, "--out", "second", "--since", "first")
    assert {name: result[name] for name in ("users", "rows", "unknown", "unchanged", "parts")} == {
        "users": 62,
        "rows": 4,
        "unknown": 1,
        "unchanged": 57,
        "parts": 9,
    }
    new_rows = users_of(line.folder / "second")
    assert new_rows["user"].to_list() == ["n1", "u003", "u010", "u050"]
    line.does("embed", cycle_run, "--data", longer_data, "--out", "whole")
    whole = users_of(line.folder / "whole").filter(pl.col("user").is_in(new_rows["user"].to_list()))
    assert np.allclose(whole["embedding"].to_numpy(), new_rows["embedding"].to_numpy(), atol=1e-6)
    assert whole.drop("embedding").equals(new_rows.drop("embedding"))
    # The second night has the state of every user, also without a row: the third has nothing to do.
    third = line.answers("embed", cycle_run, "--data", longer_data, "--out", "third", "--since", "second")
    assert (third["rows"], third["unchanged"]) == (0, 62)
    assert users_of(line.folder / "third").schema == new_rows.schema


def test_an_interrupted_command_resumes_without_loss_or_duplicates(
    line: CommandLine, cycle_run: Path, cycle_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted after several files, with a partial file left behind as by kill -9."""
    monkeypatch.setattr(embed_module, "PART_USERS", 25)
    command = ("embed", cycle_run, "--data", cycle_data, "--items", "--out")
    line.does(*command, "whole")
    write = embed_module._write_table
    remaining = 0

    def write_or_interrupt(table: Any, path: Path) -> None:
        nonlocal remaining
        if not remaining:
            path.parent.mkdir(exist_ok=True)
            path.with_name(f".{path.name}.abc").write_bytes(b"half a file")
            raise KeyboardInterrupt
        remaining -= 1
        write(table, path)

    monkeypatch.setattr(embed_module, "_write_table", write_or_interrupt)
    for more in (0, 1, 1, 2, 1, 1):
        remaining = more
        result = line(*command, "night")
        assert result.code == 130
        assert "The same command resumes." in result.err
        assert not (line.folder / "night").exists()
    remaining = 99
    line.does(*command, "night")
    night, whole = line.folder / "night", line.folder / "whole"
    names = sorted(str(path.relative_to(whole)) for path in whole.rglob("*.*"))
    assert sorted(str(path.relative_to(night)) for path in night.rglob("*.*")) == names
    assert len([name for name in names if name.startswith("users")]) == 3
    assert users_of(night).equals(users_of(whole))
    assert line.answers(*command, "night") == {**line.answers(*command, "whole"), "folder": "night"}


def test_kill_9_in_the_middle(
    line: CommandLine, cycle_run: Path, cycle_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embed_module, "PART_USERS", 1)
    command = ("embed", str(cycle_run), "--data", str(cycle_data), "--out", "night")
    process = subprocess.Popen(
        [sys.executable, "-c", ONE_USER_PER_PART, *command],
        cwd=line.folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    )
    users_folder = line.folder / "night.partial" / "users"
    while process.poll() is None and not (users_folder / "part-00002.parquet").exists():
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it finished before the kill"
    times_by_part = {path: path.stat().st_mtime_ns for path in users_folder.glob("part-*.parquet")}
    assert 3 <= len(times_by_part) < USERS
    result = line.answers(*command)
    assert (result["rows"], result["parts"]) == (USERS, USERS)
    assert users_of(line.folder / "night")["user"].to_list() == [f"u{number:03}" for number in range(USERS)]
    for path, modified in times_by_part.items():  # finished parts are not written again
        assert (line.folder / "night" / "users" / path.name).stat().st_mtime_ns == modified


def test_two_commands_into_one_folder(
    line: CommandLine, cycle_run: Path, cycle_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embed_module, "PART_USERS", 25)
    write, n_refused = embed_module._write_table, 0

    def write_after_refusal(table: Any, path: Path) -> None:
        nonlocal n_refused
        with pytest.raises(FolderError, match=r"Another `segue embed` is writing .*night.partial; wait for it"):
            segue.embed(cycle_run, cycle_data, out=line.folder / "night")
        n_refused += 1
        write(table, path)

    monkeypatch.setattr(embed_module, "_write_table", write_after_refusal)
    result = line.answers("embed", cycle_run, "--data", cycle_data, "--out", "night")
    assert (result["rows"], result["parts"], n_refused) == (USERS, 3, 6)
    assert users_of(line.folder / "night")["user"].to_list() == [f"u{number:03}" for number in range(USERS)]


def test_refused_folders(
    line: CommandLine, cycle_run: Path, cycle_data: Path, longer_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("embed", cycle_run, "--data", cycle_data, "--out")
    line.does(*command, "night")
    line.refuses("embed", cycle_run, "--data", longer_data, "--out", "night", says=("exists already", "--out"))
    line.refuses(*command, "more", "--since", cycle_run, says=("is a run folder, expected a folder of embeddings",))
    line.refuses(*command, "more", "--since", "nowhere", says=("nowhere does not exist", "segue embed"))
    shutil.copytree(cycle_run, line.folder / "other")
    manifest = (line.folder / "other" / "manifest.json").read_text()
    weights = read_manifest(cycle_run, "run")["files"]["weights.safetensors"]["sha256"]
    assert weights in manifest
    monkeypatch.setattr("segue.folders.verify_contents", lambda *_, **__: None)  # another run, by its digest
    (line.folder / "other" / "manifest.json").write_text(manifest.replace(weights, "0" * 64))
    line.refuses(
        *("embed", "other", "--data", cycle_data, "--out", "more", "--since", "night"),
        says=("night holds embeddings of another run", "leave --since out"),
    )


def test_an_unfinished_folder_of_another_command_is_refused(
    line: CommandLine, cycle_run: Path, cycle_data: Path, longer_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(embed_module, "_write_table", interrupt)
    assert line("embed", cycle_run, "--data", cycle_data, "--out", "night").code == 130
    for other in (("--data", longer_data), ("--data", cycle_data, "--items")):
        line.refuses(
            *("embed", cycle_run, *other, "--out", "night"), says=("night.partial holds unfinished", "remove it")
        )
