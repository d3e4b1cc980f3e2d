from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.data.batch import (
    POOL_BATCHES,
    Batch,
    case_batches,
    cut_by_budget,
    epoch_batches,
    gather,
    newest,
    ragged_rows,
    take,
    window_begins,
    window_starts,
)
from segue.data.sequences import Sequences
from segue.data.split import split_last


def sequences(lengths: list[int]) -> Sequences:
    """User u's events are items u * 1000 + 1, 2, …, a second apart, with kinds and values."""
    items = [user * 1000 + position for user, length in enumerate(lengths) for position in range(1, length + 1)]
    return Sequences(
        offsets=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        items=np.array(items, dtype=np.int32),
        times=np.array(items, dtype=np.int64) * 1_000_000 + 999_999,
        kinds=(np.array(items) % 7).astype(np.uint16),
        values=np.array(items, dtype=np.float32) / 2,
    )


def users_of(batch: Batch) -> list[list[int]]:
    ends = np.cumsum(batch.lengths)
    return [batch.items[end - length : end].tolist() for end, length in zip(ends, batch.lengths, strict=True)]


def test_ragged_rows() -> None:
    assert ragged_rows(np.array([5, 0, 9]), np.array([2, 0, 3])).tolist() == [5, 6, 9, 10, 11]


def test_gathered_events_have_every_field() -> None:
    batch = gather(sequences([3, 2]), np.array([1, 3]), np.array([3, 5]), query_times=np.array([7_999_999, 8_000_000]))
    assert batch.items.tolist() == [2, 3, 1001, 1002]
    assert batch.times.tolist() == [2, 3, 1001, 1002]  # whole seconds, rounded down
    assert batch.lengths.tolist() == [2, 2]
    assert batch.query_times is not None and batch.query_times.tolist() == [7, 8]
    assert batch.kinds is not None and batch.kinds.tolist() == [2, 3, 0, 1]
    assert batch.values is not None and batch.values.tolist() == [1, 1.5, 500.5, 501]


@given(st.lists(st.integers(1, 30), max_size=40), st.integers(1, 60))
@settings(deadline=None)
def test_groups_stay_within_the_budget_and_cover_everyone(lengths: list[int], budget: int) -> None:
    groups = cut_by_budget(np.array(lengths, dtype=np.int64), budget)
    assert [index for group in groups for index in group] == list(range(len(lengths)))
    sums = [sum(lengths[index] for index in group) for group in groups]
    assert all(total <= budget or len(group) == 1 for total, group in zip(sums, groups, strict=True))
    following = [lengths[group[0]] for group in groups[1:]]
    assert all(total + more > budget for total, more in zip(sums, following, strict=False))  # none could take one more


@given(st.lists(st.integers(1, 12), min_size=1, max_size=80), st.integers(12, 40), st.integers(0, 5))
@settings(deadline=None)
def test_an_epoch_covers_every_user_once_within_the_budget(lengths: list[int], tokens: int, seed: int) -> None:
    log = sequences(lengths)
    starts, ends = log.offsets[:-1], log.offsets[1:]
    batches = list(epoch_batches(log, starts, ends, tokens=tokens, rng=np.random.default_rng(seed)))
    assert all(batch.lengths.sum() == len(batch.items) <= tokens for batch in batches)
    histories = sorted(user for batch in batches for user in users_of(batch))
    assert histories == [
        [user * 1000 + position for position in range(1, length + 1)] for user, length in enumerate(lengths)
    ]


def test_an_epoch_is_deterministic_by_seed_and_the_next_one_differs() -> None:
    log = sequences([3] * 200)
    starts, ends = log.offsets[:-1], log.offsets[1:]

    def epoch(rng: np.random.Generator) -> list[list[list[int]]]:
        return [users_of(batch) for batch in epoch_batches(log, starts, ends, tokens=30, rng=rng)]

    rng = np.random.default_rng(1)
    first, second = epoch(rng), epoch(rng)
    assert first == epoch(np.random.default_rng(1))
    assert first != second


def test_users_of_similar_length_share_a_batch() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 5000).tolist()
    log = sequences(lengths)
    batches = list(epoch_batches(log, log.offsets[:-1], log.offsets[1:], tokens=2000, rng=np.random.default_rng(0)))
    padded = sum(int(batch.lengths.max()) * len(batch.lengths) for batch in batches)
    assert padded / sum(lengths) < 1.1  # in random batches it is about 2
    assert len(batches) > POOL_BATCHES


def test_cases_have_whole_histories_and_the_query_time() -> None:
    log = sequences([4, 2, 6, 3])
    cases = split_last(log).cases("test")
    queries = {}
    for indices, batch in case_batches(log, cases, tokens=8, most_rows=2):
        assert len(indices) <= 2 and batch.query_times is not None
        for case, history, query_times in zip(indices, users_of(batch), batch.query_times, strict=True):
            queries[int(cases.users[case])] = (history, int(query_times))
    assert queries == {
        0: ([1, 2, 3], 4),
        2: ([2001, 2002, 2003, 2004, 2005], 2006),
        3: ([3001, 3002], 3003),
    }


def test_the_newest_events_are_kept() -> None:
    log = sequences([4, 1, 2])
    batch = gather(log, log.offsets[:-1], log.offsets[1:])
    cut = newest(batch, 2)
    assert users_of(cut) == [[3, 4], [1001], [2001, 2002]]
    assert cut.times.tolist() == [3, 4, 1001, 2001, 2002]
    assert cut.kinds is not None and cut.kinds.tolist() == [3, 4, 0, 6, 0]
    assert cut.values is not None and cut.values[0] == pytest.approx(1.5)
    assert newest(batch, 4) is batch


def test_a_window_moves_by_steps() -> None:
    """At most eight events, moved by two: a ninth event drops the two oldest, which leaves room for a tenth."""
    lengths = np.array([0, 1, 8, 9, 10, 11, 12, 13, 100])
    assert window_begins(lengths, 8, 2).tolist() == [0, 0, 0, 2, 2, 4, 4, 6, 92]
    assert window_begins(lengths, 8, 1).tolist() == [0, 0, 0, 1, 2, 3, 4, 5, 92]
    log = sequences([9, 3, 10])
    batch = gather(log, log.offsets[:-1], log.offsets[1:])
    assert [user[0] for user in users_of(newest(batch, 8, 2))] == [3, 1001, 2003]
    assert [user[-1] for user in users_of(newest(batch, 8, 2))] == [9, 1003, 2010]


@given(st.integers(1, 40), st.data())
def test_a_window_begins_at_a_multiple_of_the_step(length: int, data: st.DataObject) -> None:
    step = data.draw(st.integers(1, length))
    lengths = np.arange(200)
    begins = window_begins(lengths, length, step)
    assert (begins % step == 0).all() and (np.diff(begins) >= 0).all()
    sizes = lengths - begins
    assert sizes.max() <= length
    assert (sizes[lengths > length] > length - step).all(), "at most one step is dropped"
    assert not begins[lengths <= length].any()


def test_some_users_of_a_batch() -> None:
    log = sequences([4, 1, 3])
    batch = gather(log, log.offsets[:-1], log.offsets[1:], query_times=np.array([7_000_000, 8_000_000, 9_000_000]))
    subset = take(batch, np.array([2, 0]))
    assert users_of(subset) == [[2001, 2002, 2003], [1, 2, 3, 4]]
    assert subset.query_times is not None and subset.query_times.tolist() == [9, 7]
    assert users_of(take(batch, np.array([2, 0]), 3, 2)) == [[2001, 2002, 2003], [3, 4]]
    assert take(batch, np.arange(3)) is batch
    assert (
        users_of(take(batch, np.arange(3), 3, 2))
        == users_of(newest(batch, 3, 2))
        == [[3, 4], [1001], [2001, 2002, 2003]]
    )


def test_windows_of_g27() -> None:
    """450 events, windows of 200 that start 100 apart: 250, 150, 50, and the rest from 0."""
    owner, starts = window_starts(np.array([450]), 200, 100)
    assert owner.tolist() == [0] * 4 and starts.tolist() == [0, 50, 150, 250]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(1, 12), st.integers(1, 12))
def test_windows_equal_a_plain_loop(lengths: list[int], length: int, step: int) -> None:
    owner, starts = window_starts(np.array(lengths), length, step)
    for user, events in enumerate(lengths):
        expected = [0] if events <= length else [0, *sorted(range(events - length, 0, -step))]
        assert starts[owner == user].tolist() == expected
        if step <= length:
            positions = {position for start in expected for position in range(start, min(events, start + length))}
            assert positions == set(range(events))
