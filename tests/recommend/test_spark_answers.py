"""Batch answers and embeddings on the executors of a real Spark session: the same rows as from this process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import polars as pl
import pytest
import torch
from command_line import CommandLine
from planted_logs import cycle_log
from polars.testing import assert_frame_equal

import segue
from segue.api import embed, recommend_users
from segue.counts.counts import Counts
from segue.counts.features import FEATURES, LAGS, ItemCounts
from segue.counts.neighbours import Neighbours
from segue.data.spark.session import explained
from segue.errors import FolderError, InputError, SettingsError
from segue.folders import read_manifest, write_manifest
from segue.recommend.jobs import batch, users_file
from segue.recommend.jobs import embed as embed_module
from segue.recommend.jobs import spark as spark_module
from segue.recommend.jobs.runner import Arrays, JobContext
from segue.recommend.jobs.spark import SparkRunner
from segue.recommend.recommender import COUNTS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.usefixtures("spark")

FIRST = 1_600_000_000  # first time of the cycle log
USERS = [f"u{number:03}" for number in range(60)]


@pytest.fixture(name="model", scope="module")
def opened_run(cycle_run: Path) -> segue.Recommender:
    return segue.Recommender.open(cycle_run)


@pytest.fixture(name="data", scope="module")
def opened_data(cycle_data: Path) -> segue.Data:
    return segue.Data.open(cycle_data)


@pytest.fixture(name="longer_data", scope="module")
def data_of_a_longer_log(tmp_path_factory: pytest.TempPathFactory) -> segue.Data:
    """The cycle log with one more user and one more event of u007."""
    folder = tmp_path_factory.mktemp("grown")
    more = [f"n1,i0{step},{FIRST + step}" for step in range(5)] + [f"u007,i01,{2 * FIRST}"]
    (folder / "log.csv").write_text(cycle_log() + "\n".join(more) + "\n")
    return segue.prepare(folder / "log.csv", out=folder / "data")


def users_with_times(folder: Path) -> Path:
    """Users and request times as CSV: some unknown users, some times before the first event."""
    rows = [
        f"{user},{FIRST + 3600 * (position % 20)}"
        for position, user in enumerate([*USERS, "ghost", "", "☕"] * 2)
        if user
    ]
    (folder / "moments.csv").write_text("\n".join(["user,time", *rows]) + "\n", encoding="utf-8")
    return folder / "moments.csv"


def users_alone(folder: Path) -> Path:
    """Users alone, as Parquet."""
    pl.DataFrame({"user_id": ["nobody", *reversed(USERS)]}).write_parquet(folder / "plain.parquet")
    return folder / "plain.parquet"


def assert_same_files(one: Path, other: Path) -> None:
    """Both folders have the same tables in files of the same names."""
    names = sorted(str(path.relative_to(one)) for path in one.rglob("*.parquet"))
    assert names == sorted(str(path.relative_to(other)) for path in other.rglob("*.parquet"))
    assert len(names) > 1
    for name in names:
        assert_frame_equal(pl.read_parquet(one / name), pl.read_parquet(other / name), check_exact=False, abs_tol=1e-6)


@pytest.mark.parametrize(
    ("write_users", "options"),
    [
        (users_with_times, {"k": 3}),
        (users_alone, {"k": 9, "keep_seen": True, "exclude": ["i02"], "only": ["i01", "i02", "i05"]}),
    ],
)
def test_every_row_is_answered_as_locally(
    model: segue.Recommender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_users: Any, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(users_file, "CHUNK_ROWS", 20)
    monkeypatch.setattr(batch, "PART_ROWS", 100)
    users = write_users(tmp_path)
    reports: list[int] = []
    local = recommend_users(model, users, out=tmp_path / "here", **options)
    remote = recommend_users(model, users, out=tmp_path / "there", engine="spark", progress=reports.append, **options)
    assert remote == local
    assert local.unknown_users > 0
    assert reports == [*range(20, local.users, 20), local.users]
    assert_same_files(tmp_path / "here", tmp_path / "there")


def test_a_process_opens_the_run_once(model: segue.Recommender, data: segue.Data) -> None:
    def facts_of(context: JobContext, chunk: Arrays) -> Arrays:
        from segue.recommend.jobs import spark

        facts = (os.getpid(), spark._context.cache_info().misses, torch.get_num_threads(), len(context.data.users))
        return {"facts": np.array([*chunk["number"], *facts])}

    chunks = [(number, {"number": np.array([number])}) for number in range(6)]
    answers = list(SparkRunner(model, data).map(facts_of, chunks))
    facts = np.array([answer["facts"] for _, answer in answers])
    assert [number for number, _ in answers] == facts[:, 0].tolist() == list(range(6))
    opened = {(process, times) for process, times in facts[:, 1:3].tolist()}
    processes = {process for process, _ in opened}
    assert os.getpid() not in processes
    assert len(opened) == len(processes) < 6  # no process opened the run twice
    assert set(facts[:, 3].tolist()) == {1}  # spark.task.cpus
    assert set(facts[:, 4].tolist()) == {60}


def test_large_answers_do_not_fill_the_memory(
    model: segue.Recommender, data: segue.Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_module, "LEAST_AHEAD", 4)
    monkeypatch.setattr(spark_module, "MOST_HELD", 2500)
    monkeypatch.setattr(spark_module, "_submit", lambda *_: {"vectors": np.zeros(1000, dtype=np.uint8)})
    chunks_read: list[int] = []

    def chunks() -> Iterator[tuple[int, Arrays]]:
        for number in range(9):
            chunks_read.append(number)
            yield number, {}

    answers = SparkRunner(model, data).map(lambda *_: {}, chunks())
    ahead = [len(chunks_read) - number - 1 for number, _ in answers]
    assert ahead == [4, 3, 2, 2, 2, 2, 2, 1, 0]


def test_an_interrupted_job_resumes_without_loss_or_duplicates(
    model: segue.Recommender, data: segue.Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embed_module, "PART_USERS", 13)
    whole = embed(model, data, out=tmp_path / "whole", items=True)
    write, remaining = embed_module._write_table, 7

    def write_or_interrupt(table: Any, path: Path) -> None:
        nonlocal remaining
        if not remaining:
            raise KeyboardInterrupt
        remaining -= 1
        write(table, path)

    monkeypatch.setattr(embed_module, "_write_table", write_or_interrupt)
    with pytest.raises(KeyboardInterrupt):
        embed(model, data, out=tmp_path / "night", items=True, engine="spark")
    finished = {path: path.stat().st_mtime_ns for path in (tmp_path / "night.partial" / "users").iterdir()}
    assert 1 <= len(finished) < whole.parts == 5
    remaining = 99
    reports: list[tuple[int, int]] = []
    report = embed(
        model,
        data,
        out=tmp_path / "night",
        items=True,
        engine="spark",
        progress=lambda *counts: reports.append(counts),
    )
    assert report == whole
    assert reports == [(min(13 * part, 60), 60) for part in range(len(finished) + 1, 6)]
    assert_same_files(tmp_path / "whole", tmp_path / "night")
    for path, time in finished.items():  # finished parts are not written again
        assert (tmp_path / "night" / "users" / path.name).stat().st_mtime_ns == time
    # A folder from executors serves as --since like one from this process.
    again = embed(model, data, out=tmp_path / "again", since=tmp_path / "night")
    assert (again.rows, again.unchanged) == (0, 60)


def test_only_new_events_since(
    model: segue.Recommender, data: segue.Data, longer_data: segue.Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embed(model, data, out=tmp_path / "first")
    monkeypatch.setattr(embed_module, "PART_USERS", 31)
    local = embed(model, longer_data, out=tmp_path / "here", since=tmp_path / "first")
    remote = embed(model, longer_data, out=tmp_path / "there", since=tmp_path / "first", engine="spark")
    assert remote == local
    assert (remote.rows, remote.unchanged) == (2, 59)
    assert_same_files(tmp_path / "here", tmp_path / "there")


def test_executors_must_see_the_same_folders(
    model: segue.Recommender, data: segue.Data, longer_data: segue.Data, tmp_path: Path
) -> None:
    assert model.folder is not None
    shutil.copytree(model.folder, tmp_path / "run")
    shutil.copytree(data.folder, tmp_path / "data")
    renamed, replaced = segue.Recommender.open(tmp_path / "run"), segue.Data.open(tmp_path / "data")
    users = users_alone(tmp_path)
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    with pytest.raises(FolderError, match=r"executor on .*run does not exist.*Every executor must see the run"):
        recommend_users(renamed, users, out=tmp_path / "out", data=data, engine="spark")
    replaced.verify = lambda: None  # type: ignore[method-assign]  # as on another machine
    shutil.rmtree(tmp_path / "data")
    shutil.copytree(longer_data.folder, tmp_path / "data")
    with pytest.raises(FolderError, match=r"executor on .*data differs from the one here; share the same folders"):
        recommend_users(model, users, out=tmp_path / "out", data=replaced, engine="spark")
    (tmp_path / "elsewhere").rename(tmp_path / "run")
    add_counts(tmp_path / "run")
    with pytest.raises(FolderError, match=r"executor on .*run or .* differs from the one here; share the same folders"):
        recommend_users(renamed, users, out=tmp_path / "out", data=data, engine="spark")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "plain.parquet", "run"]


def add_counts(run: Path) -> None:
    """Give a run folder item-to-item counts, all else being equal."""
    empty = Neighbours(np.zeros(2, np.int64), *np.zeros((2, 0), np.int32))
    counts = Counts(ItemCounts((empty,) * LAGS, empty, np.zeros(1, np.int64)), (1.0,) * len(FEATURES))
    (run / COUNTS).write_bytes(counts.to_bytes())
    facts = read_manifest(run, "run")
    write_manifest(run, "run", {name: fact for name, fact in facts.items() if name not in ("kind", "format", "files")})


def test_bad_rows_are_refused_as_locally(
    model: segue.Recommender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(users_file, "CHUNK_ROWS", 1)
    (tmp_path / "users.csv").write_text("user,time\nu001,2026-01-01\nu002,yesterday\n")
    sentences = []
    engines: tuple[Literal["local", "spark"], ...] = ("local", "spark")
    for engine in engines:
        with pytest.raises(InputError, match="row 3: unreadable time") as error:
            recommend_users(model, tmp_path / "users.csv", out=tmp_path / "out", engine=engine)
        sentences.append(str(error.value))
    assert sentences[0] == sentences[1]
    assert [path.name for path in tmp_path.iterdir()] == ["users.csv"]


def test_executors_without_segue(model: segue.Recommender, data: segue.Data) -> None:
    def not_importable() -> None:
        raise ModuleNotFoundError("No module named 'segue'")

    class Unreadable:
        """A function that an executor without segue cannot unpickle."""

        def __call__(self, context: JobContext, chunk: Arrays) -> Arrays:
            raise NotImplementedError

        def __reduce__(self) -> tuple[Any, ...]:
            return not_importable, ()

    with pytest.raises(InputError, match=r"on the Spark executors has no segue; install segue \d"):
        list(SparkRunner(model, data).map(Unreadable(), [(0, {})]))


def test_an_error_of_spark_is_one_sentence(spark: SparkSession) -> None:
    error = pytest.raises(InputError, match=r"^Spark could not answer \(.*nowhere.*\); read its logs, and try again\.$")
    with error, explained("answer"):
        spark.table("nowhere").collect()


def test_the_commands(line: CommandLine, cycle_run: Path, cycle_data: Path) -> None:
    users = users_with_times(line.folder)
    recommend = ("recommend", cycle_run, "--users", users, "-k", "2")
    answer = line.answers(*recommend, "--out", "there", "--engine", "spark")
    assert answer == {**line.answers(*recommend, "--out", "here"), "folder": "there"}
    embedding = ("embed", cycle_run, "--data", cycle_data)
    answer = line.answers(*embedding, "--out", "night", "--engine", "spark")
    assert answer == {**line.answers(*embedding, "--out", "other"), "folder": "night"}
    assert answer["rows"] == 60
    single = ("recommend", cycle_run, "--history", "i01", "--engine", "spark")
    line.refuses(*single, says=("Spark is only for --users",), code=2)
    line.refuses(
        *embedding, "--out", "more", "--spark-remote", "sc://x", says=("--spark-remote is for --engine spark",)
    )
    line.refuses(*embedding, "--out", "more", "--engine", "flink", says=("'flink'",), code=2)


def test_a_custom_builder_runs_only_locally(cycle_run: Path, cycle_data: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="engine"):
        embed(cycle_run, cycle_data, out=tmp_path / "out", encoder=lambda *_: None, engine="spark")  # type: ignore[arg-type]
