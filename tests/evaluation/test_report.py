from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from tiny_logs import Table, sequences_of

from segue.data.split import split_last
from segue.evaluation.baselines import BASELINES
from segue.evaluation.evaluate import Evaluation, evaluate
from segue.evaluation.metrics import summary
from segue.evaluation.ranks import MISS
from segue.evaluation.report import Report, slices, table
from segue.evaluation.settings import EvaluateSettings
from segue.evaluation.split_log import SplitLog

KEYS = {
    *("split", "cases", "items", "ties", "seen", "unreachable", "unknown", "target_time"),  # the contract's
    *("metrics", "intervals", "baselines"),
    *("part", "target", "repeats", "without_history", "slices", "note", "baseline_intervals", "baseline_notes"),
    "verdict",
}


@pytest.fixture(scope="module")
def evaluation() -> Evaluation:
    rng = np.random.default_rng(1)
    sequences = sequences_of(*(rng.integers(1, 21, size=rng.integers(3, 30)).tolist() for _ in range(80)))
    scores = torch.randn(21, 21, generator=torch.Generator().manual_seed(1))
    return evaluate(
        Table(scores),
        SplitLog(sequences, split_last(sequences), 20),
        settings=EvaluateSettings(bootstrap=100, seen="keep"),
        note="Measured before <all> was trained.",
    )


def test_a_report_round_trips_through_json(evaluation: Evaluation) -> None:
    text = msgspec.json.encode(evaluation.report)
    assert set(msgspec.json.decode(text)) == KEYS
    assert msgspec.json.decode(text, type=Report) == evaluation.report


def test_a_report_of_an_earlier_version_has_no_verdict(evaluation: Evaluation) -> None:
    early = msgspec.to_builtins(evaluation.report)
    del early["verdict"]
    report = msgspec.convert(early, Report)
    assert report == msgspec.structs.replace(evaluation.report, verdict=None)
    assert evaluation.report.verdict is not None
    sentences = "\n".join(evaluation.report.verdict.sentences)
    assert table(evaluation.report) == f"{sentences}\n\n{table(report)}"


def test_every_depth_has_every_metric_for_every_scorer(evaluation: Evaluation) -> None:
    measures = ("hit", "ndcg", "mrr", "coverage", "popularity")
    names = {f"{name}@{k}" for name in measures for k in (1, 5, 10, 50)}
    report = evaluation.report
    assert report.depths == [1, 5, 10, 50]
    assert set(report.metrics) == names
    assert list(report.baselines) == list(report.baseline_intervals) == list(report.baseline_notes) == list(BASELINES)
    assert all(set(metrics) == names for metrics in report.baselines.values())
    ranked = {name for name in names if not name.startswith(("coverage", "popularity"))}
    for spread, metrics in [(report.intervals, report.metrics)] + [
        (report.baseline_intervals[name], report.baselines[name]) for name in BASELINES
    ]:
        assert set(spread) == ranked
        assert all(low <= metrics[name] <= high for name, (low, high) in spread.items())


def test_the_report_follows_from_the_ranks(evaluation: Evaluation) -> None:
    report = evaluation.report
    for name, value in summary(evaluation.ranks, report.depths).items():
        assert report.metrics[name] == pytest.approx(value)
    assert report.metrics["coverage@50"] == 1 and report.cases == len(evaluation.ranks)
    assert (report.split, report.part, report.ties, report.seen) == ("last", "test", "pessimistic", "kept")


def test_slices_contain_every_case_once(evaluation: Evaluation) -> None:
    for parts in evaluation.report.slices.values():
        assert sum(part.cases for part in parts) == evaluation.report.cases
        mean = sum(part.cases * part.metrics["ndcg@10"] for part in parts) / evaluation.report.cases
        assert mean == pytest.approx(evaluation.report.metrics["ndcg@10"])


def test_slices_by_hand() -> None:
    parts = slices(np.array([0, 1, 4, 5, 700]), np.array([1, 2, MISS, 1, 3]), (0, 1, 5, 200), (1,))
    assert [(part.name, part.cases, part.metrics["hit@1"]) for part in parts] == [
        ("0", 1, 1),
        ("1–4", 2, 0),
        ("5–199", 1, 1),
        ("200+", 1, 0),
    ]


def test_an_evaluation_is_deterministic() -> None:
    sequences = sequences_of(*([1, 2, 3, 4, 5, 6][shift:] + [1, 2, 3][:shift] for shift in range(4)))
    once, again = (
        evaluate(
            Table(torch.eye(7)), SplitLog(sequences, split_last(sequences), 6), settings=EvaluateSettings(bootstrap=50)
        ).report
        for _ in range(2)
    )
    assert once == again


def test_progress_is_reported_for_every_scorer() -> None:
    sequences = sequences_of(*([1, 2, 3, 4] for _ in range(5)))
    calls: list[tuple[str, int, int]] = []
    evaluate(
        Table(torch.eye(5)),
        SplitLog(sequences, split_last(sequences), 4),
        settings=EvaluateSettings(bootstrap=0),
        progress=lambda *call: calls.append(call),
    )
    assert [call for call in calls if call[1] == call[2]] == [(name, 5, 5) for name in ("model", *BASELINES)]


def test_the_table_names_every_scorer_and_the_settings(evaluation: Evaluation) -> None:
    text = table(evaluation.report)
    for words in ("model", *BASELINES, "ndcg@10", "80 cases", "20 items", "kept", "Measured before <all>"):
        assert words in text
    assert f"{evaluation.report.metrics['ndcg@10']:.4f}" in text
    text = table(msgspec.structs.replace(evaluation.report, target_time=True, unreachable=3, unknown=1_234, note=None))
    assert "given the target's timestamp" in text and "3 targets" in text and "1,234 targets" in text
