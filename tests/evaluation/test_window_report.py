from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_logs import Table, sequences_of

from segue.data.batch import Batch
from segue.data.sequences import Sequences
from segue.data.split import Split, split_time
from segue.errors import InputError, SettingsError
from segue.evaluation.baselines import BASELINES
from segue.evaluation.metrics import entropies, p90_coverage, relative_losses, user_totals
from segue.evaluation.ranks import MISS, ranks_among, ranks_within
from segue.evaluation.report import WindowReport, table
from segue.evaluation.settings import EvaluateSettings
from segue.evaluation.split_log import SplitLog
from segue.evaluation.window.cases import DAY, WindowCases, validation_window, window_cases
from segue.evaluation.window.evaluate import TargetWindow, WindowEvaluation, evaluate_window

DAY_SECONDS = 86_400
KEEP_SEEN = EvaluateSettings(seen="keep", at=(1, 2), bootstrap=0)

# --- one metric at a time --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times_shown", "share"),
    [
        ([50, 30, 10, 5, 5, 0, 0, 0, 0, 0], 3 / 10),  # 50 + 30 + 10 of 100 is 90 %, exactly
        ([50, 30, 9, 6, 5, 0, 0, 0, 0, 0], 4 / 10),
        ([0, 0, 7, 0], 1 / 4),  # all get the same
        ([10] * 10, 9 / 10),
        ([1] * 4, 4 / 4),  # 3.6 items do not exist
        ([0, 0], 0),
    ],
)
def test_p90_coverage_by_hand(times_shown: list[int], share: float) -> None:
    assert p90_coverage(np.array([999, *times_shown])) == pytest.approx(share)  # number 0 is padding
    assert p90_coverage(np.array([0, *times_shown[::-1]])) == pytest.approx(share)


def test_entropies_by_hand() -> None:
    kinds = np.array([[1, 1, 2, 3], [4, 3, 2, 1], [5, 5, 5, 5], [1, 2, 0, 0], [0, 0, 0, 0]])
    halves_and_quarters = 1.5 * math.log(2)
    expected = [halves_and_quarters, math.log(4), 0, math.log(2), 0]
    assert entropies(kinds) == pytest.approx(expected)
    assert entropies(np.zeros((0, 3), dtype=np.int64)).tolist() == []


def test_relative_loss_by_hand() -> None:
    """Two users with two cases and one: means 0.5 and 0.25 over the same three cases, so half is lost."""
    users = np.array([7, 7, 9])
    theirs = user_totals({"recall@1": np.array([1.0, 0.5, 0.0]), "hit@1": np.zeros(3)}, users)
    ours = user_totals({"recall@1": np.array([0.5, 0.25, 0.0]), "hit@1": np.ones(3)}, users)
    losses = relative_losses(ours, theirs, samples=100, rng=np.random.default_rng(0))
    assert losses["recall@1"].value == pytest.approx(0.5)
    assert losses["recall@1"].low == losses["recall@1"].high == pytest.approx(0.5)  # each user lost half
    assert losses["hit@1"].value is None
    assert relative_losses(ours, theirs, samples=0, rng=np.random.default_rng(0))["recall@1"].low is None


@given(st.integers(0, 10_000), st.integers(1, 9))
@settings(max_examples=25)
def test_ranks_of_a_batch_equal_the_ranks_one_by_one(seed: int, depth: int) -> None:
    rng = np.random.default_rng(seed)
    scores = torch.from_numpy(rng.integers(0, 4, (5, 7)).astype(np.float32))  # many ties
    scores[torch.from_numpy(rng.random((5, 7)) < 0.2)] = -torch.inf
    rows, targets = rng.integers(0, 5, 20), rng.integers(0, 7, 20)
    each = np.array(
        [ranks_among(scores[[row]], np.array([target]))[0] for row, target in zip(rows, targets, strict=True)]
    )
    expected = np.where((each > depth) & (each != MISS), depth + 1, each)
    assert ranks_within(scores, rows, targets, depth).tolist() == expected.tolist()


# --- the cases of a window -------------------------------------------------------------------------------------------


def days(*users: Sequence[tuple[int, float]]) -> Sequences:
    """(item, day) of each user's events."""
    return sequences_of(
        *([item for item, _ in user] for user in users),
        times=[[round(day * DAY_SECONDS) for _, day in user] for user in users],
    )


def split_at(sequences: Sequences, *, valid: float = 5, test: float = 10) -> Split:
    return split_time(sequences, valid_from=round(valid * DAY), test_from=round(test * DAY))


WALKS = days(
    [(1, 1), (2, 11), (3, 12), (2, 13), (4, 30)],  # 2 twice, and 4 too late
    [(2, 3), (5, 9), (3, 10), (1, 24)],  # 3 at the split time itself, 1 at the end of the window
    [(1, 11), (2, 12)],  # no history
    [(3, 1), (4, 2), (5, 3), (1, 40)],  # nothing in the window
)


def pairs(cases: WindowCases) -> list[tuple[int, int]]:
    return list(zip(cases.users[cases.owner].tolist(), cases.targets.tolist(), strict=True))


def test_cases_by_hand() -> None:
    cases = window_cases(WALKS, time=10 * DAY, until=24 * DAY)
    assert cases.users.tolist() == [0, 1] and cases.sizes.tolist() == [2, 1]
    assert pairs(cases) == [(0, 2), (0, 3), (1, 1)]
    assert (cases.ends - cases.starts).tolist() == [1, 2]
    earlier = window_cases(WALKS, time=10 * DAY, until=24 * DAY - 1)
    assert pairs(earlier) == [(0, 2), (0, 3)]
    aged = window_cases(WALKS, time=10 * DAY, until=24 * DAY, oldest=2 * DAY)
    assert aged.users.tolist() == [0] and (aged.ends - aged.starts).tolist() == [1]
    none = window_cases(WALKS, time=10 * DAY, until=24 * DAY, oldest=DAY)
    assert len(none) == 0 and none.sizes.tolist() == []


def test_only_positive_events_are_targets() -> None:
    """Of the first user's 2, 3, 2 only the last is a purchase; the second user's only event is not."""
    kinds = np.zeros(WALKS.n_events, dtype=np.uint16)
    kinds[[0, 3]] = 1  # and the first user's history
    log = Sequences(offsets=WALKS.offsets, items=WALKS.items, times=WALKS.times, kinds=kinds)

    def is_purchase(batch: Batch) -> np.ndarray:
        assert batch.kinds is not None
        return np.asarray(batch.kinds == 1)

    assert pairs(window_cases(log, time=10 * DAY, until=24 * DAY, positive=is_purchase)) == [(0, 2)]


def test_validation_has_no_event_of_the_test() -> None:
    split = split_at(WALKS, valid=8)
    assert pairs(validation_window(WALKS, split, 14)) == [(1, 5)]
    log = days([(1, 1), (2, 9), (3, 10), (4, 11)])
    assert pairs(validation_window(log, split_at(log, valid=8, test=10), 14)) == [(0, 2)]


# --- by hand, from the log to the report -----------------------------------------------------------------------------

ORDERS = {1: [2, 4, 3, 5, 1], 2: [1, 5, 3, 2, 4], 5: [3, 1, 2, 4, 5]}  # best first, by the history's last item


def by_last_item(orders: dict[int, list[int]], n_items: int) -> Table:
    scores = torch.zeros(n_items + 1, n_items + 1)
    for last, order in orders.items():
        scores[last, order] = torch.arange(len(order), 0, -1).float()
    return Table(scores)


def evaluate_log(
    log: Sequences = WALKS,
    *,
    how: EvaluateSettings = KEEP_SEEN,
    ages: Sequence[float] = (0,),
    scorer: Table | None = None,
    interest: np.ndarray | None = None,
    n_items: int = 5,
    baselines: bool = False,
) -> WindowEvaluation:
    return evaluate_window(
        scorer or by_last_item(ORDERS, n_items),
        SplitLog(log, split_at(log), n_items),
        TargetWindow(14, ages, interest=interest),
        settings=how,
        baselines=baselines,
    )


def test_metrics_by_hand() -> None:
    """After 1 the first user's list is 2, 4, the targets 2, 3; after 5 the second's list is 3, 1, the target 1."""
    interest = np.array([0, 1, 1, 2, 1, 2])
    report = evaluate_log(interest=interest).report
    assert report.metrics == pytest.approx(
        {
            "recall@1": (1 / 2 + 0) / 2,
            "recall@2": (1 / 2 + 1) / 2,
            "hit@1": 1 / 2,
            "hit@2": 1,
            "coverage@1": 2 / 5,
            "coverage@2": 4 / 5,
            "p90_coverage@1": 2 / 5,
            "p90_coverage@2": 4 / 5,
            "entropy@1": 0,
            "entropy@2": (0 + math.log(2)) / 2,  # 2 and 4 have one interest, 3 and 1 have two
        }
    )
    assert (report.users, report.targets, report.unknown, report.unreachable) == (2, 3, 0, 0)
    assert report.split_time == "1970-01-11T00:00:00+00:00" and report.trained_before == "1970-01-06T00:00:00+00:00"


def test_freshness_by_hand() -> None:
    """Five days earlier the second user's last item is 2, after which 1 comes first: recall@1 is 1/2 and 1."""
    report = evaluate_log(ages=(5,)).report
    fresh, aged = report.ages
    assert (fresh.days, aged.days, aged.history_before) == (0, 5, "1970-01-06T00:00:00+00:00")
    assert fresh.metrics["recall@1"] == report.metrics["recall@1"] == 1 / 4
    assert aged.metrics["recall@1"] == 3 / 4 and aged.fall["recall@1"].value == pytest.approx(1 - 3)
    assert fresh.fall["recall@1"].value == 0


def test_users_at_every_age_are_those_with_the_oldest_history() -> None:
    report = evaluate_log(ages=(8.5, 0)).report  # before day 1.5 only the first user has an event
    assert report.users == 1 and report.metrics["recall@1"] == 1 / 2
    with pytest.raises(InputError, match="Nobody with an event before 1970-01-02T00:00:00"):
        evaluate_log(ages=(9,))


def test_seen_items_are_excluded_at_every_age() -> None:
    """The second user has seen 2 and 5. Both are excluded two days earlier, too, when 2 was the last item."""
    how = EvaluateSettings(seen="exclude", at=(1, 2, 3), bootstrap=0)
    orders = {**ORDERS, 2: [5, 3, 1, 2, 4]}
    evaluation = evaluate_log(how=how, ages=(0, 2), scorer=by_last_item(orders, 5))
    assert evaluation.values[2]["recall@2"].tolist() == [1 / 2, 1]  # 5 is excluded
    assert evaluation.values[0]["recall@2"].tolist() == [1 / 2, 1]
    report = evaluate_log(days([(1, 1), (1, 11), (2, 12)], [(2, 1), (1, 2), (9, 12)]), how=how, n_items=9).report
    assert (report.targets, report.unreachable, report.unknown) == (3, 1, 1)


def test_cold_items_with_content_may_be_recommended() -> None:
    """Item 3 is unseen in training, and is the second user's target after item 3 itself."""
    log = days([(1, 1), (2, 2)], [(1, 1), (3, 8), (3, 12)])
    scorer = by_last_item({1: [1, 2, 3], 3: [3, 1, 2]}, 3)

    def report(answerable: Callable[[np.ndarray], np.ndarray] | None = None) -> WindowReport:
        split_log = SplitLog(log, split_at(log), 3)
        return evaluate_window(scorer, split_log, TargetWindow(14), settings=KEEP_SEEN, answerable=answerable).report

    assert (report().unknown, report().metrics["recall@1"]) == (1, 0)
    assert [(part.name, part.targets, part.metrics["recall@2"]) for part in report().by_target] == [("cold", 1, 0)]
    content = report(answerable=lambda counts: np.arange(len(counts)) > 0)
    assert (content.unknown, content.metrics["recall@1"]) == (0, 1), "it is read in the history, too"
    assert content.baselines["last-item"]["recall@1"] == 0 and content.baselines.keys() == report().baselines.keys()


def test_warm_and_cold_targets_by_hand() -> None:
    """Training has 1 and 2. The first user's targets are 2 and 3, the second's is 3; both lists are 2 and 3."""
    log = days([(1, 1), (2, 2), (1, 9), (2, 11), (3, 12)], [(1, 1), (3, 12)])
    scorer, everything = by_last_item({1: [2, 3, 1]}, 3), np.arange(4) > 0
    report = evaluate_window(
        scorer, SplitLog(log, split_at(log), 3), TargetWindow(14), settings=KEEP_SEEN, answerable=lambda _: everything
    ).report
    warm, cold = report.by_target
    assert (warm.name, warm.users, warm.targets) == ("warm", 1, 1)
    assert (cold.name, cold.users, cold.targets) == ("cold", 2, 2)
    assert warm.metrics == {"recall@1": 1, "hit@1": 1, "recall@2": 1, "hit@2": 1}
    assert cold.metrics == {"recall@1": 0, "hit@1": 0, "recall@2": 1, "hit@2": 1}
    lines = [line.split() for line in table(report).splitlines()]
    assert ["warm", "1", "1", "1.0000", "1.0000"] in lines and ["cold", "2", "2", "1.0000", "1.0000"] in lines
    assert [part.name for part in evaluate_log().report.by_target] == ["warm"], "without cold targets"
    assert "cold" not in table(evaluate_log().report)


def test_ties_count_against_the_scorer() -> None:
    report = evaluate_log(scorer=Table(torch.zeros(6, 6))).report
    assert report.metrics["recall@2"] == 0 and report.metrics["hit@2"] == 0
    deep = EvaluateSettings(seen="keep", at=(5,), bootstrap=0)
    # the list holds all five
    assert evaluate_log(scorer=Table(torch.zeros(6, 6)), how=deep).report.metrics["recall@5"] == 1


# --- properties over random logs -------------------------------------------------------------------------------------


def random_log(seed: int, *, users: int = 12, n_items: int = 8) -> Sequences:
    """Every user begins with item 1, so that no query is answered by popularity, whose ties are broken by number."""
    rng = np.random.default_rng(seed)
    walks = [sorted(rng.integers(0, 26, rng.integers(1, 12)).tolist()) for _ in range(users)]
    events = [[(int(rng.integers(1, n_items + 1)), day) for day in walk] for walk in walks]
    return days([(1, 0), (1, 20)], *([(1, 0), *walk] for walk in events))


def random_scorer(seed: int, *, ties: bool, n_items: int = 8) -> Table:
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 4, (n_items + 1,) * 2) if ties else rng.random((n_items + 1,) * 2)
    return Table(torch.from_numpy(scores).float())


def plain_recall(log: Sequences, scorer: Table, age: float, k: int) -> dict[int, float]:
    """User by user and item by item, seen items kept."""
    candidates = {int(item) for item, time in zip(log.items, log.times, strict=True) if time < 5 * DAY}
    table, result = scorer.table.tolist(), {}
    for user in range(log.n_users):
        rows = range(log.offsets[user], log.offsets[user + 1])
        events = [(int(log.items[row]), int(log.times[row]) / DAY) for row in rows]
        history = [item for item, day in events if day < 10 - age and item in candidates]
        targets = {item for item, day in events if 10 < day <= 24}
        if targets:
            scores = table[history[-1]]
            within = {item for item in candidates if sum(scores[other] >= scores[item] for other in candidates) <= k}
            result[user] = len(targets & within) / len(targets)
    return result


@given(st.integers(0, 10_000), st.booleans(), st.sampled_from([0, 1, 4, 9]))
@settings(max_examples=20)
def test_recall_equals_plain_counting(seed: int, ties: bool, age: float) -> None:
    log, scorer = random_log(seed), random_scorer(seed, ties=ties)
    how = EvaluateSettings(seen="keep", at=(1, 3, 8), bootstrap=0)
    evaluation = evaluate_log(log, how=how, ages=(age,), scorer=scorer, n_items=8)
    for k in how.at:
        expected = plain_recall(log, scorer, age, k)
        assert evaluation.users.tolist() == list(expected)
        assert evaluation.values[age][f"recall@{k}"] == pytest.approx(list(expected.values()))


def plain_recalls(log: Sequences, scorer: Table, k: int, *, cold: bool) -> list[float]:
    """The recall over each user's warm or cold targets, counted one by one, if every item may be recommended and
    read."""
    warm = {int(item) for item, time in zip(log.items, log.times, strict=True) if time < 5 * DAY}
    recalls = []
    for user in range(log.n_users):
        rows = range(log.offsets[user], log.offsets[user + 1])
        events = [(int(log.items[row]), int(log.times[row]) / DAY) for row in rows]
        targets = {item for item, day in events if 10 < day <= 24 and (item not in warm) == cold}
        if targets:
            scores = scorer.table[[item for item, day in events if day < 10][-1]].tolist()[1:]
            within = [item for item in targets if sum(other >= scores[item - 1] for other in scores) <= k]
            recalls.append(len(within) / len(targets))
    return recalls


@given(st.integers(0, 10_000), st.booleans())
@settings(max_examples=20)
def test_recall_of_warm_and_cold_targets_equals_plain_counting(seed: int, ties: bool) -> None:
    log, scorer = random_log(seed, users=6, n_items=20), random_scorer(seed, ties=ties, n_items=20)
    how = EvaluateSettings(seen="keep", at=(1, 5, 12), bootstrap=0)
    split_log, everything = SplitLog(log, split_at(log), 20), np.arange(21) > 0
    report = evaluate_window(
        scorer, split_log, TargetWindow(14), settings=how, answerable=lambda _: everything, baselines=False
    ).report
    expected = {
        name: {k: plain_recalls(log, scorer, k, cold=name == "cold") for k in how.at} for name in ("warm", "cold")
    }
    assert [part.name for part in report.by_target] == [name for name, by_depth in expected.items() if by_depth[1]]
    assert sum(part.targets for part in report.by_target) == report.targets
    for part in report.by_target:
        for k, recalls in expected[part.name].items():
            assert part.users == len(recalls)
            assert part.metrics[f"recall@{k}"] == pytest.approx(np.mean(recalls))
            assert part.metrics[f"hit@{k}"] == pytest.approx(np.mean([recall > 0 for recall in recalls]))


@given(st.integers(0, 10_000))
@settings(max_examples=20)
def test_recall_and_hits_rise_with_depth(seed: int) -> None:
    how = EvaluateSettings(at=(1, 2, 4, 8), bootstrap=0)
    values = evaluate_log(random_log(seed), how=how, scorer=random_scorer(seed, ties=True), n_items=8).values[0]
    for name in ("recall", "hit"):
        rising = np.stack([values[f"{name}@{k}"] for k in how.at])
        assert (np.diff(rising, axis=0) >= 0).all() and (rising <= 1).all() and (rising >= 0).all()
    assert all((values[f"recall@{k}"] <= values[f"hit@{k}"]).all() for k in how.at)


@given(st.integers(0, 10_000))
@settings(max_examples=20)
def test_renumbering_items_changes_nothing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    log, table = random_log(seed), random_scorer(seed, ties=False).table
    other = np.concatenate(([0], rng.permutation(8) + 1))  # other[item] is its new number
    back = np.argsort(other)
    renumbered = Sequences(offsets=log.offsets, items=other[log.items].astype(np.int32), times=log.times)
    interest = np.concatenate(([0], rng.integers(1, 4, 8)))
    how = EvaluateSettings(at=(1, 3), bootstrap=20)
    one = evaluate_log(log, how=how, ages=(0, 2), scorer=Table(table), interest=interest, n_items=8)
    two = evaluate_log(
        renumbered, how=how, ages=(0, 2), scorer=Table(table[back][:, back]), interest=interest[back], n_items=8
    )
    assert one.report == two.report


def test_age_0_is_the_plain_evaluation() -> None:
    log, how = random_log(3), EvaluateSettings(at=(1, 3), bootstrap=20)
    plain = evaluate_log(log, how=how, n_items=8, scorer=random_scorer(3, ties=False))
    aged = evaluate_log(log, how=how, n_items=8, scorer=random_scorer(3, ties=False), ages=(9, 1, 3, 7, 0))
    assert [age.days for age in aged.report.ages] == [0, 1, 3, 7, 9]
    assert aged.report.metrics == aged.report.ages[0].metrics == plain.report.metrics
    assert aged.values[0]["recall@3"].tolist() == plain.values[0]["recall@3"].tolist()
    assert all(fall.value == 0 for fall in aged.report.ages[0].fall.values())
    assert any(age.metrics != plain.report.metrics for age in aged.report.ages[1:])


# --- the report ------------------------------------------------------------------------------------------------------


def test_baselines_are_measured_by_the_same_rules_and_reported() -> None:
    how = EvaluateSettings(at=(1, 3), bootstrap=50)
    evaluation = evaluate_log(
        random_log(1, users=40), how=how, ages=(0, 2), n_items=8, scorer=random_scorer(1, ties=False), baselines=True
    )
    report = evaluation.report
    assert msgspec.json.decode(msgspec.json.encode(report), type=WindowReport) == report
    assert list(report.baselines) == list(report.baseline_intervals) == list(report.baseline_notes) == list(BASELINES)
    assert all(set(figures) == set(report.metrics) for figures in report.baselines.values())
    for name, (low, high) in report.intervals.items():
        assert low <= report.metrics[name] <= high
    text = table(report)
    for words in ("model", *BASELINES, "recall@3", "p90_coverage@3", "lost since age 0", f"{report.users} users"):
        assert words in text
    assert f"{report.ages[1].metrics['recall@3']:.4f}" in text
    assert "lost since" not in table(msgspec.structs.replace(report, ages=report.ages[:1]))


def test_invalid_ages_and_days_are_refused() -> None:
    for ages, ahead, option in (
        ((-1,), 14, "--ages"),
        ((math.nan,), 14, "--ages"),
        ((1e6,), 14, "--ages"),
        ((0,), 0, "--days"),
        ((0,), 1e6, "--days"),
    ):
        with pytest.raises(SettingsError, match=option):
            evaluate_window(
                by_last_item(ORDERS, 5),
                SplitLog(WALKS, split_at(WALKS), 5),
                TargetWindow(ahead, ages),
                settings=KEEP_SEEN,
            )
