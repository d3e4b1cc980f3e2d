"""docs/csv-to-report.ipynb runs from its first cell to its last, with the stored outputs.

Numbers may differ from machine to machine in their last digits; `jupyter execute --inplace` stores them anew.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parent.parent / "docs" / "csv-to-report.ipynb"


def stored() -> Any:
    """The notebook as it is in the repository."""
    return nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]


def outputs_of(notebook: Any) -> list[list[tuple[str, list[str], str]]]:
    """For each code cell, the kinds of its outputs and their text without numbers."""
    return [
        [
            (one["output_type"], sorted(one.get("data", {})), re.sub(r"[\d.]+", "0", text_of(one)))
            for one in cell["outputs"]
        ]
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
    ]


def text_of(output: Any) -> str:
    text = output.get("data", {}).get("text/plain", output.get("text", ""))
    return re.sub(r" +", " ", str(text))  # column widths depend on the numbers


def test_the_notebook_reproduces_its_stored_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where its CSV goes
    run = stored()
    quiet = ["--log-level=ERROR"]  # the kernel warns that it listens on a local port
    NotebookClient(run, kernel_name="python3", extra_arguments=quiet, startup_timeout=120, timeout=120).execute(
        cwd=str(tmp_path)
    )
    assert outputs_of(run) == outputs_of(stored())
    *_, table, plots, answers = [cell["outputs"][-1]["data"] for cell in run["cells"] if cell["cell_type"] == "code"]
    hits = {name: float(hit) for name, hit in re.findall(r"│ ([\w-]+) +┆ (\d\.\d+) ┆", table["text/plain"])}
    assert len(hits) == 5 and max(hits, key=lambda name: hits[name]) == "model"
    assert len(plots["image/png"]) > 10_000
    assert answers["text/plain"] == "(['product 06'], ['product 04'])"


def test_the_stored_notebook_has_outputs_and_no_local_paths() -> None:
    notebook = stored()
    nbformat.validate(notebook)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), "run once, in order"
    assert all(cell["outputs"] and all(one["output_type"] != "error" for one in cell["outputs"]) for cell in cells)
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert not re.search(r"/(home|root|tmp|work|Users)/", text) and len(text) < 100_000
