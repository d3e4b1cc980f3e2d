from __future__ import annotations

import math

import numpy as np
import pytest

from segue.evaluation import metrics
from segue.evaluation.metrics import (
    GROUPS,
    coverage,
    differences,
    hit,
    intervals,
    mean_popularity,
    mrr,
    ndcg,
    rank_totals,
    resampled_means,
    summary,
    times_shown,
)
from segue.evaluation.ranks import MISS


def test_ndcg_at_known_ranks() -> None:
    values = ndcg(np.array([1, 2, 3, 5, 10]), 10)
    assert values == pytest.approx([1, 0.630930, 0.5, 0.386853, 0.289065], abs=1e-6)  # ALGORITHMS 25.7
    assert ndcg(np.array([4]), 10) == pytest.approx([0.430677], abs=1e-6)  # G10


def test_each_measure_is_zero_beyond_its_depth() -> None:
    ranks = np.array([1, 4, 10, 11, MISS])
    assert hit(ranks, 10).tolist() == [1, 1, 1, 0, 0]
    assert mrr(ranks, 10) == pytest.approx([1, 0.25, 0.1, 0, 0])
    assert ndcg(ranks, 10)[3:].tolist() == [0, 0]
    assert hit(ranks, 1).tolist() == ndcg(ranks, 1).tolist() == mrr(ranks, 1).tolist() == [1, 0, 0, 0, 0]


def test_summary_is_the_mean_over_cases() -> None:
    means = summary(np.array([1, 2, MISS]), (1, 10))
    assert means == pytest.approx(
        {
            "hit@1": 1 / 3,
            "ndcg@1": 1 / 3,
            "mrr@1": 1 / 3,
            "hit@10": 2 / 3,
            "ndcg@10": (1 + 1 / math.log2(3)) / 3,
            "mrr@10": 0.5,
        }
    )


def test_random_scores_hit_k_of_v() -> None:
    n_items, rng = 500, np.random.default_rng(1)
    ranks = rng.integers(1, n_items + 1, size=200_000)
    for k in (1, 10, 100):
        share = k / n_items
        assert hit(ranks, k).mean() == pytest.approx(share, abs=5 * math.sqrt(share * (1 - share) / len(ranks)))


def test_coverage_and_popularity_of_recommended_lists() -> None:
    lists = np.array([[3, 1, 4], [3, 2, 0]])  # the second query had two candidates
    assert times_shown(lists, 1, 5).tolist() == [0, 0, 0, 2, 0, 0]
    assert times_shown(lists, 3, 5).tolist() == [0, 1, 1, 2, 1, 0]
    assert coverage(times_shown(lists, 1, 5)) == pytest.approx(1 / 5)
    assert coverage(times_shown(lists, 3, 5)) == pytest.approx(4 / 5)
    counts = np.array([0, 10, 20, 30, 40, 50])
    assert mean_popularity(times_shown(lists, 1, 5), counts) == pytest.approx(30)
    assert mean_popularity(times_shown(lists, 3, 5), counts) == pytest.approx((3 * 1 + 1 * 1 + 4 * 1 + 3 + 2) * 10 / 5)
    assert mean_popularity(np.zeros(6, dtype=np.int64), counts) == 0


def test_an_interval_has_the_binomial_width() -> None:
    cases, share = 4_000, 0.3
    ranks = np.where(np.arange(cases) < share * cases, 1, MISS)
    result = intervals(rank_totals(ranks, (1,), np.arange(cases)), samples=4_000, rng=np.random.default_rng(2))
    half = 1.959964 * math.sqrt(share * (1 - share) / cases)  # normal approximation, good at this size
    assert result["hit@1"] == pytest.approx((share - half, share + half), abs=0.06 * half)


def test_intervals_cover_the_truth_nineteen_times_in_twenty() -> None:
    rng, truth, covered = np.random.default_rng(3), 0.25, 0
    for _ in range(400):
        ranks = np.where(rng.random(400) < truth, 1, MISS)
        low, high = intervals(rank_totals(ranks, (1,), np.arange(400)), samples=300, rng=rng)["hit@1"]
        covered += low <= truth <= high
    assert covered / 400 == pytest.approx(0.95, abs=0.04)  # 4 standard errors, and the bootstrap is a little narrow


def test_cases_of_one_user_are_resampled_together() -> None:
    """100 users with 25 equal cases each say as much as 100 cases, not as 2,500."""
    users = np.repeat(np.arange(100), 25)
    ranks = np.where(users % 2 == 0, 1, MISS)
    low, high = intervals(rank_totals(ranks, (1,), users), samples=4_000, rng=np.random.default_rng(4))["hit@1"]
    assert high - low == pytest.approx(2 * 1.959964 * math.sqrt(0.25 / 100), rel=0.1)


def test_many_users_share_groups_without_losing_a_case() -> None:
    users = np.arange(2 * GROUPS + 1)
    totals = rank_totals(np.ones(len(users), dtype=np.int64), (1,), users)
    assert len(totals.cases) == GROUPS
    assert totals.cases.sum() == totals.sums[:, 0].sum() == len(users)


def test_resampling_in_chunks_equals_resampling_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    totals = rank_totals(np.array([1, 2, 3, MISS]), (1, 5), np.arange(4))
    whole = resampled_means(totals, samples=10, rng=np.random.default_rng(5))
    monkeypatch.setattr(metrics, "SAMPLES_AT_A_TIME", 12)  # three at a time
    assert np.array_equal(resampled_means(totals, samples=10, rng=np.random.default_rng(5)), whole)


def test_no_samples_no_intervals() -> None:
    assert intervals(rank_totals(np.array([1]), (1,), np.arange(1)), samples=0, rng=np.random.default_rng(6)) == {}


def test_equal_ranks_are_no_difference() -> None:
    totals = rank_totals(np.array([1, 5, 20, MISS] * 50), (10,), np.arange(200))
    change = differences(totals, totals, samples=500, rng=np.random.default_rng(7))["ndcg@10"]
    assert (change.value, change.low, change.high, change.p) == (0, 0, 0, 1)


def test_paired_differences_detect_what_two_intervals_do_not() -> None:
    """One case in forty is better and none worse: inside each interval, but significant."""
    theirs = np.where(np.arange(2_000) % 4 == 0, 1, MISS)
    ours = np.where(np.arange(2_000) % 40 == 1, 1, theirs)
    rng = np.random.default_rng(8)
    changes = differences(
        rank_totals(ours, (1,), np.arange(2_000)), rank_totals(theirs, (1,), np.arange(2_000)), samples=2_000, rng=rng
    )
    change = changes["hit@1"]
    assert change.value == pytest.approx(0.025)
    assert 0 < change.low < 0.025 < change.high
    assert change.p == pytest.approx(2 / 2_001)


def test_noise_is_rarely_significant() -> None:
    rng, significant = np.random.default_rng(9), 0
    for _ in range(200):
        ours, theirs = (np.where(rng.random(300) < 0.3, 1, MISS) for _ in range(2))
        both = (rank_totals(ranks, (1,), np.arange(300)) for ranks in (ours, theirs))
        significant += differences(*both, samples=300, rng=rng)["hit@1"].p < 0.05
    assert significant / 200 < 0.05 + 4 * math.sqrt(0.05 * 0.95 / 200)
