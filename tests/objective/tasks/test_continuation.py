"""Continuation: histories are cut, and a decoder is asked for what came after the cut, fed with the truth."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from task_users import batch_of, chi_square, most_chi_square, some_users, users_of

from segue.objective.tasks.continuation import Continuation
from segue.objective.tasks.next_item import NextItem


def rng_of(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_by_hand() -> None:
    """Every cut of 1 2 3 4, two items each: after 1 come 2 and 3, and 2 is fed; after the third only the last."""
    found = Continuation(items=2, cuts=9)(batch_of([[1, 2, 3, 4], [8, 9]]), rng_of())
    assert found.inputs.histories is not None and found.positions is not None
    assert users_of(found.inputs.items, found.inputs.lengths) == [[1, 2], [1, 2, 3], [1, 2, 3], [8]]
    assert found.inputs.histories.tolist() == [1, 2, 3, 1]
    assert found.positions.tolist() == [0, 1, 3, 4, 7, 8]
    assert found.targets.tolist() == [2, 3, 3, 4, 4, 9]
    assert found.weights is None


@given(some_users, st.integers(1, 6), st.integers(1, 10), st.integers(0, 99))
def test_what_came_after_each_cut_is_asked_for_and_never_read(
    histories: list[list[int]], items: int, cuts: int, seed: int
) -> None:
    """Whatever the users: each example is the beginning of one, each cut comes at most once, and the states asked are
    those from the history's last on, each for the event after it."""
    batch = batch_of(histories)
    found = Continuation(items=items, cuts=cuts)(batch, rng_of(seed))
    assert found.inputs.histories is not None and found.positions is not None and found.inputs.values is not None
    examples = users_of(found.inputs.values.astype(int), found.inputs.lengths)  # places of the events in the batch
    answers = users_of(found.targets, np.minimum(found.inputs.lengths - found.inputs.histories + 1, items))
    begins = np.cumsum(batch.lengths) - batch.lengths
    met: dict[int, list[int]] = {}
    for example, asked, read in zip(examples, answers, found.inputs.histories.tolist(), strict=True):
        user = begins.tolist().index(example[0])
        whole = histories[user]
        assert example == list(range(example[0], example[0] + len(example)))
        assert asked == whole[read : read + items] and len(example) == read + len(asked) - 1
        met.setdefault(user, []).append(read)
    assert all(reads == sorted(set(reads)) for reads in met.values())
    assert {user: len(reads) for user, reads in met.items()} == {
        user: min(cuts, len(whole) - 1) for user, whole in enumerate(histories)
    }
    ends = np.cumsum(found.inputs.lengths)
    places = [
        place
        for end, length, read in zip(ends, found.inputs.lengths, found.inputs.histories, strict=True)
        for place in range(end - length + read - 1, end)
    ]
    assert found.positions.tolist() == places


def test_cuts_come_anywhere_with_equal_chance() -> None:
    rng, counts = rng_of(), np.zeros(7, dtype=int)
    task, batch = Continuation(items=3, cuts=2), batch_of([list(range(1, 9))] * 50)
    for _ in range(20):
        found = task(batch, rng)
        assert found.inputs.histories is not None
        counts += np.bincount(found.inputs.histories, minlength=8)[1:]
    assert chi_square(counts, np.full(7, 2000 / 7)) < most_chi_square(7)


def test_one_item_after_every_cut_asks_what_next_item_asks() -> None:
    batch = batch_of([[4, 5, 6], [7, 8]])
    one, other = Continuation(items=1, cuts=99)(batch, rng_of()), NextItem()(batch, rng_of())
    assert one.targets.tolist() == other.targets.tolist()


@pytest.mark.parametrize("items", [1, 5])
def test_the_batch_it_is_given_stays_as_it_is(items: int) -> None:
    batch = batch_of([[1, 2, 3], [4, 5]])
    before = batch.items.copy()
    Continuation(items=items, cuts=2)(batch, rng_of())
    assert batch.items.tolist() == before.tolist() and batch.histories is None
