from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from event_logs import HEADER, csv_text

from segue.data.read import delimited, json_lines
from segue.data.read.blocks import Malformed
from segue.data.read.log import open_file
from segue.errors import InputError

ROWS = [("ann", "tea", "1"), ("bob", "rye, dark", "2"), ("ann", 'a "b" c', "3"), ("çé☕", "007", "4")]


def read(path: Path, *names: str) -> tuple[list[tuple[Any, ...]], list[Malformed]]:
    """All rows (number, cells …) of the named columns, and the malformed ones."""
    log = open_file(path, named=set())
    positions = {name: log.names.index(name) for name in names or log.names}
    blocks = list(log.blocks(positions))
    rows = pl.concat([block.frame for block in blocks]).rows()
    return rows, [bad for block in blocks for bad in block.malformed]


def read_in_small_blocks(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Read a few bytes and yield a few rows at a time."""
    monkeypatch.setattr(delimited, "READ_BYTES", size)
    monkeypatch.setattr(delimited, "BLOCK_ROWS", 3)


def numbered(rows: Sequence[tuple[str, ...]]) -> list[tuple[Any, ...]]:
    """Rows with the numbers they have under a header."""
    return [(number, *row) for number, row in enumerate(rows, start=2)]


@pytest.mark.parametrize("delimiter", [",", "\t", ";", "|", "^", "\x01"])
def test_any_delimiter(tmp_path: Path, delimiter: str) -> None:
    path = tmp_path / "log"
    path.write_bytes(csv_text(ROWS, delimiter=delimiter).encode())
    assert read(path) == (numbered(ROWS), [])


def test_a_delimiter_of_two_characters_without_a_header(tmp_path: Path) -> None:
    path = tmp_path / "ratings.dat"
    path.write_text("1::1193::5::978300760\n1::661::3::978302109\n2::1193:::4::978298413\n")
    log = open_file(path, named=set())
    assert log.names == ["column 1", "column 2", "column 3", "column 4"]
    rows, _ = read(path)
    assert rows[:2] == [(1, "1", "1193", "5", "978300760"), (2, "1", "661", "3", "978302109")]


def test_a_delimiter_of_two_characters_is_found_across_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_in_small_blocks(monkeypatch, 64)
    rows = [(f"user{number}", f"item{number}", f"{number}") for number in range(100)]
    path = tmp_path / "log"
    path.write_text("".join("::".join(row) + "\n" for row in [HEADER, *rows]))
    assert read(path) == (numbered(rows), [])


@pytest.mark.parametrize("compression", ["gzip", "two gzips", "zstd"])
def test_compressed_files_are_detected_by_their_bytes(tmp_path: Path, compression: str) -> None:
    path, text = tmp_path / "log.csv", csv_text(ROWS).encode()
    if compression == "zstd":
        path.write_bytes(pa.compress(text, codec="zstd", asbytes=True))
    elif compression == "gzip":
        path.write_bytes(gzip.compress(text))
    else:
        path.write_bytes(gzip.compress(text[:20]) + gzip.compress(text[20:]))
    assert read(path) == (numbered(ROWS), [])


def test_a_byte_order_mark_is_no_part_of_the_first_name(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(b"\xef\xbb\xbf" + csv_text(ROWS).encode())
    assert open_file(path, named=set()).names == list(HEADER)
    assert read(path) == (numbered(ROWS), [])


def test_any_line_ending_is_read_and_blank_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(b"user,item,time\r\na,b,1\r\n\r\nc,d,2")
    assert read(path) == ([(2, "a", "b", "1"), (3, "c", "d", "2")], [])


def test_a_quoted_newline_stays_in_its_field(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text('user,item,time\n"two\nlines",b,1\nc,d,2\n')
    assert read(path) == ([(2, "two\nlines", "b", "1"), (3, "c", "d", "2")], [])


def test_ragged_rows_are_reported_with_their_number_and_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_in_small_blocks(monkeypatch, 32)  # so that rows are numbered across blocks
    lines = [f"u{n},i{n},{n}" for n in range(2, 30)]
    lines[3], lines[4], lines[20] = "only,two", "a,b,c,d,e", "x"
    path = tmp_path / "log.csv"
    path.write_text("\n".join(["user,item,time", *lines]) + "\n")
    rows, malformed = read(path)
    assert malformed == [
        Malformed(5, "expected 3 fields, got 2", "only,two"),
        Malformed(6, "expected 3 fields, got 5", "a,b,c,d,e"),
        Malformed(22, "expected 3 fields, got 1", "x"),
    ]
    assert rows == [(n, f"u{n}", f"i{n}", f"{n}") for n in range(2, 30) if n not in (5, 6, 22)]


def test_rows_that_are_not_utf8_are_rejected_and_others_kept(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(b"user,item,time\nann,caf\xe9,1\nbob,caf\xc3\xa9,2\ncid,a,3,\xff\n")
    rows, malformed = read(path)
    assert rows == [(3, "bob", "café", "2")]
    assert {(bad.row, bad.reason) for bad in malformed} == {(2, "not UTF-8"), (4, "expected 3 fields, got 4")}
    assert read(path, "user", "time")[0] == [(2, "ann", "1"), (3, "bob", "2")]  # a column that is not read does no harm


def test_characters_split_across_reads_stay_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_in_small_blocks(monkeypatch, 61)
    rows = [(f"☕é🙂{number}", "ñ" * 5, str(number)) for number in range(200)]
    path = tmp_path / "log.csv"
    path.write_bytes(csv_text(rows).encode())
    assert read(path) == (numbered(rows), [])


@pytest.mark.parametrize("text", ['user,item,time\na,b,"1\nc,d,2\n', 'user,item,time\na,b,1\n"c,d,2\ne,f,3\n'])
def test_a_quote_that_is_never_closed_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "log.csv"
    path.write_text(text)
    with pytest.raises(InputError, match="is never closed"):
        read(path)


def test_a_quote_that_is_never_closed_in_a_long_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_in_small_blocks(monkeypatch, 128)
    path = tmp_path / "log.csv"
    path.write_text(csv_text(ROWS * 10) + '"a,b,1\n' + "c,d,2\n" * 100)
    with pytest.raises(InputError, match="is never closed"):
        read(path)


def test_numeric_column_names_can_be_selected(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("0,1\nann,tea\n")
    assert open_file(path, named={"0", "1"}).names == ["0", "1"]
    assert open_file(path, named=set()).names == ["column 1", "column 2"]


@pytest.mark.parametrize("block", [16 << 20, 40])
def test_json_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(json_lines, "BLOCK_BYTES", block)
    path = tmp_path / "log"
    path.write_text(
        '{"user": "007", "item": 12, "time": 1.5}\n\n{"item": "é\\n", "user": null, "more": [1]}\nnot json\n'
        '{"user": 3.0, "item": 12345678901234567890}\n[1]\n'
    )
    rows, malformed = read(path, "user", "item", "time")
    assert rows == [
        (1, "007", "12", "1.5"),
        (3, None, "é\n", None),
        (5, "3", "12345678901234567890", None),
    ]
    assert malformed == [Malformed(4, "not a JSON object", "not json"), Malformed(6, "not a JSON object", "[1]")]


def test_json_lines_that_are_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b'{"user": "a"}\n{"user": "\xe9"}\n')
    rows, malformed = read(path)
    assert rows == [(1, "a")]
    assert [(bad.row, bad.reason) for bad in malformed] == [(2, "not UTF-8")]


def test_parquet_keeps_types(tmp_path: Path) -> None:
    path = tmp_path / "log"
    pl.DataFrame({"user": [1, 2], "item": ["a", None], "price": [0.5, 2]}).write_parquet(path)
    assert read(path) == ([(1, 1, "a", 0.5), (2, 2, None, 2.0)], [])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (b"user,item,time\n", "has a header .* and no rows under it"),
        (b"user,item,time", "has a header .* and no rows under it"),
        (b"user,item\n1,ann,tea\n2,bob,rye\n", r"no row has as many fields as the first \(2: user, item\)"),
        (gzip.compress(csv_text(ROWS * 5000).encode(), mtime=0)[:-20], "is cut short"),
        (gzip.compress(csv_text(ROWS).encode(), mtime=0)[:12], "is cut short"),
        ("user,item\nann,tea\n".encode("utf-16"), "not UTF-8 but UTF-16.*iconv"),
        ("user,item\nann,tea\nbob,rye\nann,rye\nbob,tea\n".encode("utf-16-le"), "not UTF-8 but UTF-16"),
        (b"PK\x03\x04whatever", "zip archive or a spreadsheet"),
        (b"BZh91AY", "bzip2"),
        (b"PAR1 and then nothing", "damaged Parquet"),
        (b'[{"user": 1}]', "JSON array"),
    ],
)
def test_an_unreadable_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read(path)


def test_a_compressed_file_truncated_far_from_its_beginning_is_refused(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).integers(0, 10**9, (70_000, 3))
    compressed = gzip.compress(csv_text(numbers.tolist()).encode(), compresslevel=1)
    path = tmp_path / "log.csv.gz"
    path.write_bytes(compressed[:-1000])
    assert open_file(path, named=set()).names == list(HEADER)
    with pytest.raises(InputError, match="is cut short"):
        read(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nothing\.csv does not exist"):
        open_file(tmp_path / "nothing.csv", named=set())
    with pytest.raises(InputError, match=r"is a folder; give the files in it, such as .*/\*"):
        open_file(tmp_path, named=set())
