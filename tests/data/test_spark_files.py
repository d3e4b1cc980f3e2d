"""Which files a real Spark session reads, in which order, and by which columns: those of the local engine."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from segue.data.read.blocks import Block
from segue.data.read.columns import Columns
from segue.data.read.log import log_of_inputs, open_inputs, read_blocks, time_type
from segue.data.settings import PrepareSettings
from segue.data.spark.executor import TextFiles, plain_path, run_on_files
from segue.data.spark.reader import SparkSource, open_source
from segue.data.spark.session import explained, open_session
from segue.errors import InputError

pytestmark = pytest.mark.usefixtures("spark")

NOON = 1_719_835_200_000_000  # of 2024-07-01, in microseconds
NAMED = PrepareSettings(user="user", item="item")


def open_logs(source: Any) -> SparkSource:
    with open_session() as spark, explained("prepare the log"):
        return open_source(spark, source, named=set())


def labels(*source: Path | str) -> list[str]:
    return [file.label for file in open_logs(list(source)).files]


def error_of(*source: Path | str) -> str:
    with pytest.raises(InputError) as sentence:
        open_logs(list(source))
    return str(sentence.value)


def users_by_spark(source: Any, settings: PrepareSettings) -> list[tuple[str, int, str]]:
    """File, row and user of every row, as the executors checked them."""
    with open_session() as spark:
        log = open_source(spark, source, named=set())
        columns = log_of_inputs(log.inputs, settings).columns
        checked = log.checked(columns, None).select("file", "row", "user").collect()
    return sorted((log.files[file].label, row, user) for file, row, user in checked)


def users_locally(source: Any, settings: PrepareSettings) -> list[tuple[str, int, str]]:
    log = log_of_inputs(open_inputs(source, named=set()), settings)
    blocks = read_blocks(log.inputs, log.columns.only("user"))
    return sorted((each.label, *row) for each, block in blocks for row in block.frame.select("row", "user").rows())


def csv(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("user,item\nann,tea\n")
    return path


def parquet(path: Path, columns: Mapping[str, Any], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(dict(columns)), path, **options)
    return path


def test_files_come_in_the_order_in_which_they_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a1.csv", "b1.csv"):
        csv(tmp_path / "logs" / name)
    for name in ("p.parquet", "q.parquet"):
        parquet(tmp_path / "logs" / name, {"user": ["ann"], "item": ["tea"]})
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    given = ["../logs/q.parquet", "../logs/b1.csv", "../logs/p.parquet", "../logs/a1.csv"]
    log = open_logs(given)
    assert [file.label for file in log.files] == [each.label for each in log.inputs] == given
    globs = labels(f"{tmp_path}/logs/b*.csv", f"{tmp_path}/logs/a*.csv")
    assert [Path(label).name for label in globs] == ["b1.csv", "a1.csv"]
    assert "given twice" in error_of("../logs/a1.csv", tmp_path / "logs" / "a1.csv")


def test_nothing_is_left_out_without_a_word(tmp_path: Path) -> None:
    """Spark passes over hidden names, and over folders beside files; an empty folder has nothing to pass over."""
    seen, hidden = csv(tmp_path / "log" / "a.csv"), csv(tmp_path / "_b.csv")
    (tmp_path / "empty").mkdir()
    for nothing in (hidden, tmp_path / "empty"):
        assert error_of(seen, nothing).startswith(f"Spark finds no file of a log in {nothing}; it ignores names")
    below = csv(tmp_path / "log" / "2024" / "b.csv")
    assert error_of(tmp_path / "log").startswith(f"{below} is in a folder inside the given one")
    csv(tmp_path / "log" / "_temporary" / "c.csv")
    assert users_by_spark([tmp_path / "log", below.parent], NAMED) == [(str(below), 2, "ann"), (str(seen), 2, "ann")]


def test_each_parquet_file_is_read_by_its_own_columns(tmp_path: Path) -> None:
    folder, item = tmp_path / "log", {"item": ["tea", "jam"]}
    parquet(folder / "p 1.parquet", {"user": pa.array([1, 2], pa.int32()), "value": [0.5, 1.0], **item})
    parquet(folder / "p 2.parquet", {"user": pa.array([1 << 40, 1], pa.int64()), "value": [1, 2], **item})
    parquet(folder / "p 3.parquet", {**item, "value": [1, 2], "user": ["007", "1"]})
    files = sorted(folder.iterdir())
    rows = users_by_spark(folder, NAMED)
    assert rows == users_locally(files, NAMED) and rows[-2:] == [(str(files[2]), 1, "007"), (str(files[2]), 2, "1")]
    parquet(folder / "p 4.parquet", {"user": ["ann", "bob"], **item})
    sentences = []
    for log in (open_logs(folder).inputs, open_inputs(sorted(folder.iterdir()), named=set())):
        with pytest.raises(InputError, match=r"p 4\.parquet has no column 'value'") as sentence:
            log_of_inputs(log, NAMED)
        sentences.append(str(sentence.value))
    assert sentences[0] == sentences[1]


def test_ids_in_the_names_of_folders_are_text(tmp_path: Path) -> None:
    for user in ("007", "7"):
        parquet(tmp_path / "log" / f"user={user}" / "p.parquet", {"item": ["tea"]})
    assert [user for _, _, user in users_by_spark(tmp_path / "log", NAMED)] == ["007", "7"]


def test_times_of_96_bits_are_moments(tmp_path: Path) -> None:
    times = pa.array([NOON, None], pa.timestamp("us"))
    columns = {"user": ["ann", "bob"], "item": ["tea", "jam"], "time": times}
    path = parquet(tmp_path / "old.parquet", columns, use_deprecated_int96_timestamps=True)
    for log in (open_inputs(path, named=set()), open_logs(path).inputs):
        assert time_type(log, log_of_inputs(log, NAMED).columns) == "times with a zone"
        frame = next(log[0].blocks({"time": 2})).frame
        assert frame["time"].dt.epoch("us").to_list() == [NOON, None]


def test_times_in_nanoseconds_are_refused(tmp_path: Path) -> None:
    times = pa.array([1000 * NOON], pa.timestamp("ns"))
    path = parquet(tmp_path / "log.parquet", {"user": ["ann"], "item": ["tea"], "when": times})
    assert error_of(path).startswith(
        f"{path}: the column 'when' holds times in nanoseconds, which Spark does not read;"
    )


def test_a_file_brought_by_spark_keeps_its_name(tmp_path: Path) -> None:
    """Whatever is wrong with it, and whenever that is found out: on an executor it lies under another name."""
    rng = np.random.default_rng(3)
    rows = "".join(f"{rng.bytes(400).hex()},tea\n" for _ in range(10_000))
    packed = gzip.compress(f"user,item\n{rows}".encode(), compresslevel=1)
    columns = Columns({"user": "user", "item": "item"}, ())

    def worked(path: str, content: bytes | None) -> str:
        brought = {} if content is None else {"content": [content]}
        batch = pa.RecordBatch.from_pydict({"path": [path], **brought})
        opener = TextFiles({plain_path(path): (0, path)}, set())
        with pytest.raises(InputError) as sentence:
            list(run_on_files(iter([batch]), opener=opener, columns=columns, task=_nothing))
        return str(sentence.value)

    told = worked("s3a://shop/log.csv.gz", packed[: len(packed) // 2])
    assert told.startswith("s3a://shop/log.csv.gz is cut short: ")
    typed = parquet(tmp_path / "log.csv", {"user": ["ann"], "item": ["tea"]})
    assert worked(f"file:{typed}", None).startswith(f"file:{typed} is Parquet; ")


def _nothing(_number: int | None, _block: Block) -> Iterator[pa.RecordBatch]:
    yield from ()
