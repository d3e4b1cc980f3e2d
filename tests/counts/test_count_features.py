"""What counts add to scores: each feature by hand, and all of them against the formula."""

from __future__ import annotations

from collections import defaultdict
from math import log, sqrt

import numpy as np
import pytest
from counted_logs import EVERY_PAIR, sequences_of
from hypothesis import given
from hypothesis import strategies as st
from small_counts import Pairs, counts_of

from segue.counts.counts import Added, Counts
from segue.counts.features import DECAY, FEATURES, GAP, HORIZON, LAGS, LAST, NEWEST, REPEATED, TOGETHER, ItemCounts
from segue.testing.cases import batch_of

A, B, C = 1, 2, 3
USERS = [4, 9, 16, 25, 1, 1, 1, 1, 1]


def by_item(added: Added, row: int = 0) -> dict[int, float]:
    """What is added to the items after one history."""
    own = added.rows == row
    return dict(zip(added.items[own].tolist(), added.values[own].tolist(), strict=True))


def after(history: list[int], followers: list[Pairs], companions: Pairs | None = None, **weights: float) -> object:
    """What is added after one history, for `pytest.approx`."""
    return by_item(counts_of(USERS, followers, companions or {}, **weights).added(batch_of(history)))


def close(values: dict[int, float]) -> object:
    return pytest.approx(values, abs=1e-6)


# --- by hand ------------------------------------------------------------------------------------------------------


def test_the_logarithm_of_a_transition() -> None:
    """G51: c came after b twice, b after b once."""
    sequences = sequences_of((A, B, C, A, B), (A, B, B, C))
    pairs = ItemCounts.of(sequences, sequences.offsets[1:], 3, EVERY_PAIR)
    counts = Counts(pairs, (1.0, *[0.0] * (len(FEATURES) - 1)))
    assert by_item(counts.added(batch_of([A, B]))) == close({C: 1.098612, B: 0.693147})


def test_each_lag_reads_its_own_item() -> None:
    """The newest item is c, before it b, before it a."""
    followers: list[Pairs] = [{(C, 5): 3, (B, 9): 8}, {(B, 6): 1, (C, 9): 8}, {(A, 7): 6, (C, 9): 8}]
    history = [9, A, B, C]
    assert after(history, followers, after_1=2.0) == close({5: 2 * log(4)})
    assert after(history, followers, after_2=-1.0) == close({6: -log(2)})
    assert after(history, followers, after_3=0.5) == close({7: log(7) / 2})
    assert after([C], followers, after_1=1.0, after_2=1.0, after_3=1.0) == close({5: log(4)})
    assert after([A, B], followers, after_1=1.0, after_2=1.0, after_3=1.0) == close({9: log(9)})


def test_lags_of_one_candidate_add_up() -> None:
    followers: list[Pairs] = [{(C, 5): 3}, {(B, 5): 1}, {(A, 5): 1}]
    expected = 2 * log(4) - log(2) + 10 * log(2)
    assert after([A, B, C], followers, after_1=2.0, after_2=-1.0, after_3=10.0) == close({5: expected})


def test_together_is_a_cosine_that_decays_with_age() -> None:
    """Users: a 4, b 9, c 16, the candidate 25. c is new, b one event old, a two."""
    companions = {(C, 4): 10, (B, 4): 6, (A, 4): 5, (A, 5): 1}
    expected = 10 / sqrt(16 * 25) + 0.8 * 6 / sqrt(9 * 25) + 0.64 * 5 / sqrt(4 * 25)
    assert expected == pytest.approx(0.5 + 0.32 + 0.32)
    assert after([A, B, C], [{}, {}, {}], companions, together=1.0) == close({4: 1.14, 5: 0.64 / 2})
    assert after([A, B, C], [{}, {}, {}], companions, together=-2.0) == close({4: -2.28, 5: -0.64})


def test_an_item_that_comes_twice_votes_twice() -> None:
    assert after([A, 9, A], [{}, {}, {}], {(A, 5): 2}, together=1.0) == close({5: 1 + 0.64})


def test_together_reads_the_ten_newest_items() -> None:
    companions = {(A, 5): 2}
    assert (NEWEST, DECAY) == (10, 0.8)
    assert after([A, *[9] * 9], [{}, {}, {}], companions, together=1.0) == close({5: 0.8**9})
    assert after([A, *[9] * 10], [{}, {}, {}], companions, together=1.0) == close({})


def test_repeats() -> None:
    """a came three times, two events ago at last; b once, as the newest event; c once, four events ago."""
    history = [A, A, C, 9, A, B]
    assert after(history, [{}, {}, {}], repeated=1.0) == close({A: log(4), B: log(2), C: log(2), 9: log(2)})
    assert after(history, [{}, {}, {}], gap=1.0) == close({A: log(51 / 2), B: log(51), C: log(51 / 4), 9: log(51 / 3)})
    assert after(history, [{}, {}, {}], newest=-3.0) == close({B: -3.0})
    sums = {A: 2 * log(4) + log(51 / 2), B: 2 * log(2) + log(51) - 3, C: 2 * log(2) + log(51 / 4)}
    sums[9] = 2 * log(2) + log(51 / 3)
    assert after(history, [{}, {}, {}], repeated=2.0, gap=1.0, newest=-3.0) == close(sums)


def test_repeats_are_looked_for_in_fifty_events() -> None:
    inside, beyond = [A, A, *[9] * 49], [A, A, *[9] * 50]
    assert HORIZON == 50
    assert after(inside, [{}, {}, {}], repeated=1.0) == close({A: log(2), 9: log(50)})
    assert after(inside, [{}, {}, {}], gap=1.0) == close({A: log(51 / 50), 9: log(51)})
    assert after(beyond, [{}, {}, {}], repeated=1.0) == close({9: log(51)})


def test_histories_of_a_batch_do_not_mix() -> None:
    """An empty history and one without neighbours get nothing."""
    counts = counts_of(USERS, [{(A, 5): 1, (B, 6): 1}, {(A, 7): 1}, {}], {}, after_1=1.0, after_2=1.0)
    added = counts.added(batch_of([A], [9, 9], [], [A, B], [B, A]))
    assert added.rows.tolist() == [0, 3, 3, 4]
    assert added.items.tolist() == [5, 6, 7, 5]
    assert added.values.tolist() == pytest.approx([log(2)] * 4)


def test_without_weights_nothing_is_added() -> None:
    counts = counts_of(USERS, [{(A, 5): 1}] * 3, {(A, 5): 1})
    assert counts.used == frozenset()
    assert by_item(counts.added(batch_of([A, A, A]))) == {}
    assert len(counts_of(USERS, [{(A, 5): 1}] * 3, {}, after_1=1.0).added(batch_of()).items) == 0


def test_only_the_requested_features_are_computed() -> None:
    pairs = counts_of(USERS, [{(A, 5): 1}] * 3, {(A, 5): 1}).pairs
    every = frozenset(range(len(FEATURES)))
    for features in (frozenset({LAST}), frozenset({0, TOGETHER}), every - {REPEATED, GAP, LAST}, every):
        assert {term.feature for term in pairs.terms(batch_of([A, A, A]), features)} == features


# --- against the formula ------------------------------------------------------------------------------------------


def formula(
    history: list[int], users: list[int], followers: list[Pairs], companions: Pairs, weights: dict[str, float]
) -> dict[int, float]:
    """The additions of the specification, one pair after another."""
    total: dict[int, float] = defaultdict(float)
    newest = history[::-1]
    for lag, pairs in enumerate(followers[: len(history)], start=1):
        for (source, item), count in pairs.items():
            if source == newest[lag - 1]:
                total[item] += weights[f"after_{lag}"] * log(1 + count)
    for age, own in enumerate(newest[:10]):
        for (source, item), count in companions.items():
            if source == own:
                total[item] += weights["together"] * 0.8**age * count / sqrt(users[source - 1] * users[item - 1])
    recent = newest[:50]
    for item in set(recent):
        gap = recent.index(item) + 1
        total[item] += weights["repeated"] * log(1 + recent.count(item)) + weights["gap"] * log(51 / gap)
        total[item] += weights["newest"] * (gap == 1)
    return total


signed = st.sampled_from([-3.0, -0.5, 0.0, 0.25, 2.0])
pairs_of_items = st.dictionaries(st.tuples(st.integers(1, 9), st.integers(1, 9)), st.integers(1, 20), max_size=12)


@given(
    followers=st.lists(pairs_of_items, min_size=LAGS, max_size=LAGS),
    companions=pairs_of_items,
    weights=st.fixed_dictionaries({name.replace("-", "_"): signed for name in FEATURES}),
    histories=st.lists(st.lists(st.integers(1, 11), max_size=14), max_size=4),
    unused=st.sampled_from([0, 3000]),
)
def test_what_is_added_is_the_formula(
    followers: list[Pairs], companions: Pairs, weights: dict[str, float], histories: list[list[int]], unused: int
) -> None:
    """In a small and in a large catalogue, and with two items that were added after training."""
    counts = counts_of([*USERS, *[1] * unused], followers, companions, **weights)
    numbers = [[item if item <= len(USERS) else item + unused for item in history] for history in histories]
    added = counts.added(batch_of(*numbers))
    for row, history in enumerate(numbers):
        expected, actual = formula(history, USERS, followers, companions, weights), by_item(added, row)
        assert set(actual) <= set(expected)
        for item, value in expected.items():
            assert actual.get(item, 0.0) == pytest.approx(value, abs=1e-5)
    keys = list(zip(added.rows.tolist(), added.items.tolist(), strict=True))
    assert keys == sorted(set(keys)) and all(0 <= row < len(histories) and item > 0 for row, item in keys)
    assert added.values.dtype == np.float32
