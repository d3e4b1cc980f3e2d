"""Which files a real Spark session reads, in which order, and by which columns: those of the local engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from segue.data.gather import known_log
from segue.data.reader import open_inputs, read_blocks
from segue.data.settings import PrepareSettings
from segue.data.spark_reader import SparkSource, open_source
from segue.data.spark_session import explained, open_session
from segue.errors import InputError

pytestmark = pytest.mark.usefixtures("spark")

NAMED = PrepareSettings(user="user", item="item")


def opened(source: Any) -> SparkSource:
    with open_session() as spark, explained("prepare the log"):
        return open_source(spark, source, named=set())


def labels(*source: Path | str) -> list[str]:
    return [file.label for file in opened(list(source)).files]


def refused(*source: Path | str) -> str:
    with pytest.raises(InputError) as sentence:
        opened(list(source))
    return str(sentence.value)


def users_there(source: Any, settings: PrepareSettings) -> list[tuple[str, int, str]]:
    """File, row and user of every row, as the executors judged them."""
    with open_session() as spark:
        log = open_source(spark, source, named=set())
        columns = known_log(log.inputs, settings).columns
        judged = log.judged(columns, None).select("file", "row", "user").collect()
    return sorted((log.files[file].label, row, user) for file, row, user in judged)


def users_here(source: Any, settings: PrepareSettings) -> list[tuple[str, int, str]]:
    log = known_log(open_inputs(source, named=set()), settings)
    blocks = read_blocks(log.inputs, log.columns, roles=["user"])
    return sorted((block.input.label, *row) for block in blocks for row in block.frame.select("row", "user").rows())


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
    log = opened(given)
    assert [file.label for file in log.files] == [each.label for each in log.inputs] == given
    globs = labels(f"{tmp_path}/logs/b*.csv", f"{tmp_path}/logs/a*.csv")
    assert [Path(label).name for label in globs] == ["b1.csv", "a1.csv"]
    assert "given twice" in refused("../logs/a1.csv", tmp_path / "logs" / "a1.csv")
