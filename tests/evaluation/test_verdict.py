from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tiny_logs import Table, sequences_of

from segue.data.split import split_last, split_time
from segue.evaluation.evaluate import evaluate
from segue.evaluation.metrics import ndcg
from segue.evaluation.settings import EvaluateSettings
from segue.evaluation.split_log import SplitLog
from segue.evaluation.verdict import BestSimple, Shortcut, Verdict, counts_sentence, judge, sentences
from segue.evaluation.window.evaluate import TargetWindow, evaluate_window

# --- the numbers ------------------------------------------------------------------------------------------------------

RANKS = {
    "model": [1, 3, 11, 2, 1, 7],  # ndcg@10: 1, 1/2, 0, 1/log2(3), 1, 1/3
    "popularity": [15, 3, 15, 15, 15, 15],
    "session-knn": [1, 15, 15, 15, 15, 3],  # 1 + 1/2
    "last-item": [3, 1, 15, 15, 15, 15],  # 1/2 + 1, equal to the neighbours
}
THIRD = 0.6309297535714574  # 1 / log2(3)


def judged(*, samples: int = 0, **options: Any) -> Verdict:
    values = {name: ndcg(np.array(ranks), 10) for name, ranks in RANKS.items()}
    model = values.pop("model")
    users = np.arange(len(model))
    rng = np.random.default_rng(0)
    return judge("ndcg@10", model, options.pop("baselines", values), users, samples=samples, rng=rng, **options)


def test_the_model_beside_the_best_simple_method_by_hand() -> None:
    verdict = judged()
    total = 1 + 1 / 2 + THIRD + 1 + 1 / 3
    assert (verdict.metric, verdict.users, verdict.shortcut) == ("ndcg@10", 6, None)
    assert verdict.score == pytest.approx(total / 6) and verdict.popularity == pytest.approx(0.5 / 6)
    assert verdict.best is not None
    assert (verdict.best.name, verdict.best.score, verdict.best.interval) == ("session-knn", 0.25, None)
    assert verdict.best.difference == pytest.approx((total - 1.5) / 6)


def test_the_shortcut_by_hand() -> None:
    """The last item alone has the first two targets, with half of them second: 1.5 of the model's score."""
    shortcut = judged(explained=np.array(RANKS["last-item"]) <= 10).shortcut
    assert shortcut is not None and shortcut.best is not None
    others = THIRD + 1 + 1 / 3
    assert shortcut.share == pytest.approx(1.5 / (1.5 + others))
    assert shortcut.cases == 4 and shortcut.score == pytest.approx(others / 4)
    assert (shortcut.best.name, shortcut.best.score) == ("session-knn", 0.125)
    assert shortcut.best.difference == pytest.approx((others - 0.5) / 4)


def test_a_shortcut_that_explains_every_case_leaves_no_others() -> None:
    assert judged(explained=np.ones(6, dtype=bool)).shortcut == Shortcut(1.0, 0, None, None)


def test_a_score_of_zero_has_no_shortcut() -> None:
    nothing, users = np.zeros(30), np.arange(30)
    explained = users < 10
    verdict = judge("ndcg@10", nothing, {}, users, samples=0, rng=np.random.default_rng(0), explained=explained)
    assert verdict.shortcut is None and verdict.best is None and not verdict.warning


def of_gain(*gains: float, users: np.ndarray | None = None) -> Verdict:
    """The verdict on a model that is better by `gains`, which repeat for 400 cases, than a method that has 1/2."""
    theirs = np.full(400, 0.5)
    model = theirs + np.resize(gains, 400)
    owners = np.arange(400) if users is None else users
    rng = np.random.default_rng(0)
    return judge("ndcg@10", model, {"popularity": theirs - 0.5, "session-knn": theirs}, owners, samples=500, rng=rng)


def test_the_interval_is_that_of_paired_differences() -> None:
    """Cases that differ by ±.5 in half of 400 cases each: a standard error of .5 / 20, so 95 % are about ±.049."""
    even, always = of_gain(0.5, -0.5), of_gain(0.25)
    assert even.best is not None and always.best is not None
    assert even.best.difference == 0 and even.warning
    assert even.best.interval == pytest.approx((-0.049, 0.049), abs=0.007)
    assert always.best.interval == pytest.approx((0.25, 0.25)) and not always.warning


def test_the_cases_of_one_user_are_resampled_together() -> None:
    """Two users: one has all of the gain, so that a quarter of the resamples shows none."""
    verdict = of_gain(0.5, 0.0, users=np.arange(400) % 2)
    assert verdict.best is not None and verdict.best.interval == pytest.approx((0, 0.5)) and verdict.users == 2


# --- the words --------------------------------------------------------------------------------------------------------


def said(
    score: float,
    best: float,
    interval: tuple[float, float] | None = None,
    *,
    popularity: float = 0.01,
    name: str = "session-knn",
    users: int = 5000,
) -> str:
    """The first sentences on a model of this score. Whether they warn follows from the sign of the interval."""
    simple = BestSimple(name, best, score - best, interval)
    least = score - best if interval is None else interval[0]
    warning = least <= 0 or users < 20
    verdict = Verdict("ndcg@10", users, score, simple, popularity, None, warning)
    return " ".join(sentences(verdict, by_time=False))


def test_a_better_model() -> None:
    assert said(0.0651, 0.0458, (0.0170, 0.0215)) == (
        "ndcg@10 .0651: 42 % better than the best simple method, session-knn (.0458), by .0193 (95 % .0170 to .0215)."
    )
    assert "4.4 % better than" in said(0.0478, 0.0458, (0.0010, 0.0030))
    assert said(1.0, 0.5, None) == (
        "ndcg@10 1.0000: 100 % better than the best simple method, session-knn (.5000), by .5000 (no interval: "
        "`evaluate.bootstrap` is 0)."
    )
    assert said(0.02, 0.0, (0.01, 0.03)).startswith("ndcg@10 .0200: better than the best simple method, session-knn")


@pytest.mark.parametrize(
    ("score", "interval", "begin", "end"),
    [
        (
            0.0466,
            (-0.0010, 0.0026),
            "WARNING: not clearly better than the best simple method, session-knn: ndcg@10 .0466 against .0458, a "
            "difference of .0008 (95 % -.0010 to .0026). ",
            "Train longer (`segue train --minutes`) or on more data to be sure.",
        ),
        (
            0.0450,
            (-0.0026, 0.0010),
            "WARNING: not better than the best simple method, session-knn: ndcg@10 .0450 against .0458, a difference "
            "of -.0008 (95 % -.0026 to .0010). ",
            "Train longer (`segue train --minutes`), on more data or with another recipe (`segue recipes`).",
        ),
        (
            0.0400,
            (-0.0080, -0.0036),
            "WARNING: worse than the best simple method, session-knn: ndcg@10 .0400 against .0458, a difference of "
            "-.0058 (95 % -.0080 to -.0036). ",
            "Train longer (`segue train --minutes`), with another recipe (`segue recipes`) or on more data.",
        ),
        (
            0.0400,
            None,
            "WARNING: worse than the best simple method, session-knn: ndcg@10 .0400 against .0458, a difference of "
            "-.0058 (no interval: `evaluate.bootstrap` is 0). ",
            "Train longer (`segue train --minutes`), with another recipe (`segue recipes`) or on more data.",
        ),
        (
            0.0458,
            (0.0, 0.0),
            "WARNING: not better than the best simple method, session-knn: ndcg@10 .0458 against .0458, a difference "
            "of .0000 (95 % .0000 to .0000). ",
            "Train longer (`segue train --minutes`), on more data or with another recipe (`segue recipes`).",
        ),
    ],
)
def test_a_model_that_is_not_clearly_better(
    score: float, interval: tuple[float, float] | None, begin: str, end: str
) -> None:
    assert said(score, 0.0458, interval) == begin + end


def test_a_model_worse_than_popularity() -> None:
    text = said(0.0102, 0.0458, (-0.04, -0.03), popularity=0.0150)
    assert text.startswith(
        "WARNING: worse than popularity (.0150), and than the best simple method, session-knn: ndcg@10 .0102 against "
        ".0458, a difference of -.0356 (95 % -.0400 to -.0300). It is worse than the same list for everybody"
    )
    text = said(0.0102, 0.0150, (-0.006, -0.002), popularity=0.0150, name="popularity")
    assert text.startswith("WARNING: worse than the best simple method, popularity: ndcg@10 .0102 against .0150")
    assert "the same list for everybody" in text


def test_too_few_users() -> None:
    """Few users, or an interval around zero that is wider than the score to beat."""
    text = said(0.3, 0.1, (0.1, 0.3), users=12)
    assert text.startswith(
        "WARNING: 12 users are too few to tell whether the model is better than the best simple method, session-knn: "
        "ndcg@10 .3000 against .1000, a difference of .2000 (95 % .1000 to .3000). Use a log of more users"
    )
    assert said(1.0, 0.0, None, users=1).startswith("WARNING: 1 user is too few")
    assert "40 users are too few" in said(0.1, 0.12, (-0.08, 0.05), users=40)
    assert "too few" not in said(0.1, 0.14, (-0.08, 0.05), users=40)
    assert "too few" not in said(0.3, 0.1, (0.15, 0.3), users=20), "above zero, however wide"


def test_scores_that_are_all_zero() -> None:
    assert said(0.0, 0.0, (0.0, 0.0), popularity=0.0) == (
        "WARNING: ndcg@10 is zero for the model and for every simple method: nobody's list holds a target. Use more "
        "data, or prepare it with another --split."
    )


def test_no_simple_method_measured() -> None:
    verdict = judged(baselines={})
    assert not verdict.warning
    assert verdict.sentences == [
        "ndcg@10 .5774. No simple method was measured on the same cases, so this does not tell whether the model is "
        "better than one."
    ]


def test_the_shortcut_in_words() -> None:
    def line(shortcut: Shortcut) -> str:
        return sentences(Verdict("ndcg@10", 5000, 0.07, None, None, shortcut), by_time=False)[1]

    best = BestSimple("session-knn", 0.0102, 0.0199, None)
    assert line(Shortcut(0.634, 11_230, 0.0301, best)) == (
        "Shortcut: the last item alone explains 63 % of this score; on the 11,230 cases it does not explain, ndcg@10 "
        "is .0301 (best simple method there: session-knn, .0102)."
    )
    assert "on the 1 case it does" in line(Shortcut(0.99, 1, 0.0301, best))
    assert line(Shortcut(1.0, 0, None, None)) == (
        "Shortcut: the last item alone explains 100 % of this score; there are no cases that it does not explain."
    )


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        (None, ""),
        (
            {"weights": {"lag1": 1.0}, "pairs": 123_456, "bytes": 4_150_000, "without": 0.0520, "with": 0.0603},
            "Counts of what followed what: ndcg@10 on validation .0520 without them, .0603 with them; 123,456 pairs of "
            "items in 4.2 MB of memory.",
        ),
        (
            {"weights": {"lag1": 1.0}, "pairs": 921, "bytes": 11_924, "without": 0.0, "with": 1.0},
            "Counts of what followed what: ndcg@10 on validation .0000 without them, 1.0000 with them; 921 pairs of "
            "items in 11.9 kB of memory.",
        ),
        (
            {"without": 0.0520, "with": 0.0518},
            "Counts of what followed what did not help and were left out: ndcg@10 on validation .0520 without them, "
            ".0518 with them.",
        ),
    ],
)
def test_what_counts_were_worth(counts: dict[str, Any] | None, text: str) -> None:
    assert counts_sentence({} if counts is None else {"counts": counts}) == text


# --- in a report ------------------------------------------------------------------------------------------------------

CYCLE = [[(first + step) % 5 + 1 for step in range(6)] for first in range(40)]
LATER = "The held-out events are later than all training events"


def test_a_report_has_a_verdict_by_the_depth_of_its_table() -> None:
    """On a cycle of five items the last one explains everything, and the model equals it."""
    sequences = sequences_of(*CYCLE)
    follower = torch.zeros(6, 6)
    follower[torch.arange(1, 6), torch.tensor([2, 3, 4, 5, 1])] = 1
    log, settings = (
        SplitLog(sequences, split_last(sequences), 5),
        EvaluateSettings(at=(3, 1), bootstrap=20, seen="keep"),
    )
    verdict = evaluate(Table(follower), log, settings=settings).report.verdict
    assert verdict is not None and verdict.best is not None
    assert (verdict.metric, verdict.users, verdict.score, verdict.warning) == ("ndcg@3", 40, 1, True)
    assert (verdict.best.name, verdict.best.interval) == ("last-item", (0, 0))
    assert verdict.shortcut == Shortcut(1.0, 0, None, None)
    assert LATER not in verdict.sentences[0]


def test_the_verdict_of_a_split_by_time_mentions_live_use() -> None:
    times = [[first + 100 * step for step in range(6)] for first in range(40)]
    sequences = sequences_of(*CYCLE, times=times)
    split = split_time(sequences, valid_from=400_000_000, test_from=500_000_000)
    report = evaluate(
        Table(torch.zeros(6, 6)), SplitLog(sequences, split, 5), settings=EvaluateSettings(bootstrap=20, seen="keep")
    ).report
    assert report.split == "time" and report.verdict is not None
    assert LATER in report.verdict.sentences[0] and len(report.verdict.sentences) == 2


def test_a_window_has_a_verdict_by_recall() -> None:
    day = 86_400
    sequences = sequences_of(*CYCLE, times=[[10 * day + day * step for step in range(6)]] * 40)
    split = split_time(sequences, valid_from=13 * day * 1_000_000, test_from=14 * day * 1_000_000)
    log, settings = SplitLog(sequences, split, 5), EvaluateSettings(at=(1, 2), bootstrap=20, seen="keep")
    for baselines in (True, False):
        report = evaluate_window(
            Table(torch.zeros(6, 6)), log, TargetWindow(3), settings=settings, baselines=baselines
        ).report
        verdict = report.verdict
        assert verdict is not None and (verdict.metric, verdict.score) == ("recall@2", report.metrics["recall@2"])
        assert LATER in verdict.sentences[0] and len(verdict.sentences) == 1
        if verdict.best is None:
            assert not baselines
        else:
            assert verdict.best.score == max(metrics["recall@2"] for metrics in report.baselines.values())
            assert verdict.best.difference == pytest.approx(verdict.score - verdict.best.score)
    assert msgspec.json.decode(msgspec.json.encode(report), type=type(report)) == report
