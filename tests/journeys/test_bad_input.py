"""Everything that can be wrong with the user's files and options, through the command line.

Each refusal is a sentence or two on standard error that says what came and what to do; it prints nothing else, has no
traceback, leaves with the right code and leaves every file and folder as it was (`CommandLine.refuses` sees to that).
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


def rejected(folder: Path) -> list[dict[str, Any]]:
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
    done = segue_command("prepare", "nowhere.csv", "--out", "data", cwd=tmp_path)
    assert_refused(Said(done.returncode, done.stdout, done.stderr), "nowhere.csv does not exist")
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
    assert [(bad["row"], bad["reason"]) for bad in rejected(line.folder / "data")] == [(502, "not UTF-8")]


def test_byte_order_mark(line: CommandLine) -> None:
    write_log(line.folder, rows())
    marked = line.folder / "marked.csv"
    marked.write_bytes(b"\xef\xbb\xbf" + (line.folder / "log.csv").read_bytes())
    plain = line.answers("prepare", "log.csv", "--out", "plain")
    for name, options in (("found", ()), ("named", ("--user", "user"))):
        body = line.answers("prepare", "marked.csv", "--out", name, *options)
        assert body["log"]["columns"]["user"] == "user"
        assert {file: body["files"][file] for file in plain["files"]} == plain["files"]


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
def test_packed_by_other_means(line: CommandLine, head: bytes, says: str) -> None:
    (line.folder / "log.csv").write_bytes(head + bytes(range(256)))
    line.refuses("prepare", "log.csv", "--out", "data", says=("log.csv is", says, "decompress it"))


# --- rows that cannot be used -------------------------------------------------------------------------------------


def test_a_few_ragged_rows_are_rejected(line: CommandLine) -> None:
    lines = rows()
    lines[10], lines[20] = lines[10] + ",more", "u00,i01"
    write_log(line.folder, lines)
    counts = line.answers("prepare", "log.csv", "--out", "data")["counts"]
    assert counts["rejected"] == {"expected 3 fields, got 2": 1, "expected 3 fields, got 4": 1}
    found = [(Path(bad["file"]).name, bad["row"], bad["text"]) for bad in rejected(line.folder / "data")]
    assert found == [("log.csv", 12, lines[10]), ("log.csv", 22, "u00,i01")]


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


@pytest.mark.parametrize("bad", [5, 50])
def test_unreadable_times(line: CommandLine, bad: int) -> None:
    step = 1000 // bad
    lines = [with_cell(row, 2, "yesterday") if index % step == 0 else row for index, row in enumerate(rows())]
    write_log(line.folder, lines)
    if bad == 50:
        says = ("50 of 1000 rows (5.0%)", "--max-rejected", "unreadable time", "yesterday", "log.csv row 2")
        line.refuses("prepare", "log.csv", "--out", "data", says=says)
        line.answers("prepare", "log.csv", "--out", "data", "--max-rejected", "5%")
    printed = line.does("prepare", "log.csv", "--out", "data", "--max-rejected", "5%", "--overwrite")
    assert f"{1000 - bad} good, {bad} rejected" in printed
    assert f"{bad} × unreadable time" in printed
    assert "personal data" in printed
    found = rejected(line.folder / "data")
    assert [each["row"] for each in found] == [2 + step * index for index in range(bad)]
    assert {(each["reason"], each["time"]) for each in found} == {("unreadable time", "yesterday")}


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
    kept = line.answers("prepare", "log.csv", "--out", "kept")["counts"]
    dropped = line.answers("prepare", "log.csv", "--out", "dropped", "--drop-duplicates")["counts"]
    assert (kept["events"], kept["duplicates"]) == (1010, 10)
    assert (dropped["events"], dropped["duplicates"]) == (1000, 10)
    printed = line.does("prepare", "log.csv", "--out", "said")
    assert "10 exact repeats of a row, kept (--drop-duplicates leaves them out)" in printed


# --- columns and sizes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["user", "item", "time", "value", "kind", "order"])
def test_column_that_is_not_there(line: CommandLine, role: str) -> None:
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
    """One test case is enough for the whole path."""
    write_log(line.folder, rows(users=1, items=5))
    assert line.answers("prepare", "log.csv", "--out", "data")["counts"]["users"] == 1
    assert line.answers("train", "data", "--out", "run", "--recipe", quick_recipe)["report"]["cases"] == 1
    assert len(line.answers("recommend", "run", "--history", "i00,i01", "-k", "3")["items"]) == 3


def test_one_item(line: CommandLine) -> None:
    write_log(line.folder, rows(items=1))
    says = ("Only one item is left ('i00')", "--min-user", "--min-item")
    line.refuses("prepare", "log.csv", "--out", "data", says=says)


def test_nothing_to_learn_from(line: CommandLine, quick_recipe: Path) -> None:
    """Two events a user: none is left to validate with."""
    write_log(line.folder, rows(events=2, items=5))
    line.answers("prepare", "log.csv", "--out", "data", "--min-user", "1")
    said = line("train", "data", "--out", "run", "--recipe", quick_recipe)
    assert_refused(said, "validation", "three events")
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


# --- places that cannot be written --------------------------------------------------------------------------------


def test_output_folder_that_exists(line: CommandLine) -> None:
    write_log(line.folder, rows())
    line.does("prepare", "log.csv", "--out", "data")
    line.refuses("prepare", "log.csv", "--out", "data", says=("data exists already", "--out", "--overwrite"))
    write_log(line.folder, rows(users=30))
    counts = line.answers("prepare", "log.csv", "--out", "data", "--overwrite")["counts"]
    assert counts["users"] == 30
    assert sorted(path.name for path in line.folder.iterdir()) == ["data", "log.csv"]


def test_overwrite_that_fails_keeps_what_was_there(line: CommandLine) -> None:
    write_log(line.folder, rows())
    line.does("prepare", "log.csv", "--out", "data")
    write_log(line.folder, rows(items=1))
    line.refuses("prepare", "log.csv", "--out", "data", "--overwrite", says=("Only one item",))


@pytest.mark.parametrize("name", ["notes.txt", "manifest.json"])
def test_a_folder_of_something_else_is_never_overwritten(line: CommandLine, name: str) -> None:
    """Browser extensions and web pages have a manifest.json too."""
    write_log(line.folder, rows())
    (line.folder / "mine").mkdir()
    (line.folder / "mine" / name).write_text('{"name": "not segue\'s"}')
    line.refuses("prepare", "log.csv", "--out", "mine", says=("mine exists already",))
    says = ("mine is not a segue folder", "--overwrite does not replace it", "name another")
    line.refuses("prepare", "log.csv", "--out", "mine", "--overwrite", says=says)


def test_models_of_times_refuse_a_log_with_an_order_only(line: CommandLine) -> None:
    """hstu would learn from row numbers, which no request has."""
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
    err = line.refuses("recommend", cycle_run, "--users", "users.csv", "--out", "answers", says=("exists already",))
    assert "--overwrite" not in err  # this command has no such option


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """The kernel refuses to let any file grow beyond `size` bytes: a disk that is too small, for every writer alike."""
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
    """The first array, the larger ones, and the Parquet of the items, which another library writes."""
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
        said = line("train", cycle_data, "--out", "run", "--recipe", quick_recipe)
    sentence = said.err.splitlines()[-1]  # lines before it tell of epochs
    assert_refused(Said(said.code, said.out, sentence), "could not be written", "run")
    assert {path.name for path in line.folder.iterdir()} <= {"run.partial"}


def test_disk_too_small_for_answers(line: CommandLine, cycle_run: Path) -> None:
    (line.folder / "users.csv").write_text("user\nu001\nu002\n")
    with largest_file(100):
        says = ("answers", "could not be written")
        line.refuses("recommend", cycle_run, "--users", "users.csv", "--out", "answers", says=says)


FULL_DISK = 'mount -t tmpfs -o size={size}k tmpfs small && shift && exec "$@"'


@pytest.mark.parametrize("size", [8, 24])
def test_full_disk(line: CommandLine, size: int) -> None:
    """A real one, of two and of six pages, where the system lets us make it; what the kernel says is then ENOSPC."""
    (line.folder / "small").mkdir()
    write_log(line.folder, rows())
    titles(line.folder)
    enter = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", FULL_DISK.format(size=size), "sh", "-"]
    if shutil.which("unshare") is None or subprocess.run([*enter, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    command = [sys.executable, "-m", "segue.cli", "prepare", "log.csv", "--items", "items.csv", "--out", "small/data"]
    list_it = ["sh", "-c", '"$@"; code=$?; ls -A small; exit $code', "sh", *command]
    done = subprocess.run([*enter, *list_it], check=False, capture_output=True, text=True)
    assert_refused(Said(done.returncode, done.stdout, done.stderr), "The disk is full", "small/data", "Free some space")


def test_full_disk_under_the_page_and_the_output(line: CommandLine, cycle_run: Path) -> None:
    says = ("The disk is full", "/dev/full could not be written")
    line.refuses("compare", cycle_run, "--html", "/dev/full", says=says)
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "segue.cli", "--version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert_refused(Said(done.returncode, "", done.stderr), "Standard output", os.strerror(errno.ENOSPC))


@contextmanager
def without_privileges() -> Iterator[None]:
    """As nobody: the permissions of files do not bind root."""
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
    """A folder that others may read but not write, with a log, its data and a run; pytest's own are closed to them."""
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
    # Once with privileges, as modules are loaded when they are needed, from where nobody may not be able to read.
    line.does("prepare", "log.csv", "--out", "data")
    line.does("train", "data", "--out", "run", "--recipe", quick_recipe)
    line.does("compare", "run", "--html", "page.html")
    before = tree(closed_folder)
    with without_privileges():
        prepared = line("prepare", closed_folder / "log.csv", "--out", closed_folder / "new")
        trained = line("train", closed_folder / "data", "--out", closed_folder / "new")
        compared = line("compare", closed_folder / "run", "--html", closed_folder / "page.html")
    assert_refused(prepared, "No permission to write", str(closed_folder / "new"), "--out")
    assert_refused(trained, "No permission to write", str(closed_folder / "new"), "--out")
    assert_refused(compared, "No permission to write", "page.html", "--html")
    assert tree(closed_folder) == before


def test_file_without_permission(line: CommandLine, closed_folder: Path) -> None:
    log, hidden = closed_folder / "log.csv", closed_folder / "hidden"
    hidden.mkdir()
    shutil.move(closed_folder / "data", hidden)
    shutil.copy(log, hidden)
    log.chmod(0)
    hidden.chmod(0)
    denied = os.strerror(errno.EACCES)
    try:
        with without_privileges():
            unreadable = line("prepare", log, "--out", closed_folder / "new")
            out_of_sight = line("prepare", hidden / "log.csv", "--out", closed_folder / "new")
            no_data = line("train", hidden / "data", "--out", closed_folder / "new")
            no_place = line("prepare", log, "--out", hidden / "new")
    finally:
        hidden.chmod(0o755)
    assert_refused(unreadable, "log.csv cannot be read", denied)
    assert_refused(out_of_sight, "log.csv cannot be read", denied)
    assert_refused(no_data, "hidden/data", "permission")
    assert_refused(no_place, "No permission", "hidden/new", "--out")


# --- folders that are damaged or of another kind ------------------------------------------------------------------


def flip(path: Path, place: int = -1) -> None:
    """Change one bit of one byte."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def manifest_with(folder: Path, **changes: object) -> None:
    """The manifest with other facts; None takes one out."""
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
    harm, says = DAMAGES[damage]
    harm(line.folder / "data")
    harm(line.folder / "run")
    line.refuses("train", "data", "--out", "new", says=(*says, "data", "`segue prepare`"))
    line.refuses("recommend", "run", "--history", "i01", says=(*says, "run", "`segue train`"))
    line.refuses("compare", "run", says=(*says, "run", "`segue train`"))


@pytest.mark.parametrize("name", DATA_FILES)
def test_damaged_data_file(line: CommandLine, cycle_data: Path, name: str) -> None:
    shutil.copytree(cycle_data, "data")
    path = line.folder / "data" / name
    again = "`segue prepare`"
    flip(path)
    line.refuses("train", "data", "--out", "run", says=("data", "damaged", again))
    cut(path)
    line.refuses("train", "data", "--out", "run", says=(f"data/{name} has", "bytes instead of", "damaged", again))
    path.unlink()
    line.refuses("train", "data", "--out", "run", says=(f"data/{name} is missing", "damaged", again))


@pytest.mark.parametrize("name", DATA_FILES)
@pytest.mark.parametrize("place", [-1, 0])
def test_damaged_data_under_a_run(line: CommandLine, cycle_data: Path, cycle_run: Path, name: str, place: int) -> None:
    """Evaluation on changed data would silently give other numbers."""
    shutil.copytree(cycle_data, "data")
    flip(line.folder / "data" / name, place)
    line.refuses("evaluate", cycle_run, "--data", "data", says=("data", "damaged", "`segue prepare`"))
    # For one answer not everything is read, so the damage may be elsewhere: an answer or the sentence.
    said = line("recommend", cycle_run, "--user", "u059", "--data", "data", "--json")
    if said.code:
        assert_refused(said, "data", "damaged", "`segue prepare`")


@pytest.mark.parametrize("name", ["weights.safetensors", "settings.toml", "items.parquet", "index.safetensors"])
def test_damaged_run_file(line: CommandLine, cycle_run: Path, name: str) -> None:
    shutil.copytree(cycle_run, "run")
    path = line.folder / "run" / name
    asked = ("recommend", "run", "--history", "i01")
    flip(path)
    line.refuses(*asked, says=(f"run/{name} is damaged", "SHA-256", "`segue train`"))
    cut(path)
    line.refuses(*asked, says=(f"run/{name} has", "bytes instead of", "`segue train`"))
    path.unlink()
    line.refuses(*asked, says=(f"run/{name} is missing", "`segue train`"))


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


def test_one_kind_of_folder_for_the_other(line: CommandLine, cycle_data: Path, cycle_run: Path) -> None:
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
            ("no section 'modle'", "did you mean 'model'", "model, objective, train, evaluate"),
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
    ("recipe", "asked", "says"),
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
def test_settings_that_do_not_go_together(
    line: CommandLine, cycle_data: Path, recipe: str, asked: str, says: tuple[str, ...]
) -> None:
    line.refuses("train", cycle_data, "--out", "run", "--recipe", recipe, "--set", asked, says=says)


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


def test_run_evaluated_on_data_it_does_not_fit(line: CommandLine, cycle_run: Path) -> None:
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


# --- ids come back exactly as they went in ------------------------------------------------------------------------

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
    "e\u0301",  # decomposed: another text than the next
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
    """A run on a log whose users and items have strange ids; the item after each is the next of the list."""
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


def test_strange_ids_survive_the_path(line: CommandLine, strange_run: Path) -> None:
    users = pl.read_parquet(strange_run.parent / "data" / "users.parquet")["id"].to_list()
    assert sorted(users) == sorted(IDS)
    history = csv_text([list(IDS)])
    everything = line.answers("recommend", strange_run, "--history", history, "-k", 100, "--keep-seen")
    assert everything["unknown"] == []
    assert everything["fallback"] is None
    assert sorted(item["id"] for item in everything["items"]) == sorted(IDS)
    (line.folder / "history.csv").write_text(history, encoding="utf-8", newline="")
    (line.folder / "history.json").write_text(json.dumps(IDS))
    for name in ("history.csv", "history.json"):
        assert line.answers("recommend", strange_run, "--history", f"@{name}", "-k", 100, "--keep-seen") == everything


@pytest.mark.parametrize("identifier", IDS)
def test_strange_id_alone(line: CommandLine, strange_run: Path, identifier: str) -> None:
    near = object_of(line("similar", strange_run, "-k", 100, "--json", "--", identifier))
    assert sorted([identifier, *(item["id"] for item in near["items"])]) == sorted(IDS)
    user = line.answers("recommend", strange_run, f"--user={identifier}", "-k", 100, "--no-keep-seen")
    place = IDS.index(identifier)
    seen = {IDS[(place + step) % len(IDS)] for step in range(12)}
    assert {item["id"] for item in user["items"]} == set(IDS) - seen
    quoted = csv_text([[identifier]]).rstrip("\n")
    only = line.answers("recommend", strange_run, f"--history={quoted}", f"--only={quoted}", "--keep-seen")
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
    done = segue_command("prepare", os.fsdecode(b"\xff.csv"), "--out", "data", cwd=tmp_path)
    assert_refused(Said(done.returncode, done.stdout, done.stderr), "is not UTF-8")
    assert tree(tmp_path) == {}
