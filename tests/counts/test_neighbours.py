"""Counts of pairs: the golden numbers, limits by hand, and blocks against a plain loop."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from counted_logs import EVERY_PAIR, OF_TWO_USERS, followed, limited, near, pairs_of, sequences_of
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.counts import neighbours
from segue.counts.counts import Counts
from segue.counts.features import FEATURES, LAGS, WINDOW, ItemCounts
from segue.counts.neighbours import Neighbours, PairLimits, count_companions, count_followers, users_of_items
from segue.data.sequences import Sequences

A, B, C = 1, 2, 3
GOLDEN = ((A, B, C, A, B), (A, B, B, C))


def followers(*users: tuple[int, ...], lag: int = 1, limits: PairLimits = EVERY_PAIR) -> dict[tuple[int, int], int]:
    """The pairs of whole users over the items 1 to 9."""
    sequences = sequences_of(*users)
    return pairs_of(count_followers(sequences, sequences.offsets[1:], 9, lag=lag, limits=limits))


def companions(*users: tuple[int, ...], window: int, limits: PairLimits = EVERY_PAIR) -> dict[tuple[int, int], int]:
    sequences = sequences_of(*users)
    return pairs_of(count_companions(sequences, sequences.offsets[1:], 9, window=window, limits=limits))


# --- by hand ------------------------------------------------------------------------------------------------------


def test_transitions_by_lag() -> None:
    """G50."""
    assert followers(*GOLDEN, lag=1) == {(A, B): 3, (B, B): 1, (B, C): 2, (C, A): 1}
    assert followers(*GOLDEN, lag=2) == {(A, B): 1, (A, C): 1, (B, A): 1, (B, C): 1, (C, B): 1}
    assert followers(*GOLDEN, lag=3) == {(A, A): 1, (B, B): 1, (A, C): 1}


def test_transitions_of_two_users() -> None:
    """All events of a pair count once two users have it; at lag 2 every pair has one user."""
    assert followers(*GOLDEN, lag=1, limits=OF_TWO_USERS) == {(A, B): 3, (B, C): 2}
    assert followers(*GOLDEN, lag=2, limits=OF_TWO_USERS) == {}
    assert followers(*GOLDEN, lag=3, limits=OF_TWO_USERS) == {}


def test_companions_count_users_in_both_directions() -> None:
    """No item is its own companion. One event apart, only the first user has a and c."""
    both = {(A, B): 2, (B, A): 2, (B, C): 2, (C, B): 2}
    assert companions(*GOLDEN, window=1) == both | {(A, C): 1, (C, A): 1}
    assert companions(*GOLDEN, window=30) == both | {(A, C): 2, (C, A): 2}
    assert companions(*GOLDEN, window=1, limits=OF_TWO_USERS) == both


def test_companions_end_with_the_window() -> None:
    """1 and 2 are three events apart, and items of two users are never companions."""
    users = ((1, 9, 9, 2), (3,))
    assert (1, 2) not in companions(*users, window=2)
    assert companions(*users, window=3)[1, 2] == 1
    assert not any(3 in pair for pair in companions(*users, window=30))


def test_companions_of_a_run_are_at_most_thirty_events_apart() -> None:
    users = ([1, *[9] * 29, 2, 3], [1, *[9] * 29, 2, 3])
    sequences = sequences_of(*users)
    pairs = pairs_of(ItemCounts.of(sequences, sequences.offsets[1:], 9, OF_TWO_USERS).companions)
    assert pairs == {pair: 2 for a, b in ((1, 2), (1, 9), (2, 3), (2, 9), (3, 9)) for pair in ((a, b), (b, a))}


def test_users_of_items() -> None:
    sequences = sequences_of(*GOLDEN, (C, C, 5))
    assert users_of_items(sequences, np.array([5, 9, 11]), 6).tolist() == [0, 2, 2, 3, 0, 0, 0]


def test_the_neighbours_with_the_highest_counts_are_kept() -> None:
    """After 1 came 5 three times, 4 and 3 twice, 2 once: of equal counts, the lower number."""
    users = [(1, after) for after in (5, 4, 3, 5, 2, 4, 3, 5)] + [(2, 9)]
    by_most = {most: followers(*users, limits=PairLimits(1, most)) for most in (1, 2, 3, 4)}
    assert by_most[1] == {(1, 5): 3, (2, 9): 1}
    assert by_most[2] == {(1, 5): 3, (1, 3): 2, (2, 9): 1}
    assert by_most[3] == {(1, 5): 3, (1, 3): 2, (1, 4): 2, (2, 9): 1}
    assert by_most[4] == by_most[3] | {(1, 2): 1}


def test_a_pair_of_one_user_takes_no_position_of_another_pair() -> None:
    """The pair 1 2, which one user has ninety times, is left out before the highest counts are chosen."""
    users = [(1, 2) * 90, (1, 7), (1, 7)]
    assert followers(*users, limits=PairLimits(2, 1)) == {(1, 7): 2}


def test_companions_of_equal_counts() -> None:
    users = [(1, 4), (1, 3), (2, 1), (4, 1)]
    of_item_1 = {(1, 4): 2, (1, 2): 1}
    of_others = {(2, 1): 1, (3, 1): 1, (4, 1): 2}
    assert companions(*users, window=5, limits=PairLimits(1, 2)) == of_item_1 | of_others


def test_entries_and_counts_of_items() -> None:
    """Padding and items beyond the matrix have none."""
    matrix = Neighbours(
        offsets=np.array([0, 0, 2, 2, 3]),
        items=np.array([1, 3, 2], dtype=np.int32),
        counts=np.array([5, 6, 7], dtype=np.int32),
    )
    owners, entries = matrix.entries(np.array([3, 0, 1, 2, 3, 4, 99]))
    assert (owners.tolist(), entries.tolist()) == ([0, 2, 2, 4], [2, 0, 1, 2])
    pairs = [(1, 1), (1, 3), (3, 2), (1, 2), (2, 1), (0, 1), (4, 1), (99, 1)]
    assert [matrix.count(*pair) for pair in pairs] == [5, 6, 7, 0, 0, 0, 0, 0]


def test_a_log_without_training_events() -> None:
    sequences = sequences_of((1, 2), (), (3,))
    pairs = ItemCounts.of(sequences, sequences.offsets[:-1], 3, EVERY_PAIR)
    assert [pairs_of(each) for each in (*pairs.followers, pairs.companions)] == [{}] * (LAGS + 1)
    assert pairs.users.tolist() == [0, 0, 0, 0]


# --- laws ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Log:
    """Users' items, and how many of them are for training."""

    users: list[list[int]]
    training: list[int]
    n_items: int

    @property
    def sequences(self) -> Sequences:
        return sequences_of(*self.users)

    @property
    def ends(self) -> np.ndarray:
        return np.asarray(self.sequences.offsets[:-1] + np.array(self.training))

    @property
    def seen(self) -> list[list[int]]:
        return [user[:end] for user, end in zip(self.users, self.training, strict=True)]

    def counts(self, limits: PairLimits) -> ItemCounts:
        return ItemCounts.of(self.sequences, self.ends, self.n_items, limits)


@st.composite
def logs(draw: st.DrawFn) -> Log:
    """Users without events and without training events are among them."""
    n_items = draw(st.integers(1, 6))
    users = draw(st.lists(st.lists(st.integers(1, n_items), max_size=9), min_size=1, max_size=6))
    return Log(users, [draw(st.integers(0, len(user))) for user in users], n_items)


limits_of_pairs = st.builds(PairLimits, least_users=st.integers(1, 3), most=st.sampled_from([1, 2, 3, 200]))


def arrays(pairs: ItemCounts) -> dict[str, list[int]]:
    """All that a file would have."""
    counts = Counts(pairs, (0.0,) * len(FEATURES))
    return {name: array.tolist() for name, array in counts.arrays().items()}


@given(log=logs(), limits=limits_of_pairs, lag=st.integers(1, 4), window=st.integers(1, 9), data=st.data())
def test_counts_by_blocks_equal_a_plain_loop(
    log: Log, limits: PairLimits, lag: int, window: int, data: st.DataObject
) -> None:
    """With one pair at a time, each item is a block of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighbours, "MOST_PAIRS", data.draw(st.sampled_from([1, 7, 30, 100])))
        after = count_followers(log.sequences, log.ends, log.n_items, lag=lag, limits=limits)
        around = count_companions(log.sequences, log.ends, log.n_items, window=window, limits=limits)
        users = users_of_items(log.sequences, log.ends, log.n_items)
    assert pairs_of(after) == limited(followed(log.seen, lag), limits)
    assert pairs_of(around) == limited(near(log.seen, window), limits)
    assert users.tolist() == [sum(item in user for user in log.seen) for item in range(log.n_items + 1)]
    for matrix in (after, around):
        assert len(matrix.offsets) == log.n_items + 2
        assert list(pairs_of(matrix)) == sorted(pairs_of(matrix))


@given(log=logs(), limits=limits_of_pairs, data=st.data())
def test_no_count_sees_validation_or_test(log: Log, limits: PairLimits, data: st.DataObject) -> None:
    """Later events may be any other ones, of any number."""
    later = st.lists(st.integers(1, log.n_items), max_size=5)
    altered = Log([user + data.draw(later) for user in log.seen], log.training, log.n_items)
    assert arrays(altered.counts(limits)) == arrays(log.counts(limits))


@settings(max_examples=25)
@given(log=logs(), limits=limits_of_pairs, data=st.data())
def test_counts_do_not_depend_on_the_order_of_users(log: Log, limits: PairLimits, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(log.users))))
    mixed = Log([log.users[user] for user in order], [log.training[user] for user in order], log.n_items)
    assert arrays(mixed.counts(limits)) == arrays(log.counts(limits))


@settings(max_examples=25)
@given(log=logs(), most=st.sampled_from([1, 2, 200]))
def test_no_pair_of_a_single_user_is_kept(log: Log, most: int) -> None:
    """Every kept pair is in the training events of two users."""
    pairs = log.counts(PairLimits(least_users=2, most=most))
    each = [followed(log.seen, lag) for lag in range(1, LAGS + 1)] + [near(log.seen, WINDOW)]
    for matrix, by_user in zip((*pairs.followers, pairs.companions), each, strict=True):
        assert all(sum(pair in user for user in by_user) >= 2 for pair in pairs_of(matrix))


@settings(max_examples=25)
@given(items=st.lists(st.integers(1, 9), max_size=40))
def test_a_single_user_leaves_no_pair(items: list[int]) -> None:
    """Whatever the user did, and however often."""
    log = Log([items, [10, 11], [10, 11]], [len(items), 2, 2], 11)
    pairs = log.counts(OF_TWO_USERS)
    assert [pairs_of(each) for each in pairs.followers] == [{(10, 11): 2}, {}, {}]
    assert pairs_of(pairs.companions) == {(10, 11): 2, (11, 10): 2}
