"""Files, their order and their columns on a real Spark session equal those of the local engine."""

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
    with pytest.raises(InputError) as error:
        open_logs(list(source))
    return str(error.value)


def users_by_spark(source: Any, settings: PrepareSettings) -> list[tuple[str, int, str]]:
    """File, row and user of every row, as the executors checked them."""
    with open_session() as spark:
        log = open_source(spark, source, named=set())
        columns = log_of_inputs(log.inputs, settings).columns
        rows = log.checked(columns, None).select("file", "row", "user").collect()
    return sorted((log.files[file].label, row, user) for file, row, user in rows)


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


def test_files_keep_the_order_of_the_argument(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a1.csv", "b1.csv"):
        csv(tmp_path / "logs" / name)
    for name in ("p.parquet", "q.parquet"):
        parquet(tmp_path / "logs" / name, {"user": ["ann"], "item": ["tea"]})
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    paths = ["../logs/q.parquet", "../logs/b1.csv", "../logs/p.parquet", "../logs/a1.csv"]
    log = open_logs(paths)
    assert [file.label for file in log.files] == [each.label for each in log.inputs] == paths
    globs = labels(f"{tmp_path}/logs/b*.csv", f"{tmp_path}/logs/a*.csv")
    assert [Path(label).name for label in globs] == ["b1.csv", "a1.csv"]
    assert "given twice" in error_of("../logs/a1.csv", tmp_path / "logs" / "a1.csv")


def test_a_file_that_spark_would_ignore_is_refused(tmp_path: Path) -> None:
    """Spark ignores hidden names, and subfolders beside files; an empty folder has nothing to ignore."""
    visible, hidden = csv(tmp_path / "log" / "a.csv"), csv(tmp_path / "_b.csv")
    (tmp_path / "empty").mkdir()
    for path in (hidden, tmp_path / "empty"):
        assert error_of(visible, path).startswith(f"Spark finds no file of a log in {path}; it ignores names")
    nested = csv(tmp_path / "log" / "2024" / "b.csv")
    assert error_of(tmp_path / "log").startswith(f"{nested} is in a folder inside the given one")
    csv(tmp_path / "log" / "_temporary" / "c.csv")
    assert users_by_spark([tmp_path / "log", nested.parent], NAMED) == [
        (str(nested), 2, "ann"),
        (str(visible), 2, "ann"),
    ]


def test_each_parquet_file_is_read_by_its_own_columns(tmp_path: Path) -> None:
    folder, item = tmp_path / "log", {"item": ["tea", "jam"]}
    parquet(folder / "p 1.parquet", {"user": pa.array([1, 2], pa.int32()), "value": [0.5, 1.0], **item})
    parquet(folder / "p 2.parquet", {"user": pa.array([1 << 40, 1], pa.int64()), "value": [1, 2], **item})
    parquet(folder / "p 3.parquet", {**item, "value": [1, 2], "user": ["007", "1"]})
    files = sorted(folder.iterdir())
    rows = users_by_spark(folder, NAMED)
    assert rows == users_locally(files, NAMED) and rows[-2:] == [(str(files[2]), 1, "007"), (str(files[2]), 2, "1")]
    parquet(folder / "p 4.parquet", {"user": ["ann", "bob"], **item})
    messages = []
    for log in (open_logs(folder).inputs, open_inputs(sorted(folder.iterdir()), named=set())):
        with pytest.raises(InputError, match=r"p 4\.parquet has no column 'value'") as error:
            log_of_inputs(log, NAMED)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def test_ids_in_the_names_of_folders_are_text(tmp_path: Path) -> None:
    for user in ("007", "7"):
        parquet(tmp_path / "log" / f"user={user}" / "p.parquet", {"item": ["tea"]})
    assert [user for _, _, user in users_by_spark(tmp_path / "log", NAMED)] == ["007", "7"]


def test_times_of_96_bits_are_timestamps(tmp_path: Path) -> None:
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


def test_a_file_from_spark_keeps_its_name(tmp_path: Path) -> None:
    """In every error message: on an executor the file has another name."""
    rng = np.random.default_rng(3)
    rows = "".join(f"{rng.bytes(400).hex()},tea\n" for _ in range(10_000))
    packed = gzip.compress(f"user,item\n{rows}".encode(), compresslevel=1)
    columns = Columns({"user": "user", "item": "item"}, ())

    def executor_error(path: str, content: bytes | None) -> str:
        extra = {} if content is None else {"content": [content]}
        batch = pa.RecordBatch.from_pydict({"path": [path], **extra})
        opener = TextFiles({plain_path(path): (0, path)}, set())
        with pytest.raises(InputError) as error:
            list(run_on_files(iter([batch]), opener=opener, columns=columns, task=_nothing))
        return str(error.value)

    message = executor_error("s3a://shop/log.csv.gz", packed[: len(packed) // 2])
    assert message.startswith("s3a://shop/log.csv.gz is cut short: ")
    parquet_file = parquet(tmp_path / "log.csv", {"user": ["ann"], "item": ["tea"]})
    assert executor_error(f"file:{parquet_file}", None).startswith(f"file:{parquet_file} is Parquet; ")


def _nothing(_number: int | None, _block: Block) -> Iterator[pa.RecordBatch]:
    yield from ()
