"""The conclusion that the bench of plans writes under its table."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.quality.plan import write_document


@pytest.mark.parametrize(
    ("interval", "words"),
    [("0.010 – 0.300", "more"), ("-0.069 – -0.008", "less"), ("-0.020 – 0.030", "cannot be told apart")],
)
def test_the_conclusion_follows_the_paired_interval(interval: str, words: str, tmp_path: Path) -> None:
    document = tmp_path / "results.md"
    document.write_text("Before.\n<!-- plan: made by `make bench`. -->\nearlier\n<!-- plan ends. -->\nAfter.\n")
    row = {"way": "esasrec, best answers", "overlap": 0.5838, "interval": "0.549 – 0.620", "different items": 1885}
    paired = {"way": "plan less esasrec, paired", "overlap": 0.1, "interval": interval, "different items": "–"}
    write_document("The next basket", [row, paired], document)
    text = document.read_text()
    assert text.startswith("Before.\n") and text.endswith("After.\n") and "earlier" not in text
    assert "| esasrec, best answers | 0.5838 | 0.549 – 0.620 | 1,885 |" in text
    verdict = text.partition("So the plan ")[2]
    assert words in verdict and not any(other in verdict for other in {"more", "less", "apart"} - {words.split()[-1]})
