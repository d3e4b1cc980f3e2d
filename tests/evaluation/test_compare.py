from __future__ import annotations

import re
from typing import Any

import msgspec
import numpy as np
import pytest

from segue.errors import FolderError, SettingsError
from segue.evaluation.compare import Comparison, MeasuredRun, compare, comparison_table
from segue.evaluation.comparison_page import html
from segue.evaluation.metrics import intervals, rank_totals, summary
from segue.evaluation.ranks import MISS
from segue.evaluation.report import Report, slices, warm_and_cold

CASES = 400
HOSTILE = "<script>alert('x')</script> & \"quoted\" $\\frac{1}$ _😀"


def run(name: str, *, better: int = 0, data: str = "a" * 64, history: Any = (), **changes: Any) -> MeasuredRun:
    """A run that ranks every fourth target first, and `better` more of them second."""
    ranks = np.where(np.arange(CASES) % 4 == 0, 1, MISS)
    ranks[np.flatnonzero(ranks == MISS)[:better]] = 2
    ks = changes.pop("at", (1, 10))
    metrics = summary(ranks, ks) | {f"{name}@{k}": 0.5 for k in ks for name in ("coverage", "popularity")}
    report = Report(
        split="last",
        part="test",
        target="each",
        cases=CASES,
        items=100,
        seen="excluded",
        repeats=0.0,
        unreachable=0,
        unknown=0,
        without_history=0,
        target_time=False,
        metrics=metrics,
        intervals=intervals(rank_totals(ranks, ks, np.arange(CASES)), samples=50, rng=np.random.default_rng(1)),
        baselines={"popularity": dict(metrics)},
        baseline_intervals={},
        baseline_notes={"popularity": "a baseline <b>"},
        slices={"history": slices(np.arange(CASES), ranks, (0, 100, 200), ks)},
    )
    return MeasuredRun(
        name=name, data=data, report=msgspec.structs.replace(report, **changes), ranks=ranks, history=history
    )


def test_differences_are_to_the_first_and_paired() -> None:
    comparison = compare([run("one"), run("two", better=20), run("three")])
    first, better, same = comparison.runs
    assert first.differences == {}
    change = better.differences["hit@10"]
    assert change.value == pytest.approx(20 / CASES) and change.low > 0 and change.p < 0.01
    assert same.differences["hit@10"].p == 1 and better.differences["hit@1"].value == 0


def test_cases_of_one_user_are_resampled_together() -> None:
    """All of the gain is one user's, so it says nothing of the others."""
    users = np.maximum(0, np.arange(CASES) - 50)
    alone = compare([run("one"), run("two", better=30)], users=users).runs[1].differences["hit@10"]
    apart = compare([run("one"), run("two", better=30)]).runs[1].differences["hit@10"]
    assert alone.p > 0.05 > apart.p


def test_different_data_is_refused() -> None:
    with pytest.raises(FolderError, match=r"two and one were measured on different data .*bbbb.*aaaa"):
        compare([run("one"), run("two", data="b" * 64)])


@pytest.mark.parametrize("change", [{"seen": "kept"}, {"target": "first"}, {"split": "time"}, {"part": "valid"}])
def test_different_evaluations_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=f"{next(iter(change))} = .* cannot be compared"):
        compare([run("one"), run("two", **change)])


def test_runs_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(SettingsError, match="at least one"):
        compare([])
    with pytest.raises(SettingsError, match="different depths"):
        compare([run("one", at=(1,)), run("two", at=(5,))])
    with pytest.raises(FolderError, match="400 ranks for 399 cases"):
        compare([run("one", cases=399)])


def test_depths_are_those_of_all_runs() -> None:
    assert compare([run("one", at=(1, 5, 10)), run("two", at=(5, 10, 50))]).depths == [5, 10]


def test_the_use_of_the_target_time_is_noted() -> None:
    comparison = compare([run("one"), run("two", target_time=True)])
    assert any("Not like for like: two was given" in note for note in comparison.notes)
    assert "two (given the target time)" in comparison_table(comparison)
    assert "two, given the target&#x27;s timestamp" in html(comparison)
    both = compare([run("one", target_time=True), run("two", target_time=True)])
    assert not any("Not like" in note for note in both.notes)
    assert not any("timestamp" in note for note in compare([run("one"), run("two")]).notes)


def test_notes_of_runs_are_in_the_comparison() -> None:
    assert "two: trained on all" in compare([run("one"), run("two", note="trained on all")]).notes


def test_the_table_holds_values_and_significance() -> None:
    text = comparison_table(compare([run("one"), run("two", better=20)]))
    assert re.search(r"^two .*0\.3000 .*\+0\.0315 ", text, re.MULTILINE)  # 20 / 400 / log2(3)
    assert re.search(r"^popularity ", text, re.MULTILINE)


def test_a_comparison_round_trips_through_json() -> None:
    comparison = compare([run("one", history=[{"epoch": 1, "loss": 2.5}]), run("two", better=3)])
    assert msgspec.json.decode(msgspec.json.encode(comparison), type=Comparison) == comparison


@pytest.fixture(scope="module")
def page() -> str:
    history = [{"epoch": 1, "loss": 5.0, "ndcg@10": 0.1}, {"epoch": 2, "loss": 4.0}, {"loss": "?"}]
    runs = [run(HOSTILE, history=history), run("two", better=20, note=HOSTILE, target_time=True)]
    return html(compare(runs))


def test_the_page_loads_nothing_external(page: str) -> None:
    assert "http:" not in page and "https:" not in page and "//" not in re.sub(r"base64,[^\"]*", "", page)
    for name, value in re.findall(r'\b(src|href|action|data|srcset)\s*=\s*"([^"]*)"', page):
        assert name == "src" and value.startswith("data:image/svg+xml;base64,")
    assert "<link" not in page and "@import" not in page and "url(" not in page


def test_the_page_escapes_every_name(page: str) -> None:
    assert "<script" not in page and "<b>" not in page
    assert "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt; &amp; &quot;quoted&quot;" in page


def test_the_page_has_its_plots_and_tables(page: str) -> None:
    titles = re.findall(r'<img alt="([^"]*)"', page)
    assert titles == [
        "ndcg@10",
        "ndcg by depth",
        "ndcg@10 by events before the target",
        "loss by epoch",
        "ndcg@10 by epoch",
    ]
    assert "0–99" in page and "+0.0315" in page and "popularity: a baseline &lt;b&gt;" in page


def test_cold_targets_have_a_table_if_a_run_can_rank_them() -> None:
    cold = np.arange(CASES) >= 300
    parts = {"target": warm_and_cold(cold, np.where(cold, 1, MISS), (1, 10))}
    by_id, by_content = run("one", slices=parts, unknown=100), run("two", slices=parts)
    assert "cold" not in html(compare([by_id]))
    page = html(compare([by_id, by_content]))
    assert "<th>warm</th><th>cold</th>" in page and "<td>300</td><td>100</td>" in page


def test_one_run_alone_makes_a_page() -> None:
    alone = html(compare([run("one")]))
    assert "Difference" not in alone and "epoch" not in alone and alone.count("<img") == 3
