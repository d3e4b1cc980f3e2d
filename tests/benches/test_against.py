"""Two versions measured alternately: order, medians, ratios, and the checkout of the other."""

from __future__ import annotations

import json
import subprocess
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.against import subjects
from bench.against.alternate import alternate, rows
from bench.against.subjects import SUBJECTS, Epoch, add_options, write_times
from bench.against.version import ROOT, Version, other_version, run_command, this_version
from segue.errors import InputError

THIS, OTHER = (Version(name, Path(f"/{name}"), Path(f"/{name}/python")) for name in ("this", "other"))


def test_versions_alternate_and_every_second_round_begins_with_the_other() -> None:
    order: list[str] = []

    def measure(version: Version) -> dict[str, float]:
        order.append(version.name)
        return {"s": float(len(order))}

    results = alternate((THIS, OTHER), measure, rounds=3)
    assert order == ["this", "other", "other", "this", "this", "other"]
    assert [each["s"] for each in results["this"]] == [1.0, 4.0, 5.0]
    assert [each["s"] for each in results["other"]] == [2.0, 3.0, 6.0]


def test_a_host_that_slows_down_steadily_moves_no_ratio() -> None:
    clock = iter(range(100))
    results = alternate((THIS, OTHER), lambda _: {"s": 10.0 + next(clock)}, rounds=6)
    assert rows(results)[0]["ratio"] == 1.0


def test_rows_have_medians_ratio_and_range() -> None:
    results = {"this": [{"s": 3.0}, {"s": 90.0}, {"s": 1.0}], "other": [{"s": 2.0}, {"s": 1.5}, {"s": 7.0}]}
    (row,) = rows(results)
    assert row == {
        "number": "s",
        "this": 3.0,
        "other": 2.0,
        "ratio": 1.5,
        "this, range": "1 – 90",
        "other, range": "1.5 – 7",
    }


def test_the_other_version_is_checked_out_once_and_installed_by_its_own_makefile(tmp_path: Path) -> None:
    ran: list[tuple[list[str], Path]] = []

    def run(command: Sequence[str], folder: Path) -> str:
        ran.append((list(command), folder))
        if command[:3] == ["git", "worktree", "add"]:
            Path(command[4]).mkdir(parents=True)
        return "0123456789abcdef\n"

    folder = tmp_path / ".against" / "0123456789ab"
    version = other_version("HEAD~3", root=tmp_path, run=run)
    assert version == Version("0123456789ab", folder, folder / ".venv/bin/python")
    assert ran[0][0][-1] == "HEAD~3^{commit}"
    assert (["git", "worktree", "add", "--detach", str(folder), "0123456789ab"], tmp_path) in ran
    assert ran[-1] == (["make", "setup"], folder)
    ran.clear()
    assert other_version("HEAD~3", root=tmp_path, run=run) == version
    assert [command[:2] for command, _ in ran] == [["git", "rev-parse"], ["make", "setup"]]


def test_each_version_runs_its_own_sources_with_its_own_python() -> None:
    assert OTHER.segue("train", 1) == ["env", "PYTHONPATH=/other/src", "/other/python", "-m", "segue", "train", "1"]
    assert this_version().folder == ROOT
    result = subprocess.run(this_version().segue("--version"), capture_output=True, text=True, check=True)
    assert result.stdout.startswith("segue")


def test_a_command_that_fails_is_named_with_its_folder(tmp_path: Path) -> None:
    assert run_command(["echo", "yes"], tmp_path) == "yes\n"
    with pytest.raises(InputError, match=r"`false` in .* ended with exit code 1"):
        run_command(["false"], tmp_path)


def test_an_epoch_is_the_median_of_the_manifest_without_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[object, ...]] = []

    def run_segue(version: Version, *arguments: object) -> None:
        ran.append((version.name, *arguments))
        if arguments[0] == "train":
            run = Path(str(arguments[3]))
            run.mkdir()
            (run / "manifest.json").write_text(json.dumps({"training": {"seconds": [9.0, 4.0, 6.0]}}))

    monkeypatch.setattr(subjects, "run_segue", run_segue)
    (tmp_path / "events.tsv.gz").touch()
    subject = Epoch(options("epoch", data=tmp_path), tmp_path)
    for version in (THIS, OTHER):
        subject.begin(version)
    results = alternate((THIS, OTHER), subject.measure, rounds=2)
    assert results == {"this": [{"s an epoch": 5.0}] * 2, "other": [{"s an epoch": 5.0}] * 2}
    assert [call[:2] for call in ran] == [
        ("this", "prepare"),
        ("other", "prepare"),
        *[(name, "train") for name in ("this", "other", "other", "this")],
    ]


@pytest.mark.parametrize("subject", ["epoch", "serve"])
def test_subjects_over_a_log_say_which_is_missing(subject: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"Expected a log for .* give DATA=folder"):
        SUBJECTS[subject](options(subject, data=None), tmp_path)


def test_times_are_rewritten_and_bad_rows_stay(tmp_path: Path) -> None:
    log, out = tmp_path / "log.csv", tmp_path / "out.csv"
    log.write_text("user_id,item_id,timestamp\nu1,i1,1640995201\n,i2,1640995262\nu3,i3,yesterday\nu4,i4,0,too,many\n")
    write_times(log, out, "%d.%m.%Y %H:%M:%S")
    assert out.read_text().splitlines() == [
        "user_id,item_id,timestamp",
        "u1,i1,01.01.2022 00:00:01",
        ",i2,01.01.2022 00:01:02",
        "u3,i3,yesterday",
        "u4,i4,01.01.1970 00:00:00,too,many",
    ]


def test_prepare_measures_every_form_of_times(tmp_path: Path) -> None:
    subject = SUBJECTS["prepare"](options("prepare", events=3000), tmp_path)
    numbers = subject.measure(this_version())
    assert {"s, seconds", "s, ISO", "s, format", "ISO / seconds", "format / seconds"} <= set(numbers)
    assert all(value > 0 for value in numbers.values())


def options(subject: str, *, data: Path | None = None, events: int = 1000) -> Namespace:
    parser = ArgumentParser()
    add_options(parser)
    return Namespace(**{**vars(parser.parse_args([])), "subject": subject, "data": data, "events": events})
