"""Masking: masked events are exactly the targets, uniformly sampled, anew at each call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from task_users import batch_of, chi_square, most_chi_square, owners, some_users, users_of

from segue.data.batch import Batch, newest
from segue.layers.packed import tensors
from segue.objective.tasks.examples import Examples, TaskFacts
from segue.objective.tasks.masked_item import MaskedItem

MASK = 51
TaskFunction = Callable[[Batch, np.random.Generator], Examples]


def masked(*, share: float = 0.2, most: int = 9, last: float = 0.0, mask: int = MASK) -> TaskFunction:
    return partial(MaskedItem(share=share, most=most, last=last), facts=TaskFacts(mask))


def rng_of(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_the_toy_user() -> None:
    """[10, 20, 30, 40]: round(.2 * 4) = 1 is masked; a second copy masks only the last; the query is cut to four."""
    mask = 60
    batch = batch_of([[10, 20, 30, 40]])
    results = set()
    for seed in range(40):
        examples = masked(mask=mask, last=1.0)(batch, rng_of(seed))
        first, second = users_of(examples.inputs.items, examples.inputs.lengths)
        assert second == [10, 20, 30, mask]
        (position,) = np.flatnonzero(np.array(first) == mask)
        assert examples.positions is not None and examples.positions.tolist() == [position, 4 + 3]
        assert examples.targets.tolist() == [batch.items[position], 40]
        results.add((tuple(first), int(position)))
    instances = [(mask, 20, 30, 40), (10, mask, 30, 40), (10, 20, mask, 40), (10, 20, 30, mask)]
    assert results == {(instance, position) for position, instance in enumerate(instances)}
    assert tensors(newest(batch, 3)).with_query_token(mask).items.tolist() == [20, 30, 40, mask]


def test_the_worked_instance() -> None:
    """[5, 9, 2, 7, 4] at .4: two are masked, and their items are the targets, in order."""
    batch, results = batch_of([[5, 9, 2, 7, 4]]), {}
    for seed in range(100):
        examples = masked(share=0.4)(batch, rng_of(seed))
        assert examples.positions is not None and examples.weights is None
        results[tuple(examples.positions.tolist())] = (examples.inputs.items.tolist(), examples.targets.tolist())
    assert set(results) == set(combinations(range(5), 2))
    assert results[1, 3] == ([5, MASK, 2, MASK, 4], [9, 7])


@given(some_users, st.floats(0.01, 1), st.integers(1, 9), st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 99))
def test_masking_changes_exactly_the_targets(
    histories: list[list[int]], share: float, most: int, last: float, seed: int
) -> None:
    batch = batch_of(histories)
    examples = masked(share=share, most=most, last=last)(batch, rng_of(seed))
    inputs, positions, users = examples.inputs, examples.positions, len(histories)
    assert positions is not None and inputs.kinds is not None and inputs.values is not None
    # the position each token came from, as its time: the encoder uses only the order
    source = inputs.times // 10
    is_target = np.isin(np.arange(len(source)), positions)
    assert len(np.unique(positions)) == len(positions) == len(examples.targets)
    assert (examples.targets == batch.items[source[positions]]).all()
    assert (inputs.items == np.where(is_target, MASK, batch.items[source])).all()
    assert (inputs.kinds == np.where(is_target, 0, source % 3)).all()
    assert (np.isnan(inputs.values) == is_target).all() and (inputs.values[~is_target] == source[~is_target]).all()
    whole = users_of(np.arange(len(batch.items)), batch.lengths)
    rows, hidden = users_of(source, inputs.lengths), users_of(is_target, inputs.lengths)
    assert rows[:users] == whole
    expected = [min(most, max(1, int(np.floor(len(history) * share + 0.5)))) for history in histories]
    assert [sum(flags) for flags in hidden[:users]] == expected
    copies = [whole.index(user) for user in rows[users:]]
    assert copies == sorted(set(copies)) and (last == 0.5 or len(copies) == users * last)
    assert all(flags == [False] * (len(flags) - 1) + [True] for flags in hidden[users:])
    assert batch.items.tolist() == [item for history in histories for item in history], "the batch is not changed"
    assert batch.values is not None and batch.values.tolist() == list(range(len(batch.items)))


@pytest.mark.parametrize(
    ("length", "share", "most", "hidden"),
    [(200, 0.2, 40, 40), (200, 0.2, 20, 20), (50, 0.6, 30, 30), (2, 0.2, 9, 1), (5, 0.5, 9, 3), (7, 0.5, 9, 4)],
)
def test_the_number_of_masks(length: int, share: float, most: int, hidden: int) -> None:
    """Half an event is rounded up, as in the original."""
    examples = masked(share=share, most=most)(batch_of([[1] * length]), rng_of())
    assert len(examples.targets) == hidden


def test_masked_positions_are_uniform() -> None:
    """Two of seven, 21 pairs; and users are independent."""
    users = 8_000
    examples = masked(share=2 / 7)(batch_of([[1] * 7] * users), rng_of(3))
    assert examples.positions is not None
    pairs = examples.positions.reshape(users, 2) - 7 * np.arange(users)[:, None]
    counts = np.bincount(pairs[:, 0] * 7 + pairs[:, 1], minlength=49)
    cells = [first * 7 + second for first, second in combinations(range(7), 2)]
    assert counts.sum() == counts[cells].sum() == users
    assert chi_square(counts[cells], np.full(21, users / 21)) < most_chi_square(21)
    neighbours = np.bincount(pairs[:-1:2, 0] * 7 + pairs[1::2, 0], minlength=49).reshape(7, 7)[:6, :6]
    probabilities = np.arange(6, 0, -1) / 21  # of the first position of a pair
    assert chi_square(neighbours, users / 2 * np.outer(probabilities, probabilities)) < most_chi_square(36)


def test_targets_have_the_distribution_of_the_items() -> None:
    """Targets are an unbiased sample of the events."""
    rng = rng_of(4)
    histories = [rng.choice(5, size=10, p=[0.4, 0.3, 0.15, 0.1, 0.05]) + 1 for _ in range(4_000)]
    batch = batch_of([history.tolist() for history in histories])
    examples = masked(share=0.1)(batch, rng)  # one a user: independent of each other
    expected = np.bincount(batch.items, minlength=6)[1:] / 10
    assert chi_square(np.bincount(examples.targets, minlength=6)[1:], expected) < most_chi_square(5)


def test_users_are_repeated_with_the_stated_probability() -> None:
    users, share = 10_000, 0.3
    examples = masked(last=share)(batch_of([[1, 2, 3]] * users), rng_of(5))
    copies = len(examples.inputs.lengths) - users
    assert abs(copies - share * users) < 4 * np.sqrt(users * share * (1 - share))


def test_masks_are_sampled_anew_at_each_call_from_the_generator_alone() -> None:
    task, batch, rng = masked(last=0.5), batch_of([list(range(1, 10))] * 20), rng_of(6)
    first, second, same = task(batch, rng), task(batch, rng), task(batch, rng_of(6))
    assert first.inputs.items.tolist() != second.inputs.items.tolist()
    assert first.inputs.items.tolist() == same.inputs.items.tolist()


def test_users_keep_their_own_tokens() -> None:
    batch = batch_of([[1, 2], [3, 4, 5], [6, 7, 8, 9]])
    examples = masked(share=0.5, last=1.0)(batch, rng_of())
    assert examples.positions is not None
    lengths = examples.inputs.lengths
    assert lengths.tolist() == [2, 3, 4, 2, 3, 4]
    assert np.bincount(owners(lengths)[examples.positions]).tolist() == [1, 2, 2, 1, 1, 1]
    assert examples.targets[-3:].tolist() == [2, 5, 9]
