"""`segue tune`, up to a run trained with the best recipe."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import CommandLine

from segue.tuning import search


def test_from_a_search_to_a_run(line: CommandLine, cycle_data: Path, quick_recipe: Path) -> None:
    result = line("tune", cycle_data, "--out", "tuned", "--recipe", quick_recipe, "--trials", "2")
    assert result.code == 0
    assert re.findall(r"^trial +(\d)  ndcg@10 [\d.]+", result.err, re.MULTILINE) == ["1", "2"]
    assert result.out.startswith("2 trials: 2 finished.")
    assert f"Next: segue train {cycle_data} --out RUN --recipe tuned/best.toml" in result.out

    body = line.answers("tune", cycle_data, "--out", "tuned", "--resume", "--trials", "3")
    assert [trial["trial"] for trial in body["trials"]] == [1, 2, 3]
    assert body["best"]["score"] == max(trial["score"] for trial in body["trials"])
    assert body["best_recipe"] == "tuned/best.toml"

    run = line.answers("train", cycle_data, "--out", "run", "--recipe", "tuned/best.toml")
    assert run["training"]["best_score"] == body["best"]["score"]
    line.refuses("tune", cycle_data, "--out", "tuned", says=("holds a search already", "--resume"))
    line.refuses("tune", cycle_data, "--out", "run", says=("exists already",))
    line.refuses("tune", cycle_data, "--out", "new", "--trials", "0", says=("--trials",), code=2)
    line.refuses("evaluate", "tuned", says=("tuned", "expected a run folder"))


def test_ctrl_c_prints_how_to_resume(
    line: CommandLine, cycle_data: Path, quick_recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(search, "choose_epoch", interrupt)
    result = line("tune", cycle_data, "--out", "tuned", "--recipe", quick_recipe, "--trials", "1")
    assert (result.code, result.out) == (130, "")
    resume_command = f"segue tune {cycle_data} --out tuned --trials 1 --resume"
    assert result.err.endswith(f"Resume with: {resume_command}\n")
    monkeypatch.undo()
    monkeypatch.chdir(line.folder)
    assert line.answers(*resume_command.split()[1:])["best"]["trial"] == 2


def test_without_optuna(line: CommandLine, cycle_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("segue.tuning.search", "segue.tuning.study"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "optuna", None)
    line.refuses("tune", cycle_data, "--out", "tuned", says=("needs optuna", "pip install 'segue[tune]'"))


def test_optuna_and_torch_are_imported_only_when_needed() -> None:
    code = (
        "import sys, segue.cli, segue.tuning\n"
        "sys.exit(f'imported: {found}' if (found := {'optuna', 'torch'} & sys.modules.keys()) else 0)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert process.returncode == 0, process.stderr
