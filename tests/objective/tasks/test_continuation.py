"""Continuation: histories are cut, and a decoder predicts the events after the cut, fed with the true ones."""

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
    examples = Continuation(items=2, cuts=9)(batch_of([[1, 2, 3, 4], [8, 9]]), rng_of())
    assert examples.inputs.histories is not None and examples.positions is not None
    assert users_of(examples.inputs.items, examples.inputs.lengths) == [[1, 2], [1, 2, 3], [1, 2, 3], [8]]
    assert examples.inputs.histories.tolist() == [1, 2, 3, 1]
    assert examples.positions.tolist() == [0, 1, 3, 4, 7, 8]
    assert examples.targets.tolist() == [2, 3, 3, 4, 4, 9]
    assert examples.weights is None


@given(some_users, st.integers(1, 6), st.integers(1, 10), st.integers(0, 99))
def test_events_after_each_cut_are_targets_and_never_read(
    histories: list[list[int]], items: int, cuts: int, seed: int
) -> None:
    """Whatever the users: each example is the beginning of one, each cut comes at most once, and the queries are
    the states from the history's last on, each for the event after it."""
    batch = batch_of(histories)
    result = Continuation(items=items, cuts=cuts)(batch, rng_of(seed))
    assert result.inputs.histories is not None and result.positions is not None and result.inputs.values is not None
    examples = users_of(result.inputs.values.astype(int), result.inputs.lengths)  # positions of the events in the batch
    answers = users_of(result.targets, np.minimum(result.inputs.lengths - result.inputs.histories + 1, items))
    begins = np.cumsum(batch.lengths) - batch.lengths
    cuts_of_users: dict[int, list[int]] = {}
    for example, targets, cut in zip(examples, answers, result.inputs.histories.tolist(), strict=True):
        user = begins.tolist().index(example[0])
        whole = histories[user]
        assert example == list(range(example[0], example[0] + len(example)))
        assert targets == whole[cut : cut + items] and len(example) == cut + len(targets) - 1
        cuts_of_users.setdefault(user, []).append(cut)
    assert all(user_cuts == sorted(set(user_cuts)) for user_cuts in cuts_of_users.values())
    assert {user: len(user_cuts) for user, user_cuts in cuts_of_users.items()} == {
        user: min(cuts, len(whole) - 1) for user, whole in enumerate(histories)
    }
    ends = np.cumsum(result.inputs.lengths)
    positions = [
        position
        for end, length, cut in zip(ends, result.inputs.lengths, result.inputs.histories, strict=True)
        for position in range(end - length + cut - 1, end)
    ]
    assert result.positions.tolist() == positions


def test_cuts_are_uniform() -> None:
    rng, counts = rng_of(), np.zeros(7, dtype=int)
    task, batch = Continuation(items=3, cuts=2), batch_of([list(range(1, 9))] * 50)
    for _ in range(20):
        examples = task(batch, rng)
        assert examples.inputs.histories is not None
        counts += np.bincount(examples.inputs.histories, minlength=8)[1:]
    assert chi_square(counts, np.full(7, 2000 / 7)) < most_chi_square(7)


def test_one_item_after_every_cut_is_the_next_item_task() -> None:
    batch = batch_of([[4, 5, 6], [7, 8]])
    one, other = Continuation(items=1, cuts=99)(batch, rng_of()), NextItem()(batch, rng_of())
    assert one.targets.tolist() == other.targets.tolist()


@pytest.mark.parametrize("items", [1, 5])
def test_the_batch_is_not_changed(items: int) -> None:
    batch = batch_of([[1, 2, 3], [4, 5]])
    before = batch.items.copy()
    Continuation(items=items, cuts=2)(batch, rng_of())
    assert batch.items.tolist() == before.tolist() and batch.histories is None
