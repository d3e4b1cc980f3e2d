"""The bench of item-to-item counts: its log, its tables at a small size, and the run whose counts are left out."""

from __future__ import annotations

import gzip
import json
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from small_counts import counts_of

from bench import scale_document, tables
from bench.against.version import Version
from bench.data.prepare import MEGABYTE
from bench.recommend import counts
from bench.serving import counted
from segue import folders
from segue.data.dataset import Data
from segue.errors import InputError
from segue.recommend.recommender import COUNTS, Recommender

ITEMS, EVENTS = 300, 20_000


@pytest.fixture
def log(tmp_path: Path) -> Path:
    counts.make_sequences(tmp_path, items=ITEMS, events=EVENTS)
    return tmp_path


def test_the_log_has_popular_items_and_followers(log: Path) -> None:
    sequences = counts.open_sequences(log)
    assert sequences.offsets[-1] == sequences.n_events and np.all(np.diff(sequences.offsets) >= 1)
    assert abs(sequences.n_events - EVENTS) < EVENTS / 100 and sequences.n_users == EVENTS / counts.EVENTS_A_USER
    times = np.bincount(sequences.items, minlength=ITEMS + 1)
    assert times[0] == 0 and (times[1:] > 0).all()
    assert times.max() > 10 * np.median(times[1:])
    pairs = ITEMS * sequences.items[:-1].astype(np.int64) + sequences.items[1:]
    shuffled = ITEMS * np.random.default_rng(1).permutation(sequences.items).astype(np.int64)[:-1] + sequences.items[1:]
    assert len(np.unique(pairs)) < 0.8 * len(np.unique(shuffled)), "fewer different pairs than of independent events"


def test_the_log_that_is_served_has_all_events(tmp_path: Path) -> None:
    counts.write_log(tmp_path, items=ITEMS, events=EVENTS)
    with gzip.open(tmp_path / "events.tsv.gz") as file:
        table = pl.read_csv(file.read(), separator="\t")
    sequences = counts.open_sequences(tmp_path)
    assert table.columns == ["user", "item", "ts"]
    assert table["item"].to_list() == sequences.items.tolist()
    assert table["user"].n_unique() == sequences.n_users and table["ts"].is_sorted()


def test_both_tables_of_a_million_at_a_small_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def measure_command(command: list[str]) -> tuple[float, int, dict[str, Any]]:
        return 9.0, 100 * MEGABYTE, counts.build(Path(command[4]), int(command[6]))

    monkeypatch.setattr(counts, "measure_command", measure_command)
    for module in (tables, scale_document):
        monkeypatch.setattr(module, "FOLDER", tmp_path)
    document = tmp_path / "scale.md"
    shutil.copyfile(scale_document.DOCUMENT, document)
    monkeypatch.setattr(scale_document, "DOCUMENT", document)
    sizes = ["--items", str(ITEMS), "--events", str(EVENTS), "--questions", "3"]
    counts.main(["--only", "million", *sizes])
    scale_document.main()
    lines = document.read_text(encoding="utf-8").splitlines()
    (built,) = (line for line in lines if line.startswith("| 300 |"))
    assert "| 1,000 |" in built and "| 100 |" in built, "the users, and the peak in MB"
    head = lines.index("| index | ms without | ms with counts | ratio |")
    assert [line.split(" |")[0] for line in lines[head + 2 : head + 4]] == ["| exact", "| approximate"]


def counted_run(run: Path, out: Path) -> Path:
    """The run with a file of counts."""
    shutil.copytree(run, out)
    manifest = folders.read_manifest(out, "run")
    users = [2] * manifest["items"]
    (out / COUNTS).write_bytes(counts_of(users, [{(1, 2): 2}, {}, {}], {}, after_1=1.0).to_bytes())
    facts = {name: fact for name, fact in manifest.items() if name not in ("kind", "format", "files")}
    folders.write_manifest(out, "run", facts)
    return out


def test_a_run_without_its_counts_has_the_same_weights(cycle_run: Path, tmp_path: Path) -> None:
    run = counted_run(cycle_run, tmp_path / "with")
    counted.copy_without_counts(run, tmp_path / "without")
    one, other = (folders.read_manifest(tmp_path / name, "run")["files"] for name in ("with", "without"))
    assert {name: facts for name, facts in one.items() if name != COUNTS} == other
    assert Recommender.open(run).item_counts is not None
    assert Recommender.open(tmp_path / "without").item_counts is None
    with pytest.raises(InputError, match="Expected a run with item-to-item counts"):
        counted.copy_without_counts(tmp_path / "without", tmp_path / "again")


def test_both_runs_are_served_alternately(
    cycle_run: Path, cycle_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counts cost a tenth of the CPU."""
    run = counted_run(cycle_run, tmp_path / "run")
    measured: list[tuple[str, bool]] = []

    class Serve:
        def __init__(self, _options: Namespace, work: Path) -> None:
            self._work = work

        def measure(self, version: Version) -> dict[str, float]:
            folder = self._work / version.name
            Data.open(folder / "data")
            measured.append((version.name, (folder / "run" / COUNTS).exists()))
            return {"CPU ms a request": 1.1 if version is counted.WITH else 1.0}

    def prepare(_version: Version, *arguments: Any) -> None:
        assert arguments[0] == "prepare"
        shutil.copytree(cycle_data, arguments[-1])

    monkeypatch.setattr(counted, "Serve", Serve)
    monkeypatch.setattr(counted, "run_segue", prepare)
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    counts.main(["--only", "serve", "--data", "folder", "--run", str(run), "--rounds", "2"])
    one, other = ("with counts", True), ("without counts", False)
    assert measured == [one, other, other, one]
    (row,) = json.loads((tmp_path / "counts-serve.json").read_bytes())["rows"]
    assert row["ratio"] == pytest.approx(1.1)
