"""Invalid files and options of the user, through the command line.

Each refusal is one or two sentences on standard error with what came and how to fix it; there is no other output and
no traceback, the exit code is right, and every file and folder is unchanged (`CommandLine.refuses` checks that).
"""

from __future__ import annotations

import csv
import errno
import gzip
import io
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from command_line import CommandLine, Said, assert_refused, object_of, tree

Command = Callable[..., subprocess.CompletedProcess[str]]

HEADER = "user,item,time"
BEGIN = 1_700_000_000


def rows(*, users: int = 40, events: int = 25, items: int = 20) -> list[str]:
    """Good events, all different, 1,000 by default."""
    return [
        f"u{user:02},i{(user + step) % items:02},{BEGIN + 60 * step + user}"
        for user in range(users)
        for step in range(events)
    ]


def write_log(folder: Path, lines: list[str], *, header: str = HEADER, name: str = "log.csv") -> Path:
    path = folder / name
    path.write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")
    return path


def with_cell(row: str, position: int, text: str) -> str:
    cells = row.split(",")
    cells[position] = text
    return ",".join(cells)


def rejected_rows(folder: Path) -> list[dict[str, Any]]:
    return list(pl.read_parquet(folder / "rejected.parquet").to_dicts())


# --- files that cannot be read ------------------------------------------------------------------------------------


def test_missing_file(line: CommandLine, cycle_data: Path, cycle_run: Path) -> None:
    write_log(line.folder, rows())
    line.refuses("prepare", "nowhere.csv", "--out", "data", says=("nowhere.csv does not exist",))
    line.refuses("prepare", "log.csv", "nowhere.csv", "--out", "data", says=("nowhere.csv does not exist",))
    line.refuses("prepare", "log.csv", "--items", "no.csv", "--out", "data", says=("no.csv does not exist",))
    line.refuses("train", "nowhere", "--out", "run", says=("nowhere does not exist", "segue prepare"))
    line.refuses("train", cycle_data, "--out", "run", "--recipe", "no.toml", says=("no.toml does not exist",))
    for command in (["evaluate"], ["compare"], ["recommend", "--history", "a"], ["serve", "--port", "0"]):
        line.refuses(command[0], "nowhere", *command[1:], says=("nowhere does not exist", "segue train"))
    line.refuses("similar", "nowhere", "i01", says=("nowhere does not exist", "segue train"))
    line.refuses("evaluate", cycle_run, "--data", "nowhere", says=("nowhere does not exist", "segue prepare"))
    line.refuses("recommend", cycle_run, "--history", "@no.txt", says=("no.txt", "No such file"))
    line.refuses("recommend", cycle_run, "--users", "no.csv", "--out", "answers", says=("no.csv does not exist",))


def test_missing_file_in_a_real_process(segue_command: Command, tmp_path: Path) -> None:
    process = segue_command("prepare", "nowhere.csv", "--out", "data", cwd=tmp_path)
    assert_refused(Said(process.returncode, process.stdout, process.stderr), "nowhere.csv does not exist")
    assert tree(tmp_path) == {}


def test_folder_instead_of_a_file(line: CommandLine, cycle_run: Path) -> None:
    (line.folder / "logs").mkdir()
    line.refuses("prepare", "logs", "--out", "data", says=("logs is a folder", "give the files in it"))
    line.refuses("recommend", cycle_run, "--history", "@logs", says=("logs", "directory"))
    line.refuses("recommend", cycle_run, "--users", "logs", "--out", "answers", says=("logs is a folder",))


def test_file_instead_of_a_folder(line: CommandLine) -> None:
    write_log(line.folder, rows())
    line.refuses("train", "log.csv", "--out", "run", says=("log.csv is not a data folder", "segue prepare"))
    line.refuses("evaluate", "log.csv", says=("log.csv is not a run folder", "segue train"))


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xef\xbb\xbf"])
def test_empty_file(line: CommandLine, content: bytes) -> None:
    (line.folder / "log.csv").write_bytes(content)
    line.refuses("prepare", "log.csv", "--out", "data", says=("log.csv is empty", "expected a log with a header"))


def test_empty_packed_file(line: CommandLine) -> None:
    (line.folder / "log.csv.gz").write_bytes(gzip.compress(b""))
    line.refuses("prepare", "log.csv.gz", "--out", "data", says=("log.csv.gz is empty",))


def test_header_only(line: CommandLine) -> None:
    write_log(line.folder, [])
    line.refuses("prepare", "log.csv", "--out", "data", says=("log.csv", "user, item, time", "no rows"))
    pl.DataFrame(schema={"user": pl.String, "item": pl.String}).write_parquet("log.parquet")
    line.refuses("prepare", "log.parquet", "--out", "data", says=("log.parquet", "user, item", "no rows"))


def test_not_utf8(line: CommandLine) -> None:
    lines = [with_cell(row, 1, "café") if index % 10 == 0 else row for index, row in enumerate(rows())]
    (line.folder / "latin.csv").write_bytes("\n".join([HEADER, *lines]).encode("latin-1"))
    line.refuses("prepare", "latin.csv", "--out", "data", says=("100 of 1000 rows", "not UTF-8", "iconv -f"))
    (line.folder / "wide.csv").write_bytes("\n".join([HEADER, *lines]).encode("utf-16"))
    line.refuses("prepare", "wide.csv", "--out", "data", says=("wide.csv is not UTF-8 but UTF-16", "iconv -f UTF-16"))


def test_one_row_that_is_not_utf8_is_rejected(line: CommandLine) -> None:
    lines = rows()
    text = "\n".join([HEADER, *lines[:500], "u00,caf#,1700000001", *lines[500:]]) + "\n"
    (line.folder / "log.csv").write_bytes(text.encode().replace(b"#", b"\xe9"))
    counts = line.answers("prepare", "log.csv", "--out", "data")["counts"]
    assert counts["rejected"] == {"not UTF-8": 1}
    assert [(row["row"], row["reason"]) for row in rejected_rows(line.folder / "data")] == [(502, "not UTF-8")]


def test_byte_order_mark(line: CommandLine) -> None:
    write_log(line.folder, rows())
    with_bom = line.folder / "marked.csv"
    with_bom.write_bytes(b"\xef\xbb\xbf" + (line.folder / "log.csv").read_bytes())
    without_bom = line.answers("prepare", "log.csv", "--out", "plain")
    for name, options in (("found", ()), ("named", ("--user", "user"))):
        body = line.answers("prepare", "marked.csv", "--out", name, *options)
        assert body["log"]["columns"]["user"] == "user"
        assert {file: body["files"][file] for file in without_bom["files"]} == without_bom["files"]


@pytest.mark.parametrize("pack", ["gzip", "zstd"])
def test_packed_file_cut_short(line: CommandLine, pack: str) -> None:
    path = write_log(line.folder, rows())
    whole = gzip.compress(path.read_bytes()) if pack == "gzip" else _zstd(path.read_bytes())
    (line.folder / "log.packed").write_bytes(whole)
    assert line.answers("prepare", "log.packed", "--out", "whole")["counts"]["events"] == 1000
    for length in (len(whole) // 2, len(whole) - 4):
        (line.folder / "log.packed").write_bytes(whole[:length])
        line.refuses("prepare", "log.packed", "--out", "data", says=("log.packed is cut short", "again"))


def _zstd(content: bytes) -> bytes:
    import pyarrow as pa

    packed: bytes = pa.compress(content, codec="zstd", asbytes=True)
    return packed


def test_parquet_cut_short(line: CommandLine) -> None:
    pl.read_csv(write_log(line.folder, rows())).write_parquet("log.parquet")
    whole = Path("log.parquet").read_bytes()
    Path("log.parquet").write_bytes(whole[: len(whole) // 2])
    line.refuses("prepare", "log.parquet", "--out", "data", says=("log.parquet is a damaged Parquet file",))


@pytest.mark.parametrize(
    ("head", "says"), [(b"PK\x03\x04", "zip archive"), (b"BZh91AY", "bzip2"), (b"\xfd7zXZ\x00", "xz")]
)
def test_unsupported_compression(line: CommandLine, head: bytes, says: str) -> None:
    (line.folder / "log.csv").write_bytes(head + bytes(range(256)))
    line.refuses("prepare", "log.csv", "--out", "data", says=("log.csv is", says, "decompress it"))


# --- rows that cannot be used -------------------------------------------------------------------------------------


def test_a_few_ragged_rows_are_rejected(line: CommandLine) -> None:
    lines = rows()
    lines[10], lines[20] = lines[10] + ",more", "u00,i01"
    write_log(line.folder, lines)
    counts = line.answers("prepare", "log.csv", "--out", "data")["counts"]
    assert counts["rejected"] == {"expected 3 fields, got 2": 1, "expected 3 fields, got 4": 1}
    rejections = [(Path(row["file"]).name, row["row"], row["text"]) for row in rejected_rows(line.folder / "data")]
    assert rejections == [("log.csv", 12, lines[10]), ("log.csv", 22, "u00,i01")]


def test_many_ragged_rows_stop(line: CommandLine) -> None:
    lines = [row + ",more" if index % 20 == 0 else row for index, row in enumerate(rows())]
    write_log(line.folder, lines)
    says = ("50 of 1000 rows (5.0%)", "--max-rejected", "nothing was written", "expected 3 fields, got 4", "row 2")
    line.refuses("prepare", "log.csv", "--out", "data", says=says)


def test_quote_never_closed(line: CommandLine) -> None:
    lines = rows()
    lines[100] = 'u01,"i01,1700000000'
    write_log(line.folder, lines)
    line.refuses("prepare", "log.csv", "--out", "data", says=("log.csv", "quote", "never closed", "Double the quotes"))


@pytest.mark.parametrize("n_rejected", [5, 50])
def test_unreadable_times(line: CommandLine, n_rejected: int) -> None:
    step = 1000 // n_rejected
    lines = [with_cell(row, 2, "yesterday") if index % step == 0 else row for index, row in enumerate(rows())]
    write_log(line.folder, lines)
    if n_rejected == 50:
        says = ("50 of 1000 rows (5.0%)", "--max-rejected", "unreadable time", "yesterday", "log.csv row 2")
        line.refuses("prepare", "log.csv", "--out", "data", says=says)
        line.answers("prepare", "log.csv", "--out", "data", "--max-rejected", "5%")
    output = line.does("prepare", "log.csv", "--out", "data", "--max-rejected", "5%", "--overwrite")
    assert f"{1000 - n_rejected} good, {n_rejected} rejected" in output
    assert f"{n_rejected} × unreadable time" in output
    assert "personal data" in output
    rejections = rejected_rows(line.folder / "data")
    assert [row["row"] for row in rejections] == [2 + step * index for index in range(n_rejected)]
    assert {(row["reason"], row["time"]) for row in rejections} == {("unreadable time", "yesterday")}


def test_seconds_and_milliseconds_mixed(line: CommandLine) -> None:
    lines = [row + "000" if index % 2 else row for index, row in enumerate(rows())]
    write_log(line.folder, lines)
    says = ("500 of 1000 rows", "mixes", "seconds (50.0%)", "milliseconds (50.0%)", "convert")
    line.refuses("prepare", "log.csv", "--out", "data", says=says)


def test_a_few_milliseconds_among_seconds_are_rejected(line: CommandLine) -> None:
    lines = [row + "000" if index % 200 == 0 else row for index, row in enumerate(rows())]
    write_log(line.folder, lines)
    counts = line.answers("prepare", "log.csv", "--out", "data")["counts"]
    assert counts["rejected"] == {"time is not in seconds": 5}


def test_rows_without_user_or_item_are_rejected(line: CommandLine) -> None:
    write_log(line.folder, [*rows(), f",i01,{BEGIN}", f"u01,,{BEGIN}"])
    counts = line.answers("prepare", "log.csv", "--out", "data")["counts"]
    assert counts["rejected"] == {"no item": 1, "no user": 1}


def test_duplicate_rows(line: CommandLine) -> None:
    lines = rows()
    write_log(line.folder, [*lines, *lines[:10]])
    with_repeats = line.answers("prepare", "log.csv", "--out", "with-repeats")["counts"]
    without_repeats = line.answers("prepare", "log.csv", "--out", "without-repeats", "--drop-duplicates")["counts"]
    assert (with_repeats["events"], with_repeats["duplicates"]) == (1010, 10)
    assert (without_repeats["events"], without_repeats["duplicates"]) == (1000, 10)
    output = line.does("prepare", "log.csv", "--out", "output")
    assert "10 exact repeats of a row, kept (--drop-duplicates leaves them out)" in output


# --- columns and sizes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["user", "item", "time", "value", "kind", "order"])
def test_column_that_does_not_exist(line: CommandLine, role: str) -> None:
    write_log(line.folder, rows())
    says = ("log.csv has no column 'buyer'", f"--{role}", "'user', 'item', 'time'")
    line.refuses("prepare", "log.csv", "--out", "data", f"--{role}", "buyer", says=says)


def test_column_that_cannot_be_found(line: CommandLine) -> None:
    write_log(line.folder, rows(), header="who,item,time")
    says = ("log.csv has no column that looks like the user", "name it with --user", "'who', 'item', 'time'")
    line.refuses("prepare", "log.csv", "--out", "data", says=says)
    write_log(line.folder, [f"{row},x" for row in rows()], header="user,item,time,user_id")
    says = ("'user' or 'user_id'", "name it with --user", "'user', 'item', 'time', 'user_id'")
    line.refuses("prepare", "log.csv", "--out", "data", says=says)


def test_column_that_is_only_in_one_file(line: CommandLine) -> None:
    write_log(line.folder, rows())
    write_log(line.folder, rows(), name="other.csv", header="person,item,time")
    says = ("other.csv has no column 'user'", "--user", "'person', 'item', 'time'")
    line.refuses("prepare", "log.csv", "other.csv", "--out", "data", says=says)


def test_every_user_below_the_minimum(line: CommandLine) -> None:
    write_log(line.folder, rows(events=4, items=4))
    says = ("40 users", "--min-user", "the most active has 4", "--min-item", "Lower")
    line.refuses("prepare", "log.csv", "--out", "data", says=says)


def test_one_user(line: CommandLine, quick_recipe: Path) -> None:
    """One user is enough to prepare, train and recommend."""
    write_log(line.folder, rows(users=1, items=5))
    assert line.answers("prepare", "log.csv", "--out", "data")["counts"]["users"] == 1
    assert line.answers("train", "data", "--out", "run", "--recipe", quick_recipe)["report"]["cases"] == 1
    assert len(line.answers("recommend", "run", "--history", "i00,i01", "-k", "3")["items"]) == 3


def test_one_item(line: CommandLine) -> None:
    write_log(line.folder, rows(items=1))
    says = ("Only one item is left ('i00')", "--min-user", "--min-item")
    line.refuses("prepare", "log.csv", "--out", "data", says=says)


def test_log_too_short_to_train(line: CommandLine, quick_recipe: Path) -> None:
    """Two events per user: none is left for validation."""
    write_log(line.folder, rows(events=2, items=5))
    line.answers("prepare", "log.csv", "--out", "data", "--min-user", "1")
    result = line("train", "data", "--out", "run", "--recipe", quick_recipe)
    assert_refused(result, "validation", "three events")
    assert not (line.folder / "run").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--max-rejected", "lots"), ("--max-rejected", "'lots'", "1% or 0.01")),
        (("--max-rejected", "150%"), ("--max-rejected", "0% to 100%")),
        (("--split", "half"), ("--split", "'half'", "expected last, or time:WHEN")),
        (("--split", "time:soon"), ("--split time:soon", "time:2024-05-01")),
        (("--split", "time:2031-01-01"), ("--split time:", "so there is no test")),
        (("--time-zone", "Mars/Olympus"), ("--time-zone 'Mars/Olympus'", "Europe/Berlin")),
        (("--time-format", "%Q"), ("%Q",)),
        (("--user", "item", "--item", "item"), ("'item'", "--user", "--item", "name another")),
    ],
)
def test_impossible_option(line: CommandLine, options: tuple[str, ...], says: tuple[str, ...]) -> None:
    write_log(line.folder, rows())
    line.refuses("prepare", "log.csv", "--out", "data", *options, says=says)


# --- output that cannot be written --------------------------------------------------------------------------------


def test_output_folder_that_exists(line: CommandLine) -> None:
    write_log(line.folder, rows())
    line.does("prepare", "log.csv", "--out", "data")
    line.refuses("prepare", "log.csv", "--out", "data", says=("data exists already", "--out", "--overwrite"))
    write_log(line.folder, rows(users=30))
    counts = line.answers("prepare", "log.csv", "--out", "data", "--overwrite")["counts"]
    assert counts["users"] == 30
    assert sorted(path.name for path in line.folder.iterdir()) == ["data", "log.csv"]


def test_failed_overwrite_keeps_the_old_folder(line: CommandLine) -> None:
    write_log(line.folder, rows())
    line.does("prepare", "log.csv", "--out", "data")
    write_log(line.folder, rows(items=1))
    line.refuses("prepare", "log.csv", "--out", "data", "--overwrite", says=("Only one item",))


@pytest.mark.parametrize("name", ["notes.txt", "manifest.json"])
def test_a_folder_not_made_by_segue_is_never_overwritten(line: CommandLine, name: str) -> None:
    """Browser extensions and web pages have a manifest.json too."""
    write_log(line.folder, rows())
    (line.folder / "mine").mkdir()
    (line.folder / "mine" / name).write_text('{"name": "not segue\'s"}')
    line.refuses("prepare", "log.csv", "--out", "mine", says=("mine exists already",))
    says = ("mine is not a segue folder", "--overwrite does not replace it", "name another")
    line.refuses("prepare", "log.csv", "--out", "mine", "--overwrite", says=says)


def test_models_of_times_refuse_a_log_with_an_order_only(line: CommandLine) -> None:
    """hstu would train on row numbers, which no request has."""
    (line.folder / "log.csv").write_text("user,item\n" + "".join(f"u{n % 9},i{n % 7}\n" for n in range(90)))
    line.does("prepare", "log.csv", "--out", "data")
    says = ("'hstu' needs the time between events", "only their order", "--time")
    line.refuses("train", "data", "--out", "run", "--recipe", "hstu", says=says)


def test_prepare_never_overwrites_a_run(line: CommandLine) -> None:
    write_log(line.folder, rows())
    (line.folder / "run").mkdir()
    (line.folder / "run" / "manifest.json").write_text('{"kind": "run", "format": 1}')
    says = ("run is a run folder", "--overwrite does not replace it", "name another")
    line.refuses("prepare", "log.csv", "--out", "run", "--overwrite", says=says)


def test_output_that_is_a_file(line: CommandLine) -> None:
    write_log(line.folder, rows())
    line.refuses("prepare", "log.csv", "--out", "log.csv", "--overwrite", says=("log.csv is a file", "folder"))
    says = ("log.csv/data cannot be created", "a part of its path is a file", "--out")
    line.refuses("prepare", "log.csv", "--out", "log.csv/data", says=says)


def test_run_folder_that_exists(line: CommandLine, cycle_data: Path, cycle_run: Path, quick_recipe: Path) -> None:
    before = tree(cycle_run)
    line.refuses("train", cycle_data, "--out", cycle_run, says=("exists already", "--out", "--resume"))
    assert tree(cycle_run) == before
    line.refuses("train", cycle_data, "--out", ".", says=("exists already", "--out"))
    (line.folder / "run.partial").mkdir()
    (line.folder / "run.partial" / "settings.toml").write_text("")
    says = ("run.partial holds unfinished training", "--resume", "remove it")
    line.refuses("train", cycle_data, "--out", "run", "--recipe", quick_recipe, says=says)
    line.refuses("train", cycle_data, "--out", "none", "--resume", says=("nothing to resume", "without --resume"))


def test_answers_folder_that_exists(line: CommandLine, cycle_run: Path) -> None:
    (line.folder / "users.csv").write_text("user\nu001\n")
    (line.folder / "answers").mkdir()
    error = line.refuses("recommend", cycle_run, "--users", "users.csv", "--out", "answers", says=("exists already",))
    assert "--overwrite" not in error  # this command has no such option


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Limit every file to `size` bytes in the kernel, like a disk that is too small."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def titles(folder: Path) -> Path:
    """A catalogue whose table is larger than any array of the log."""
    lines = [f"i{item:02},{os.urandom(2000).hex()}" for item in range(20)]
    return write_log(folder, lines, header="item,title", name="items.csv")


@pytest.mark.parametrize("size", [100, 3000, 10_000])
def test_disk_too_small_for_the_data(line: CommandLine, size: int) -> None:
    """Too small for the first array, for larger ones, and for the items' Parquet file, which polars writes."""
    write_log(line.folder, rows())
    titles(line.folder)
    with largest_file(size):
        line.refuses(
            "prepare", "log.csv", "--items", "items.csv", "--out", "data", says=("data", "could not be written")
        )


@pytest.mark.parametrize("size", [100, 3000, 10_000])
def test_disk_too_small_for_the_run(line: CommandLine, cycle_data: Path, quick_recipe: Path, size: int) -> None:
    """Finished epochs stay in RUN.partial, and the message says how to resume."""
    with largest_file(size):
        result = line("train", cycle_data, "--out", "run", "--recipe", quick_recipe)
    sentence = result.err.splitlines()[-1]  # lines before it report epochs
    assert_refused(Said(result.code, result.out, sentence), "could not be written", "run")
    assert {path.name for path in line.folder.iterdir()} <= {"run.partial"}


def test_disk_too_small_for_answers(line: CommandLine, cycle_run: Path) -> None:
    (line.folder / "users.csv").write_text("user\nu001\nu002\n")
    with largest_file(100):
        says = ("answers", "could not be written")
        line.refuses("recommend", cycle_run, "--users", "users.csv", "--out", "answers", says=says)


FULL_DISK = 'mount -t tmpfs -o size={size}k tmpfs small && shift && exec "$@"'


@pytest.mark.parametrize("size", [8, 24])
def test_full_disk(line: CommandLine, size: int) -> None:
    """A real file system of two and of six pages, if mounting is allowed; the kernel's error is then ENOSPC."""
    (line.folder / "small").mkdir()
    write_log(line.folder, rows())
    titles(line.folder)
    enter = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", FULL_DISK.format(size=size), "sh", "-"]
    if shutil.which("unshare") is None or subprocess.run([*enter, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    command = [sys.executable, "-m", "segue.cli", "prepare", "log.csv", "--items", "items.csv", "--out", "small/data"]
    list_files = ["sh", "-c", '"$@"; code=$?; ls -A small; exit $code', "sh", *command]
    process = subprocess.run([*enter, *list_files], check=False, capture_output=True, text=True)
    assert_refused(
        Said(process.returncode, process.stdout, process.stderr), "The disk is full", "small/data", "Free some space"
    )


def test_full_disk_under_the_page_and_the_output(line: CommandLine, cycle_run: Path) -> None:
    says = ("The disk is full", "/dev/full could not be written")
    line.refuses("compare", cycle_run, "--html", "/dev/full", says=says)
    with Path("/dev/full").open("w") as full:
        process = subprocess.run(
            [sys.executable, "-m", "segue.cli", "--version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert_refused(Said(process.returncode, "", process.stderr), "Standard output", os.strerror(errno.ENOSPC))


@contextmanager
def without_privileges() -> Iterator[None]:
    """Run as the user nobody, because file permissions do not bind root."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.fixture
def closed_folder(cycle_data: Path, cycle_run: Path) -> Iterator[Path]:
    """A folder with a log, data and a run that others may read but not write (nor read pytest's folders)."""
    folder = Path(tempfile.mkdtemp(prefix="segue-closed-"))
    write_log(folder, rows())
    shutil.copytree(cycle_data, folder / "data")
    shutil.copytree(cycle_run, folder / "run")
    folder.chmod(0o555)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


def test_folder_without_permission(line: CommandLine, closed_folder: Path, quick_recipe: Path) -> None:
    write_log(line.folder, rows())
    # Once with privileges first: modules are imported lazily, from folders that nobody may not be able to read.
    line.does("prepare", "log.csv", "--out", "data")
    line.does("train", "data", "--out", "run", "--recipe", quick_recipe)
    line.does("compare", "run", "--html", "page.html")
    before = tree(closed_folder)
    with without_privileges():
        prepare_result = line("prepare", closed_folder / "log.csv", "--out", closed_folder / "new")
        train_result = line("train", closed_folder / "data", "--out", closed_folder / "new")
        compare_result = line("compare", closed_folder / "run", "--html", closed_folder / "page.html")
    assert_refused(prepare_result, "No permission to write", str(closed_folder / "new"), "--out")
    assert_refused(train_result, "No permission to write", str(closed_folder / "new"), "--out")
    assert_refused(compare_result, "No permission to write", "page.html", "--html")
    assert tree(closed_folder) == before


def test_file_without_permission(line: CommandLine, closed_folder: Path) -> None:
    log, hidden = closed_folder / "log.csv", closed_folder / "hidden"
    hidden.mkdir()
    shutil.move(closed_folder / "data", hidden)
    shutil.copy(log, hidden)
    log.chmod(0)
    hidden.chmod(0)
    reason = os.strerror(errno.EACCES)
    try:
        with without_privileges():
            file_result = line("prepare", log, "--out", closed_folder / "new")
            hidden_file_result = line("prepare", hidden / "log.csv", "--out", closed_folder / "new")
            data_result = line("train", hidden / "data", "--out", closed_folder / "new")
            out_result = line("prepare", log, "--out", hidden / "new")
    finally:
        hidden.chmod(0o755)
    assert_refused(file_result, "log.csv cannot be read", reason)
    assert_refused(hidden_file_result, "log.csv cannot be read", reason)
    assert_refused(data_result, "hidden/data", "permission")
    assert_refused(out_result, "No permission", "hidden/new", "--out")


# --- folders that are damaged or of another kind ------------------------------------------------------------------


def flip(path: Path, position: int = -1) -> None:
    """Change one bit of one byte."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def manifest_with(folder: Path, **changes: object) -> None:
    """Change facts of the manifest; None removes one."""
    path = folder / "manifest.json"
    facts = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: fact for name, fact in facts.items() if fact is not None}))


Damage = Callable[[Path], object]

DAMAGES: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "another format": (lambda folder: manifest_with(folder, format=7), ("format 7", "this segue reads format")),
    "manifest cut": (lambda folder: cut(folder / "manifest.json"), ("manifest.json is damaged",)),
    "manifest empty": (lambda folder: (folder / "manifest.json").write_text(""), ("manifest.json is damaged",)),
    "manifest a list": (lambda folder: (folder / "manifest.json").write_text("[]"), ("manifest.json is damaged",)),
    "manifest missing": (lambda folder: (folder / "manifest.json").unlink(), ("it has no manifest.json",)),
    "manifest without its files": (lambda folder: manifest_with(folder, files=None), ("damaged",)),
    "manifest of another tool": (lambda folder: (folder / "manifest.json").write_text("{}"), ("expected a",)),
}
DATA_FILES = ("items.npy", "times.npy", "offsets.npy", "items.parquet", "users.parquet")


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_manifest(line: CommandLine, cycle_data: Path, cycle_run: Path, damage: str) -> None:
    shutil.copytree(cycle_data, "data")
    shutil.copytree(cycle_run, "run")
    damage_folder, says = DAMAGES[damage]
    damage_folder(line.folder / "data")
    damage_folder(line.folder / "run")
    line.refuses("train", "data", "--out", "new", says=(*says, "data", "`segue prepare`"))
    line.refuses("recommend", "run", "--history", "i01", says=(*says, "run", "`segue train`"))
    line.refuses("compare", "run", says=(*says, "run", "`segue train`"))


@pytest.mark.parametrize("name", DATA_FILES)
def test_damaged_data_file(line: CommandLine, cycle_data: Path, name: str) -> None:
    shutil.copytree(cycle_data, "data")
    path = line.folder / "data" / name
    remedy = "`segue prepare`"
    flip(path)
    line.refuses("train", "data", "--out", "run", says=("data", "damaged", remedy))
    cut(path)
    line.refuses("train", "data", "--out", "run", says=(f"data/{name} has", "bytes instead of", "damaged", remedy))
    path.unlink()
    line.refuses("train", "data", "--out", "run", says=(f"data/{name} is missing", "damaged", remedy))


@pytest.mark.parametrize("name", DATA_FILES)
@pytest.mark.parametrize("position", [-1, 0])
def test_damaged_data_under_a_run(
    line: CommandLine, cycle_data: Path, cycle_run: Path, name: str, position: int
) -> None:
    """Evaluation on damaged data would silently give other numbers."""
    shutil.copytree(cycle_data, "data")
    flip(line.folder / "data" / name, position)
    line.refuses("evaluate", cycle_run, "--data", "data", says=("data", "damaged", "`segue prepare`"))
    # One answer does not read every file, so the damage may be in another: an answer or the error.
    result = line("recommend", cycle_run, "--user", "u059", "--data", "data", "--json")
    if result.code:
        assert_refused(result, "data", "damaged", "`segue prepare`")


@pytest.mark.parametrize("name", ["weights.safetensors", "settings.toml", "items.parquet", "index.safetensors"])
def test_damaged_run_file(line: CommandLine, cycle_run: Path, name: str) -> None:
    shutil.copytree(cycle_run, "run")
    path = line.folder / "run" / name
    arguments = ("recommend", "run", "--history", "i01")
    flip(path)
    line.refuses(*arguments, says=(f"run/{name} is damaged", "SHA-256", "`segue train`"))
    cut(path)
    line.refuses(*arguments, says=(f"run/{name} has", "bytes instead of", "`segue train`"))
    path.unlink()
    line.refuses(*arguments, says=(f"run/{name} is missing", "`segue train`"))


@pytest.mark.parametrize("name", ["metrics.json", "ranks.npy", "history.jsonl"])
def test_damaged_measurements(line: CommandLine, cycle_run: Path, name: str) -> None:
    shutil.copytree(cycle_run, "run")
    flip(line.folder / "run" / name, 0)
    line.refuses("compare", "run", says=(f"run/{name}", "damaged", "`segue train`"))


def test_damaged_settings(line: CommandLine, cycle_run: Path) -> None:
    shutil.copytree(cycle_run, "run")
    flip(line.folder / "run" / "settings.toml", 0)
    line.refuses("evaluate", "run", says=("run/settings.toml",))


def test_damaged_training_state(line: CommandLine, cycle_data: Path, cycle_run: Path) -> None:
    shutil.copytree(cycle_run, "run")
    (line.folder / "run" / "training.safetensors").unlink()
    line.refuses("train", cycle_data, "--out", "run", "--resume", says=("run/training.safetensors is missing",))
    shutil.copy(cycle_run / "training.safetensors", "run")
    flip(line.folder / "run" / "training.safetensors", 0)
    says = ("training.safetensors cannot be read", "without --resume")
    line.refuses("train", cycle_data, "--out", "run", "--resume", "--set", "train.epochs=9", says=says)


def test_data_folder_for_a_run_and_the_reverse(line: CommandLine, cycle_data: Path, cycle_run: Path) -> None:
    says = ("is a run folder, expected a data folder", "segue prepare")
    line.refuses("train", cycle_run, "--out", "new", says=says)
    says = ("is a data folder, expected a run folder", "segue train")
    for command in (["evaluate"], ["compare"], ["recommend", "--history", "a"], ["serve", "--port", "0"]):
        line.refuses(command[0], cycle_data, *command[1:], says=says)


# --- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ("--recipe", "sasrek"),
            ("no recipe 'sasrek'", "did you mean 'sasrec'", "bert4rec, caser, default", "FILE.toml"),
        ),
        (
            ("--set", "modle.width=8"),
            ("no section 'modle'", "did you mean 'model'", "model, objective, train, counts, evaluate"),
        ),
        (("--set", "model.widht=8"), ("no key 'widht' in model", "did you mean 'width'", "depth, length")),
        (("--set", "train.device=tpu"), ("train.device", "'tpu'")),
        (("--set", "model=rnn"), ("model has no kind 'rnn'", "sasrec, esasrec")),
        (("--set", "model.width=wide"), ("model.width", "expected a whole number", "'wide'")),
        (("--set", "model.width=-1"), ("model.width", "-1")),
        (("--set", "model.width=15", "--set", "model.heads=2"), ("width", "heads")),
        (("--set", "model.dropout=1.5"), ("model.dropout", "1.5")),
        (("--set", "train.epochs=0"), ("train.epochs", "0")),
        (("--set", "train.seed=18446744073709551616"), ("train.seed", "18446744073709551616")),
        (("--set", "objective.loss=hinge"), ("objective.loss", "'hinge'")),
        (("--set", "evaluate.seen=sometimes"), ("evaluate.seen", "'sometimes'")),
        (("--set", "evaluate.at=[0]"), ("evaluate.at", "0")),
        (("--set", "about.summary=x"), ("no key of [about]",)),
        (("--set", "model.width"), ("section.key=value", "'model.width'")),
        (("--set", "width=8"), ("no section 'width'", "model, objective")),
    ],
)
def test_unknown_name_or_value(
    line: CommandLine, cycle_data: Path, options: tuple[str, ...], says: tuple[str, ...]
) -> None:
    line.refuses("train", cycle_data, "--out", "run", *options, says=says)


@pytest.mark.parametrize(
    ("recipe", "override", "says"),
    [
        (
            "bert4rec",
            "objective.task=next-item",
            ("model = 'bert4rec'", "choose objective.task = 'masked-item'"),
        ),
        ("sasrec", "objective.task=masked-item", ("is causal", "choose model = 'bert4rec'")),
        (
            "sasrec",
            "objective.loss=gbce",
            ("objective.loss = 'gbce' needs negatives", "choose objective.sampler"),
        ),
        ("sasrec-sampled", "objective.loss=softmax", ("objective.loss = 'softmax'", "set objective.sampler to 'none'")),
        (
            "gsasrec",
            "objective.task.cuts=3",
            ("no key 'cuts' in objective.task = 'next-item'", "no keys"),
        ),
    ],
)
def test_incompatible_settings(
    line: CommandLine, cycle_data: Path, recipe: str, override: str, says: tuple[str, ...]
) -> None:
    line.refuses("train", cycle_data, "--out", "run", "--recipe", recipe, "--set", override, says=says)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("width = 8", ("width", "model, objective")),
        ("[model]\nwidht = 8", ("'widht'", "did you mean 'width'")),
        ("[model\nwidth = 8", ("mine.toml is not TOML", "line 1")),
        ("[model]\nwidth = 'x'", ("model.width", "'x'")),
        ("[objective]\nloss = 'bce'", ("objective.loss = 'bce' needs negatives", "objective.sampler")),
    ],
)
def test_recipe_file_that_cannot_be_used(
    line: CommandLine, cycle_data: Path, content: str, says: tuple[str, ...]
) -> None:
    (line.folder / "mine.toml").write_text(content)
    line.refuses("train", cycle_data, "--out", "run", "--recipe", "mine.toml", says=says)


@pytest.mark.parametrize("at", ["ten", "0", "-5", "", "1,,5", "1.5"])
def test_impossible_depths(line: CommandLine, cycle_run: Path, at: str) -> None:
    line.refuses("evaluate", cycle_run, f"--at={at}", says=("at",))


def test_an_impossible_number_of_items(line: CommandLine, cycle_run: Path) -> None:
    for command in (("recommend", cycle_run, "--history", "i01"), ("similar", cycle_run, "i01")):
        line.refuses(*command, "-k", "0", says=("whole number of at least 1", "got 0"))
        assert len(line.answers(*command, "-k", "1000")["items"]) <= 12


# --- a run and data that do not belong together -------------------------------------------------------------------


def test_run_evaluated_on_other_data(line: CommandLine, cycle_run: Path) -> None:
    write_log(line.folder, rows())
    line.does("prepare", "log.csv", "--out", "other")
    says = ("was not trained on other", "--data", "train a run on this one")
    line.refuses("evaluate", cycle_run, "--data", "other", says=says)
    shutil.copytree(cycle_run, "run")
    more = ("--resume", "--set", "train.epochs=9")
    line.refuses("train", "other", "--out", "run", *more, says=("other is not the data that run was begun on",))


def test_data_that_has_moved(line: CommandLine, cycle_data: Path, quick_recipe: Path) -> None:
    shutil.copytree(cycle_data, "data")
    line.does("train", "data", "--out", "run", "--recipe", quick_recipe)
    Path("data").rename("moved")
    says = (str(line.folder / "data"), "is gone", "--data")
    line.refuses("evaluate", "run", says=says)
    line.refuses("recommend", "run", "--user", "u001", says=says)
    assert line.answers("evaluate", "run", "--data", "moved")["cases"] == 60
    assert line.answers("recommend", "run", "--user", "u001", "--data", "moved")["fallback"] is None


def test_runs_that_cannot_be_compared(line: CommandLine, cycle_run: Path, quick_recipe: Path) -> None:
    write_log(line.folder, rows())
    line.does("prepare", "log.csv", "--out", "data")
    line.does("train", "data", "--out", "run", "--recipe", quick_recipe)
    line.refuses("compare", cycle_run, "run", says=("different data", "Train both on one data folder"))


# --- ids are returned unchanged -----------------------------------------------------------------------------------

IDS = (
    "a,b",
    'say "hi"',
    "'single'",
    "x/y",
    "/",
    "..",
    "%2F",
    " spaces around ",
    "two  spaces",
    "😀",
    "e\u0301",  # decomposed: different from the next
    "é",
    "007",
    "7",
    "7.0",
    "1e5",
    "-1",
    "--out",
    "NA",
    "null",
    "true",
    "@at",
    "#hash",
    "[list]",
    "=1+1",
    "tab\tinside",
    "line\nbreak",
    "line\r\nbreak",
    "\u2028separator",
    "back\\slash",
)


def csv_text(table: list[list[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(table)
    return text.getvalue()


@pytest.fixture(scope="module")
def strange_run(quick_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a log whose users and items have strange ids; each item is followed by the next of the list."""
    from segue.api import prepare, train

    folder = tmp_path_factory.mktemp("strange")
    events = [
        [user, IDS[(start + step) % len(IDS)], str(BEGIN + step)]
        for start, user in enumerate(IDS)
        for step in range(12)
    ]
    (folder / "log.csv").write_text(csv_text([HEADER.split(","), *events]), encoding="utf-8", newline="")
    prepare(folder / "log.csv", out=folder / "data")
    train(folder / "data", out=folder / "run", recipe=quick_recipe)
    return folder / "run"


def test_strange_ids_are_unchanged_in_answers(line: CommandLine, strange_run: Path) -> None:
    users = pl.read_parquet(strange_run.parent / "data" / "users.parquet")["id"].to_list()
    assert sorted(users) == sorted(IDS)
    history = csv_text([list(IDS)])
    answer = line.answers("recommend", strange_run, "--history", history, "-k", 100, "--keep-seen")
    assert answer["unknown"] == []
    assert answer["fallback"] is None
    assert sorted(item["id"] for item in answer["items"]) == sorted(IDS)
    (line.folder / "history.csv").write_text(history, encoding="utf-8", newline="")
    (line.folder / "history.json").write_text(json.dumps(IDS))
    for name in ("history.csv", "history.json"):
        assert line.answers("recommend", strange_run, "--history", f"@{name}", "-k", 100, "--keep-seen") == answer


@pytest.mark.parametrize("identifier", IDS)
def test_strange_id_alone(line: CommandLine, strange_run: Path, identifier: str) -> None:
    similar = object_of(line("similar", strange_run, "-k", 100, "--json", "--", identifier))
    assert sorted([identifier, *(item["id"] for item in similar["items"])]) == sorted(IDS)
    user = line.answers("recommend", strange_run, f"--user={identifier}", "-k", 100, "--no-keep-seen")
    position = IDS.index(identifier)
    seen = {IDS[(position + step) % len(IDS)] for step in range(12)}
    assert {item["id"] for item in user["items"]} == set(IDS) - seen
    history = csv_text([[identifier]]).rstrip("\n")
    only = line.answers("recommend", strange_run, f"--history={history}", f"--only={history}", "--keep-seen")
    assert [item["id"] for item in only["items"]] == [identifier]


def test_strange_users_in_a_batch(line: CommandLine, strange_run: Path) -> None:
    text = csv_text([["user"], *([user] for user in IDS)])
    (line.folder / "users.csv").write_text(text, encoding="utf-8", newline="")
    body = line.answers("recommend", strange_run, "--users", "users.csv", "--out", "answers", "-k", 3)
    assert (body["users"], body["unknown_users"], body["fallback"]) == (len(IDS), 0, 0)
    answers = pl.read_parquet(line.folder / "answers" / "*.parquet")
    assert answers["user"].unique(maintain_order=True).to_list() == list(IDS)
    assert set(answers["item"]) <= set(IDS)


def test_argument_that_is_not_utf8(segue_command: Command, tmp_path: Path) -> None:
    process = segue_command("prepare", os.fsdecode(b"\xff.csv"), "--out", "data", cwd=tmp_path)
    assert_refused(Said(process.returncode, process.stdout, process.stderr), "is not UTF-8")
    assert tree(tmp_path) == {}
