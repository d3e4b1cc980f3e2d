"""The bench of logs without a flag: each log of a folder is measured once, beside the best simple method."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from planted_logs import cycle_log

from bench.quality import strangers
from bench.quality.results import Paths
from segue.errors import InputError

MARKS = "Before.\n<!-- strangers: made by `make bench`. -->\n<!-- strangers ends. -->\nAfter.\n"


def write_logs(folder: Path) -> None:
    for name, users in (("small", 20), ("larger", 60)):
        (folder / name).mkdir(parents=True)
        (folder / name / "events.csv").write_text(cycle_log(users=users))
    (folder / "no log").mkdir()


def test_every_log_is_measured_once(
    tmp_path: Path, quick_recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "results.md"
    document.write_text(MARKS)
    paths = replace(Paths.of_project(tmp_path / "cache"), document=document)
    monkeypatch.setattr(Paths, "of_project", lambda _: paths)
    monkeypatch.setattr(strangers, "ENTRIES", tmp_path / "strangers.json")
    monkeypatch.setattr(strangers, "DEFAULT_RECIPE", str(quick_recipe))
    write_logs(tmp_path / "logs")
    arguments = ["--data", str(tmp_path / "logs"), "--cache", str(tmp_path / "cache")]
    strangers.main([*arguments, "--only", "small"])
    first = strangers.read_entries(tmp_path / "strangers.json")
    assert list(first) == ["small"]
    monkeypatch.setattr(strangers, "RIVALS", {"by hand": (str(quick_recipe), "model.width=8")})
    strangers.main([*arguments, "--seeds", "1", "2", "--rivals"])
    entries = strangers.read_entries(tmp_path / "strangers.json")
    assert list(entries) == ["larger", "small"]
    assert entries["small"].default[1] == first["small"].default[1], "it was not trained again"
    for entry in entries.values():
        change, seeds = entry.difference, entry.default
        assert change.value == pytest.approx(seeds[1].ndcg - entry.baseline_ndcg)
        assert entry.ndcg == pytest.approx((seeds[1].ndcg + seeds[2].ndcg) / 2)
        assert entry.rivals["by hand"].seed == 1
        assert change.low <= change.value <= change.high
    text = document.read_text()
    assert text.startswith("Before.\n") and text.endswith("After.\n")
    assert "| larger | 840 |" in text and f" {entries['small'].baseline} |" in text
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[-2:]] == ["larger", "small"]
    with pytest.raises(InputError, match=r"no other"):
        strangers.main([*arguments, "--only", "other"])
