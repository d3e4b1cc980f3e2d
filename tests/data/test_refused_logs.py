"""An unusable log is refused with an error message, before anything is written."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from event_logs import histories, write_csv

from segue import folders
from segue.data.dataset import Data
from segue.data.prepare import prepare
from segue.data.write import writer
from segue.errors import FolderError, InputError, SegueError, SettingsError


def good_rows(count: int = 1000) -> list[list[Any]]:
    """Valid rows: 20 users, 10 items."""
    return [[f"u{n % 20}", f"i{n % 10}", 1_600_000_000 + n] for n in range(count)]


def error_of(tmp_path: Path, source: Any, **options: Any) -> str:
    """The message with which a log is refused; no file remains."""
    folder = tmp_path / "made"
    with pytest.raises(SegueError) as error:
        prepare(source, out=folder / "data", **options)
    assert not folder.exists() or list(folder.iterdir()) == []
    return str(error.value)


def test_unreadable_times_in_a_few_rows_are_rejected_and_in_many_stop_the_run(tmp_path: Path) -> None:
    rows = good_rows()
    for row in rows[::200]:
        row[2] = "soon"
    data = prepare(write_csv(tmp_path / "few.csv", rows))
    assert data.manifest["counts"]["rejected"] == {"unreadable time": 5}
    for row in rows[::20]:
        row[2] = "soon"
    message = error_of(tmp_path, write_csv(tmp_path / "many.csv", rows))
    assert message.startswith("50 of 1000 rows (5.0%) cannot be used, more than --max-rejected 0.01 allows")
    assert "50 × unreadable time" in message and "many.csv row 2: 'u0, i0, soon'" in message


def test_exactly_the_allowed_share_passes(tmp_path: Path) -> None:
    rows = good_rows()
    for row in rows[:10]:
        row[0] = ""
    assert prepare(write_csv(tmp_path / "log.csv", rows)).manifest["counts"]["rejected"] == {"no user": 10}
    assert "10 × no user" in error_of(tmp_path, tmp_path / "log.csv", max_rejected="0.9%")
    assert prepare(tmp_path / "log.csv", max_rejected="1%").manifest["counts"]["good"] == 990


def test_seconds_and_milliseconds_in_one_column(tmp_path: Path) -> None:
    rows = good_rows()
    for row in rows[::4]:
        row[2] *= 1000
    message = error_of(tmp_path, write_csv(tmp_path / "log.csv", rows))
    assert "250 × time is not in seconds" in message
    assert "mixes seconds (75.0%) and milliseconds (25.0%)" in message


def test_times_in_an_unknown_format_ask_for_time_format(tmp_path: Path) -> None:
    rows = [[user, item, "12/31/2010 8:26"] for user, item, _ in good_rows()]
    log = write_csv(tmp_path / "log.csv", rows)
    assert "--time-format" in error_of(tmp_path, log)
    assert "1000 × unreadable time" in error_of(tmp_path, log, time_format="%d/%m/%Y %H:%M")
    assert prepare(log, time_format="%m/%d/%Y %H:%M").manifest["counts"]["good"] == 1000


def test_a_log_that_is_not_utf8(tmp_path: Path) -> None:
    rows = [f"u{n % 20},caf\u00e9{n % 10},{1_600_000_000 + n}" for n in range(1000)]
    log = tmp_path / "log.csv"
    log.write_bytes("\n".join(["user,item,time", *rows]).encode("cp1252"))
    message = error_of(tmp_path, log)
    assert "1000 × not UTF-8" in message and "iconv -f WINDOWS-1252 -t UTF-8" in message
    assert "row 2: 'u0 caf\ufffd0 1600000000'" in message


def test_a_log_with_one_row_that_is_not_utf8(tmp_path: Path) -> None:
    log = write_csv(tmp_path / "log.csv", good_rows())
    log.write_bytes(log.read_bytes() + b"u\xe9,i0,1600000000\n")
    data = prepare(log)
    assert data.manifest["counts"]["rejected"] == {"not UTF-8": 1}


def test_every_user_below_the_minimum(tmp_path: Path) -> None:
    message = error_of(tmp_path, write_csv(tmp_path / "log.csv", good_rows(40)))
    assert message.startswith("No user is left: of 20 users and 10 items with 40 events, 0 users have the 5 events")
    assert "the most active has 2" in message and "--min-user" in message and "--min-item" in message


def test_one_user_is_a_log(tmp_path: Path) -> None:
    log = write_csv(tmp_path / "log.csv", [("only", f"i{n % 2}", n) for n in range(10)])
    assert list(histories(prepare(log))) == ["only"]


def test_one_item_is_not_a_log(tmp_path: Path) -> None:
    log = write_csv(tmp_path / "log.csv", [(f"u{n % 2}", "only", n) for n in range(20)])
    assert "Only one item is left ('only')" in error_of(tmp_path, log)


def test_a_log_without_a_valid_row_is_refused(tmp_path: Path) -> None:
    log = write_csv(tmp_path / "log.csv", [("", "x", 1), ("", "y", 2)])
    assert "2 × no user" in error_of(tmp_path, log)
    assert error_of(tmp_path, log, max_rejected=1.0).startswith("No row of the log can be used")


def test_a_log_without_a_header(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("".join(f"{user},{item},{time}\n" for user, item, time in good_rows()))
    message = error_of(tmp_path, log)
    assert "'column 1', 'column 2', 'column 3'" in message and "first row looks like data" in message
    data = prepare(log, user="column 1", item="column 2", time="column 3")
    assert data.manifest["counts"]["rows"] == 1000


def test_a_column_that_only_the_first_file_has(tmp_path: Path) -> None:
    first = write_csv(tmp_path / "a.csv", good_rows())
    second = write_csv(tmp_path / "b.csv", good_rows(), header=("user", "thing", "time"))
    assert "b.csv has no column 'item' for --item; it has 'user', 'thing', 'time'" in error_of(
        tmp_path, [first, second]
    )


def test_an_existing_folder_is_refused_before_reading(tmp_path: Path) -> None:
    log = write_csv(tmp_path / "log.csv", good_rows())
    prepare(log, out=tmp_path / "data")
    with pytest.raises(FolderError, match=r"exists already.*--overwrite"):
        prepare(tmp_path / "missing.csv", out=tmp_path / "data")
    log = write_csv(tmp_path / "log.csv", good_rows(600))
    assert prepare(log, out=tmp_path / "data", overwrite=True).manifest["counts"]["events"] == 600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "log.csv"]


def test_a_refused_log_leaves_the_old_folder_unchanged(tmp_path: Path) -> None:
    old = prepare(write_csv(tmp_path / "log.csv", good_rows()), out=tmp_path / "data")
    with pytest.raises(InputError):
        prepare(write_csv(tmp_path / "bad.csv", good_rows(40)), out=tmp_path / "data", overwrite=True)
    assert Data.open(tmp_path / "data").manifest == old.manifest


@pytest.mark.parametrize(
    ("number", "message"),
    [(errno.ENOSPC, "disk is full"), (errno.EACCES, "No permission"), (errno.EROFS, "No permission")],
)
def test_a_disk_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, message: str
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, "refused")

    monkeypatch.setattr(writer._Array, "append", refuse)
    assert message in error_of(tmp_path, write_csv(tmp_path / "log.csv", good_rows()))


def test_a_disk_that_is_full_when_tables_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "refused")

    monkeypatch.setattr(pl.DataFrame, "write_parquet", refuse)
    assert "disk is full" in error_of(tmp_path, write_csv(tmp_path / "log.csv", good_rows()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_user": 0}, "--min-user is 0"),
        ({"max_rejected": "some"}, "--max-rejected is 'some'"),
        ({"max_rejected": 2}, "--max-rejected is 2"),
        ({"split": "random"}, "--split is 'random'"),
        ({"split": "time:"}, "--split time: needs a date or number"),
        ({"split": "time:soon"}, "expected a date such as time:2024-05-01"),
        ({"time_zone": "Mars/Base"}, "--time-zone 'Mars/Base' is not known"),
        ({"time_format": "%H"}, "--time-format '%H' gives no date"),
    ],
)
def test_invalid_settings_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as error:
        prepare(write_csv(tmp_path / "log.csv", good_rows()), **options)
    assert message in str(error.value)


def test_a_time_format_for_typed_dates_is_refused() -> None:
    table = pl.DataFrame({"user": ["a"], "item": ["x"], "time": pl.Series(["2024-01-01"]).str.to_date()})
    with pytest.raises(SettingsError, match="this log holds dates: leave it out"):
        prepare(table, time_format="%Y-%m-%d")


@pytest.mark.parametrize("source", [42, [], [1], None])
def test_other_types_are_no_log(source: Any) -> None:
    with pytest.raises(InputError, match="Expected a path, several paths, or a pandas, polars or Arrow table"):
        prepare(source)


def test_a_column_of_a_type_that_cannot_be_an_id() -> None:
    table = pl.DataFrame({"user": [True], "item": ["x"]})
    with pytest.raises(InputError, match="'user' has the type Boolean, which cannot be the user"):
        prepare(table)


@pytest.mark.parametrize(
    "table",
    [
        pa.table([pa.array(["a"]), pa.array(["x"]), pa.array(["y"])], names=["user", "item", "item"]),
        pd.DataFrame([["a", "x", "y"]], columns=["user", "item", "item"]),
        pd.DataFrame([["a", "x"]]),
        pl.DataFrame({"user": [], "item": []}),
        pd.DataFrame({"user": ["a", 7], "item": ["x", "y"]}),
    ],
)
def test_tables_that_cannot_be_used(table: Any) -> None:
    with pytest.raises(InputError, match="the table"):
        prepare(table)


def test_a_split_by_time_needs_times(tmp_path: Path) -> None:
    log = write_csv(tmp_path / "log.csv", [row[:2] for row in good_rows()], header=("user", "item"))
    assert "--split time:… needs times" in error_of(tmp_path, log, split="time:2024-01-01")


@pytest.mark.parametrize(("when", "message"), [("2030-01-01", "so there is no test"), ("2010-01-01", "choose a later")])
def test_a_split_that_leaves_a_part_empty(tmp_path: Path, when: str, message: str) -> None:
    assert message in error_of(tmp_path, write_csv(tmp_path / "log.csv", good_rows()), split=f"time:{when}")


def test_a_data_folder_of_another_format_or_damaged(tmp_path: Path) -> None:
    data = prepare(write_csv(tmp_path / "log.csv", good_rows()), out=tmp_path / "data")
    items = (data.folder / "items.npy").read_bytes()
    (data.folder / "items.npy").write_bytes(items[:-1] + bytes([items[-1] ^ 1]))
    with pytest.raises(FolderError, match=r"items\.npy is damaged"):
        Data.open(data.folder).verify()
    (data.folder / "items.npy").write_bytes(items[:-4])
    with pytest.raises(FolderError, match=r"items\.npy has .* bytes instead of"):
        Data.open(data.folder)
    (data.folder / "items.npy").write_bytes(items)
    folders.write_json(data.folder / folders.MANIFEST, {**data.manifest, "format": 99})
    with pytest.raises(FolderError, match="has data format 99, this segue reads format 2"):
        Data.open(data.folder)
