from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from bench import scale_document
from bench import tables as results
from bench.data import make_log, scale
from bench.data.prepare import MEGABYTE


def test_users_and_items_grow_with_the_events(tmp_path: Path) -> None:
    log = scale.log_of(10_000, tmp_path)
    frame = pl.read_csv(log, truncate_ragged_lines=True, infer_schema=False)
    users, items = (frame[name].drop_nulls().n_unique() for name in ("user_id", "item_id"))
    assert frame.height == 10_000
    assert 400 < users <= 500, "one for every 20 events; some are never sampled"
    assert 90 < items <= 100, "one for every 100"
    mtime = log.stat().st_mtime_ns
    assert scale.log_of(10_000, tmp_path).stat().st_mtime_ns == mtime, "it is generated once"
    assert list(tmp_path.iterdir()) == [log]


def test_five_letters_make_ids_distinct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_log, "LETTERS", np.frombuffer(b"abc", dtype=np.uint8))
    assert make_log.ids(3**5, b"u", np.random.default_rng(0)).n_unique() == 3**5


def test_a_row_compares_with_the_smallest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    took = {1000: (2.0, 300 * MEGABYTE), 5000: (15.0, 300 * MEGABYTE + 4000 * 40)}

    def measure_command(command: list[str]) -> tuple[float, int, dict[str, Any]]:
        events = int(Path(command[4]).stem.rpartition("-")[2])
        return *took[events], {"counts": {"users": events // 25, "items": 10}}

    monkeypatch.setattr(scale, "measure_command", measure_command)
    monkeypatch.setattr(results, "FOLDER", tmp_path / "results")
    monkeypatch.setattr(scale_document, "FOLDER", tmp_path / "results")
    scale.main(["--events", "5000", "1000", "--folder", str(tmp_path)])

    document = tmp_path / "scale.md"
    document.write_text(scale_document.DOCUMENT.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(scale_document, "DOCUMENT", document)
    scale_document.main()
    text = document.read_text(encoding="utf-8")
    (row,) = (line for line in text.splitlines() if line.startswith("| 5,000 |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:4] == ["5,000", "200", "10", "15"]
    assert cells[5:] == ["3,000", "1.5", "300.2", "40"], "µs and bytes an event, and 1.5 times the smallest's 2,000 µs"


def test_the_document_has_a_section_for_every_subject() -> None:
    text = scale_document.DOCUMENT.read_text(encoding="utf-8")
    for subject in scale_document.SUBJECTS:
        assert text.count(f"<!-- {subject}: made by `make bench`. -->\n") == 1, subject
        assert text.count(f"<!-- {subject} ends. -->") == 1, subject
