"""Reasons from counts: by hand, against `recommend` with and without each event, as text and as a page."""

from __future__ import annotations

from functools import cache
from math import log
from typing import Any

import msgspec
import numpy as np
import pytest
from explained import HOSTILE, Page, explanation_of, values
from hypothesis import given, settings
from hypothesis import strategies as st
from small_counts import Pairs, counts_of
from small_recommenders import LETTERS, REAL_IDS, half_known, voting

from segue.counts.counts import Counts
from segue.counts.features import FEATURES, HORIZON, REPEATED, TOGETHER
from segue.counts.reasons import Reason
from segue.data.batch import Batch
from segue.recommend.answer import Contribution, CountReason, Explanation
from segue.recommend.explain.page import html
from segue.recommend.explain.text import lines
from segue.recommend.explain.words import sentence
from segue.recommend.recommender import Recommender

A, B, C, D = 1, 2, 3, 4


def counted(**further: Any) -> Recommender:
    """d followed c three times, came two events after b once, and is near b for two users; each of these has four."""
    counts = counts_of(
        [4] * len(LETTERS),
        [{(C, D): 3, (C, A): 9}, {(B, D): 1}, {(A, D): 7}],
        {(B, D): 2, (D, B): 2},
        after_1=2.0,
        after_2=-1.0,
        together=4.0,
        repeated=1.0,
        gap=0.25,
        newest=-3.0,
    )
    return voting(item_counts=counts, **further)


def found(explanation: Explanation) -> list[tuple[str, Any]]:
    return [(reason.sentence, pytest.approx(reason.score, abs=1e-6)) for reason in explanation.counts]


# --- by hand ------------------------------------------------------------------------------------------------------


def test_reasons_by_hand() -> None:
    """After-3 has no weight. The cosine of b and d is 2 / 4, one event old: 4 · .8 · .5."""
    explanation = counted().explain(["a", "b", "c"], "d")
    assert found(explanation) == [
        ("followed “Title c” 3 times", 2 * log(4)),
        ("2 users have it near “Title b”", 1.6),
        ("came two events after “Title b” once", -log(2)),
    ]
    assert [(one.item, one.title, one.kind, one.distance, one.count) for one in explanation.counts] == [
        ("c", "Title c", "followed", 1, 3),
        ("b", "Title b", "together", 2, 2),
        ("b", "Title b", "followed", 2, 1),
    ]
    assert explanation.counts_score == pytest.approx(2 * log(4) + 1.6 - log(2), abs=1e-6)
    assert explanation.item.score == pytest.approx(10 + explanation.counts_score, abs=1e-6)


def test_contributions_by_hand() -> None:
    """Votes for d: a 4, b 1, c 5. Without c, b is the newest: 4 · .5."""
    whole = 10 + 2 * log(4) + 1.6 - log(2)
    without = [1 + 5 + 2 * log(4) + 1.6 - log(2), 4 + 5 + 2 * log(4), 4 + 1 + 2.0]
    expected = [whole - score for score in without]
    assert values(counted().explain(["a", "b", "c"], "d")) == pytest.approx(expected, abs=1e-5)


def test_repeats_are_one_reason() -> None:
    explanation = counted().explain(["d", "a", "d", "f"], "d", keep_seen=True)
    assert found(explanation) == [("2 times in this history, last 2 events ago", log(3) + 0.25 * log(51 / 2))]
    assert [(one.item, one.kind, one.distance, one.count) for one in explanation.counts] == [("d", "repeated", 2, 2)]
    newest = counted().explain(["d"], "d")
    assert found(newest) == [("once in this history, as the newest event", log(2) + 0.25 * log(51) - 3)]


def test_an_item_met_twice_is_one_reason() -> None:
    """b is two and four events old."""
    explanation = counted().explain(["b", "e", "b", "f", "e"], "d")
    assert found(explanation) == [("2 users have it near “Title b”", 4 * 0.5 * (0.8**2 + 0.8**4))]
    assert explanation.counts[0].distance == 3


def test_unknown_entries_are_skipped() -> None:
    """The newest known event is c, and e is cold."""
    history = ["zzz", "a", "b", "e", "zzz", "c", "e"]
    explanation = counted(counts=[1, 1, 1, 1, 0, 1]).explain(history, "d")
    plain = counted().explain(["a", "b", "c"], "d")
    assert (explanation.counts, explanation.item) == (plain.counts, plain.item)
    expected = iter(values(plain))
    assert values(explanation) == [None if name in ("zzz", "e") else next(expected) for name in history]


def test_without_a_known_item_there_are_no_reasons() -> None:
    explanation = counted().explain(["zzz"], "d")
    assert (explanation.fallback, explanation.counts, explanation.counts_score) == ("popularity", [], 0.0)


def test_entries_that_only_counts_read_contribute() -> None:
    """The model reads three. d is five events old; without f it is four events old."""
    contributions = values(counted().explain(["d", "f", "a", "b", "c"], "d", keep_seen=True))
    assert contributions[:2] == pytest.approx(
        [log(2) + 0.25 * log(51 / 5), 0.25 * (log(51 / 5) - log(51 / 4))], abs=1e-5
    )
    assert values(voting().explain(["d", "f", "a", "b", "c"], "d", keep_seen=True))[:2] == [None, None]


def test_entries_beyond_the_newest_fifty_do_not_contribute() -> None:
    """The oldest d is beyond the horizon; without any event after it, it is the fiftieth."""
    history = ["d", *["f"] * HORIZON]
    explanation = counted().explain(history, "d", keep_seen=True)
    assert (explanation.counts, values(explanation)[0]) == ([], None)
    expected = -(log(2) + 0.25 * log(51 / HORIZON))
    assert values(explanation)[1:-3] == pytest.approx([expected] * (HORIZON - 3), abs=1e-5)


def test_an_item_that_was_added_after_training_is_repeated_like_any_other() -> None:
    """The counts know five items, the run six."""
    counts = counts_of([1] * 5, [{}, {}, {}], {}, repeated=1.0)
    added = counts.added(Batch(np.array([6, 1, 6]), np.zeros(3, dtype=np.int64), np.array([1, 2])))
    assert [*zip(added.rows.tolist(), added.items.tolist(), strict=True)] == [(0, 6), (1, 1), (1, 6)]
    explanation = voting(item_counts=counts).explain(["a", "f"], "f", keep_seen=True)
    assert found(explanation) == [("once in this history, as the newest event", log(2))]


# --- against `recommend` ------------------------------------------------------------------------------------------


@cache
def random_counts(seed: int) -> Counts:
    """Counts among eight of the nine items, with weights of any sign."""
    rng = np.random.default_rng(seed)

    def pairs() -> Pairs:
        keys = rng.integers(1, 9, (20, 2)).tolist()
        return {(row, item): int(rng.integers(1, 6)) for row, item in keys if row != item}

    weights = {name.replace("-", "_"): float(rng.normal()) for name in FEATURES}
    return counts_of(rng.integers(6, 20, 8).tolist(), [pairs() for _ in range(3)], pairs(), **weights)


@pytest.mark.parametrize(("positions", "length"), [("newest", 5), ("oldest", 8)], ids=["by one", "by two"])
@settings(max_examples=15, deadline=None)
@given(
    history=st.lists(st.sampled_from([*REAL_IDS, "ghost"]), min_size=1, max_size=14),
    item=st.sampled_from([name for name in REAL_IDS if name != "i2"]),
    seed=st.integers(0, 5),
)
def test_reasons_and_contributions_agree_with_recommend(
    positions: str, length: int, history: list[str], item: str, seed: int
) -> None:
    plain = half_known("esasrec", positions, length)
    recommender = Recommender(plain.model, plain.index, plain.vocabulary, item_counts=random_counts(seed))

    def score(recommender: Recommender, entries: list[str]) -> float:
        return recommender.recommend(entries, only=[item], keep_seen=True).items[0].score

    explanation = recommender.explain(history, item, keep_seen=True)
    whole = score(recommender, history)
    assert explanation.item.score == pytest.approx(whole, abs=1e-5)
    assert explanation.counts_score == pytest.approx(whole - score(plain, history), abs=1e-5)
    assert explanation.counts_score == pytest.approx(sum(reason.score for reason in explanation.counts))
    sizes = [abs(reason.score) for reason in explanation.counts]
    assert sizes == sorted(sizes, reverse=True)
    known = [name not in ("i2", "ghost") for name in history]
    for position, contribution in enumerate(values(explanation)):
        if known[position] and sum(known) > 1:
            without = score(recommender, history[:position] + history[position + 1 :])
            assert contribution == pytest.approx(whole - without, abs=1e-5)
        else:
            assert contribution is None


# --- in words -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("feature", "distance", "count", "events", "expected"),
    [
        (0, 1, 1, 9, "followed “cup” once"),
        (0, 1, 1234, 9, "followed “cup” 1,234 times"),
        (1, 2, 12, 9, "came two events after “cup” 12 times"),
        (2, 3, 2, 9, "came three events after “cup” 2 times"),
        (TOGETHER, 4, 1, 9, "1 user has it near “cup”"),
        (TOGETHER, 4, 1041, 9, "1,041 users have it near “cup”"),
        (REPEATED, 1, 1, 50, "once in this history, as the newest event"),
        (REPEATED, 1, 3, 50, "3 times in this history, last as the newest event"),
        (REPEATED, 7, 1, 51, "once in the newest 50 events, 7 events ago"),
        (REPEATED, 2, 3, 51, "3 times in the newest 50 events, last 2 events ago"),
    ],
)
def test_sentences(feature: int, distance: int, count: int, events: int, expected: str) -> None:
    assert sentence(Reason(feature, 1, distance, count, 1.0), "cup", events) == expected


REASONS = [
    CountReason("up", "Up one", "followed", 1, 37, 1.5, "followed “Up one” 37 times"),
    CountReason("x", None, "repeated", 2, 3, -0.5, "3 times in this history, last 2 events ago"),
]
ENTRIES = [Contribution("up", "Up one", True, 2.0), Contribution("x", None, True, -1.0)]


def test_the_text() -> None:
    explanation = explanation_of(ENTRIES, counts=REASONS, counts_score=1.0)
    assert [*lines(explanation)][:6] == [
        "Why x: rank 2, with a score of 1.2500.",
        "",
        "Of this score, 0.2500 is the model's; counts of the training log add +1.0000.",
        "    +1.5000  followed “Up one” 37 times",
        "    -0.5000  3 times in this history, last 2 events ago",
        "",
    ]
    assert not any("training log" in line for line in lines(explanation_of(ENTRIES)))


def test_the_page() -> None:
    text = html(explanation_of(ENTRIES, counts=REASONS, counts_score=1.0))
    assert "0.2500 is the model's; counts of the training log add +1.0000." in text
    assert "<td>followed “<bdi>Up one</bdi>” 37 times</td>" in text
    assert "<td>3 times in this history, last 2 events ago</td>" in text
    first, second = text.split("<h2>")[1].split('<div class="bar">')[1:]
    assert 'class="up" style="width:50.00%"' in first
    assert 'class="down" style="width:16.67%"' in second
    assert "training log" not in html(explanation_of(ENTRIES))


def test_the_page_shows_hostile_titles_as_text() -> None:
    names = [*HOSTILE, "“quoted” twice “"]
    reasons = [CountReason("id", name, "followed", 1, 2, 1.0, f"followed “{name}” 2 times") for name in names]
    page = Page(html(explanation_of([], counts=reasons, counts_score=7.0)))
    assert not {"script", "img", "a", "link", "iframe"} & set(page.tags)
    assert page.written[1:] == names


def test_reasons_in_json() -> None:
    answer = msgspec.to_builtins(counted().explain(["c"], "d"))
    assert list(answer["counts"][0]) == ["item", "title", "kind", "distance", "count", "score", "sentence"]
    assert answer["counts_score"] == pytest.approx(2 * log(4))
