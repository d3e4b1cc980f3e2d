"""Cold targets, unseen in training: misses for a model of item ids, ranked by a model of item content."""

from __future__ import annotations

import numpy as np
import torch
from tiny_logs import Table, sequences_of

from segue.data.split import Split, split_last
from segue.evaluation.baselines import BASELINES
from segue.evaluation.evaluate import Evaluation, evaluate
from segue.evaluation.ranks import MISS
from segue.evaluation.report import table, warm_and_cold
from segue.evaluation.settings import EvaluateSettings
from segue.evaluation.split_log import SplitLog

USERS = ([1, 2, 3, 2], [2, 1, 3, 5], [3, 1, 2, 6], [1, 2, 6, 3])
"""Training has 1, 2 and 3; 5 is only a target; 6 is a target and, for the last user, the newest event."""
SCORES = torch.tensor([[0.0, 3, 2, 1, 6, 5, 4]]).repeat(7, 1)
SCORES[6] = torch.tensor([0.0, 1, 2, 3, 4, 5, 6])


def evaluate_users(known: list[bool] | None) -> tuple[Evaluation, Table, Split]:
    sequences = sequences_of(*USERS)
    scorer, split = Table(SCORES), split_last(sequences)
    evaluation = evaluate(
        scorer,
        SplitLog(sequences, split, 6),
        settings=EvaluateSettings(bootstrap=0, seen="keep", at=(1, 2, 10)),
        answerable=None if known is None else lambda counts: (counts > 0) | np.array(known),
    )
    return evaluation, scorer, split


def test_by_id_cold_targets_are_misses_and_cold_items_are_not_read() -> None:
    evaluation, scorer, _ = evaluate_users(None)
    assert evaluation.ranks.tolist() == [2, MISS, MISS, 3]
    assert evaluation.report.unknown == 2
    (histories,) = scorer.calls
    assert 6 not in histories.items
    warm, cold = evaluation.report.slices["target"]
    assert (warm.name, warm.cases, cold.name, cold.cases) == ("warm", 2, "cold", 2)
    assert cold.metrics["hit@10"] == 0 and warm.metrics["hit@10"] == 1
    assert "cold" not in table(evaluation.report), "no row for cold targets"


def test_by_content_cold_targets_are_ranked_and_cold_items_read() -> None:
    """Item 4 has no content: no candidate, though it is scored highest."""
    evaluation, scorer, _ = evaluate_users([False, False, False, False, False, True, True])
    # 5 and 6 come before 1, 2 and 3; after item 6 was read, 6 and 5 come before 3.
    assert evaluation.ranks.tolist() == [4, 1, 2, 3]
    assert evaluation.report.unknown == 0
    assert 6 in scorer.calls[0].items
    warm, cold = evaluation.report.slices["target"]
    assert (warm.metrics["hit@1"], cold.metrics["hit@1"], cold.metrics["hit@2"]) == (0, 0.5, 1)
    lines = table(evaluation.report).splitlines()
    assert any(line.split()[:2] == ["warm", "2"] for line in lines)
    assert any(line.split()[:3] == ["cold", "2", "1.0000"] for line in lines)
    assert set(evaluation.report.baselines) == set(BASELINES), "ranked among the same candidates"
    assert evaluation.report.baselines["popularity"]["hit@1"] < 1


def test_without_cold_targets_there_is_no_cold_slice() -> None:
    sequences = sequences_of([1, 2, 3, 1], [2, 3, 1, 2], [3, 1, 2, 3])
    report = evaluate(
        Table(torch.eye(4)), SplitLog(sequences, split_last(sequences), 3), settings=EvaluateSettings(bootstrap=0)
    ).report
    assert set(report.slices) == {"history", "popularity"}


def test_slices_by_hand() -> None:
    parts = warm_and_cold(np.array([True, False, True]), np.array([1, 2, MISS]), (1,))
    assert [(part.name, part.cases, part.metrics["hit@1"]) for part in parts] == [("warm", 1, 0), ("cold", 2, 0.5)]
    assert [part.name for part in warm_and_cold(np.array([True]), np.array([1]), (1,))] == ["cold"]
