"""`segue embed` night after night: every user's embedding, kills and resumes."""

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
KILLED_IN_THE_MIDDLE = (
    "import segue.recommend.jobs.embed as embed; embed.PART_USERS = 1; from segue.cli import main; main()"  # many parts
)


def users_of(folder: Path) -> pl.DataFrame:
    return pl.read_parquet(folder / "users" / "*.parquet")


def own_history(data: Path, user: str) -> list[Any]:
    opened = segue.load(data)
    assert isinstance(opened, segue.Data)
    number = opened.users.number(user)
    assert number is not None
    begin, end = opened.sequences.offsets[number : number + 2]
    return opened.vocabulary.ids(np.asarray(opened.sequences.items[begin:end]))


@pytest.fixture(name="grown", scope="module")
def grown_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The next day: u003 and u050 went on, u010 has an event more in the past, n1 and n2 are new; n2 knows only an item
    that the run does not."""
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
    said = line.answers("embed", cycle_run, "--data", cycle_data, "--out", "night", "--items")
    assert said == {"folder": "night", "users": USERS, "rows": USERS, "unknown": 0, "unchanged": 0, "items": 12} | {
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
    own = model.embed([own_history(cycle_data, user) for user in table["user"]])
    assert np.allclose(table["embedding"].to_numpy(), own, atol=1e-6)
    items = pl.read_parquet(night / "items" / "*.parquet")
    scores = table["embedding"].to_numpy()[:1] @ items["embedding"].to_numpy().T
    best = items["item"][int(scores.argmax())]
    assert model.recommend(own_history(cycle_data, "u000"), k=1, keep_seen=True).ids == [best]


def test_a_finished_folder_says_where_it_came_from(line: CommandLine, cycle_run: Path, cycle_data: Path) -> None:
    assert "60 embeddings of width 16" in line.does("embed", cycle_run, "--data", cycle_data, "--out", "night")
    night = line.folder / "night"
    manifest = read_manifest(night, "embeddings")
    assert manifest["run"]["folder"] == str(cycle_run)
    assert manifest["data"]["digest"] == segue.Data.open(cycle_data).digest
    assert not (line.folder / "night.partial").exists()
    assert not (night / "items").exists()
    before = {path: path.stat().st_mtime_ns for path in night.rglob("*")}
    line.does("embed", cycle_run, "--data", cycle_data, "--out", "night")  # once more: there is nothing to do
    assert {path: path.stat().st_mtime_ns for path in night.rglob("*")} == before


def test_only_new_events_since(
    line: CommandLine, cycle_run: Path, cycle_data: Path, grown: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line.does("embed", cycle_run, "--data", cycle_data, "--out", "first")
    monkeypatch.setattr(embed_module, "PART_USERS", 7)  # parts need not be those of the night before
    said = line.answers("embed", cycle_run, "--data", grown, "--out", "second", "--since", "first")
    assert {name: said[name] for name in ("users", "rows", "unknown", "unchanged", "parts")} == {
        "users": 62,
        "rows": 4,
        "unknown": 1,
        "unchanged": 57,
        "parts": 9,
    }
    changed = users_of(line.folder / "second")
    assert changed["user"].to_list() == ["n1", "u003", "u010", "u050"]
    line.does("embed", cycle_run, "--data", grown, "--out", "whole")
    whole = users_of(line.folder / "whole").filter(pl.col("user").is_in(changed["user"].to_list()))
    assert np.allclose(whole["embedding"].to_numpy(), changed["embedding"].to_numpy(), atol=1e-6)
    assert whole.drop("embedding").equals(changed.drop("embedding"))
    # The second night knew everyone, also those of whom it wrote nothing: the third has nothing to do.
    third = line.answers("embed", cycle_run, "--data", grown, "--out", "third", "--since", "second")
    assert (third["rows"], third["unchanged"]) == (0, 62)
    assert users_of(line.folder / "third").schema == changed.schema


def test_a_kill_anywhere_loses_and_doubles_nothing(
    line: CommandLine, cycle_run: Path, cycle_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after each file in turn, with what was being written left behind as kill -9 leaves it."""
    monkeypatch.setattr(embed_module, "PART_USERS", 25)
    command = ("embed", cycle_run, "--data", cycle_data, "--items", "--out")
    line.does(*command, "whole")
    write = embed_module._write_table
    left = 0

    def killed(table: Any, path: Path) -> None:
        nonlocal left
        if not left:
            path.parent.mkdir(exist_ok=True)
            path.with_name(f".{path.name}.abc").write_bytes(b"half a file")
            raise KeyboardInterrupt
        left -= 1
        write(table, path)

    monkeypatch.setattr(embed_module, "_write_table", killed)
    for more in (0, 1, 1, 2, 1, 1):
        left = more
        said = line(*command, "night")
        assert said.code == 130
        assert "The same command resumes." in said.err
        assert not (line.folder / "night").exists()
    left = 99
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
        [sys.executable, "-c", KILLED_IN_THE_MIDDLE, *command],
        cwd=line.folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    )
    done = line.folder / "night.partial" / "users"
    while process.poll() is None and not (done / "part-00002.parquet").exists():
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it was over before it could be killed"
    finished = {path: path.stat().st_mtime_ns for path in done.glob("part-*.parquet")}
    assert 3 <= len(finished) < USERS
    said = line.answers(*command)
    assert (said["rows"], said["parts"]) == (USERS, USERS)
    assert users_of(line.folder / "night")["user"].to_list() == [f"u{number:03}" for number in range(USERS)]
    for path, moment in finished.items():  # what was done was not done again
        assert (line.folder / "night" / "users" / path.name).stat().st_mtime_ns == moment


def test_two_at_a_time_into_one_folder(
    line: CommandLine, cycle_run: Path, cycle_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embed_module, "PART_USERS", 25)
    write, refused = embed_module._write_table, 0

    def meanwhile(table: Any, path: Path) -> None:
        nonlocal refused
        with pytest.raises(FolderError, match=r"Another `segue embed` is writing .*night.partial; wait for it"):
            segue.embed(cycle_run, cycle_data, out=line.folder / "night")
        refused += 1
        write(table, path)

    monkeypatch.setattr(embed_module, "_write_table", meanwhile)
    said = line.answers("embed", cycle_run, "--data", cycle_data, "--out", "night")
    assert (said["rows"], said["parts"], refused) == (USERS, 3, 6)
    assert users_of(line.folder / "night")["user"].to_list() == [f"u{number:03}" for number in range(USERS)]


def test_what_is_refused(
    line: CommandLine, cycle_run: Path, cycle_data: Path, grown: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("embed", cycle_run, "--data", cycle_data, "--out")
    line.does(*command, "night")
    line.refuses("embed", cycle_run, "--data", grown, "--out", "night", says=("exists already", "--out"))
    line.refuses(*command, "more", "--since", cycle_run, says=("is a run folder, expected a folder of embeddings",))
    line.refuses(*command, "more", "--since", "nowhere", says=("nowhere does not exist", "segue embed"))
    shutil.copytree(cycle_run, line.folder / "other")
    manifest = (line.folder / "other" / "manifest.json").read_text()
    weights = read_manifest(cycle_run, "run")["files"]["weights.safetensors"]["sha256"]
    assert weights in manifest
    monkeypatch.setattr("segue.folders.verify_contents", lambda *_, **__: None)  # another run, told by its digest
    (line.folder / "other" / "manifest.json").write_text(manifest.replace(weights, "0" * 64))
    line.refuses(
        *("embed", "other", "--data", cycle_data, "--out", "more", "--since", "night"),
        says=("night holds embeddings of another run", "leave --since out"),
    )


def test_unfinished_work_of_something_else_is_refused(
    line: CommandLine, cycle_run: Path, cycle_data: Path, grown: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(embed_module, "_write_table", stopped)
    assert line("embed", cycle_run, "--data", cycle_data, "--out", "night").code == 130
    for other in (("--data", grown), ("--data", cycle_data, "--items")):
        line.refuses(
            *("embed", cycle_run, *other, "--out", "night"), says=("night.partial holds unfinished", "remove it")
        )
