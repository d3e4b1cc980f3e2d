"""Masking: what is hidden is exactly what is asked for, any of it with equal chance, anew each time."""

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
MakesExamples = Callable[[Batch, np.random.Generator], Examples]


def masked(*, share: float = 0.2, most: int = 9, last: float = 0.0, mask: int = MASK) -> MakesExamples:
    return partial(MaskedItem(share=share, most=most, last=last), facts=TaskFacts(mask))


def rng_of(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_the_toy_user() -> None:
    """[10, 20, 30, 40]: round(.2 * 4) = 1 is hidden; once more with only the last; the question is cut to four."""
    mask = 60
    batch = batch_of([[10, 20, 30, 40]])
    found = set()
    for seed in range(40):
        examples = masked(mask=mask, last=1.0)(batch, rng_of(seed))
        first, second = users_of(examples.inputs.items, examples.inputs.lengths)
        assert second == [10, 20, 30, mask]
        (place,) = np.flatnonzero(np.array(first) == mask)
        assert examples.positions is not None and examples.positions.tolist() == [place, 4 + 3]
        assert examples.targets.tolist() == [batch.items[place], 40]
        found.add((tuple(first), int(place)))
    instances = [(mask, 20, 30, 40), (10, mask, 30, 40), (10, 20, mask, 40), (10, 20, 30, mask)]
    assert found == {(instance, place) for place, instance in enumerate(instances)}
    assert tensors(newest(batch, 3)).with_query_token(mask).items.tolist() == [20, 30, 40, mask]


def test_the_worked_instance() -> None:
    """[5, 9, 2, 7, 4] at .4: two hidden, and their items the answers, in order."""
    batch, found = batch_of([[5, 9, 2, 7, 4]]), {}
    for seed in range(100):
        examples = masked(share=0.4)(batch, rng_of(seed))
        assert examples.positions is not None and examples.weights is None
        found[tuple(examples.positions.tolist())] = (examples.inputs.items.tolist(), examples.targets.tolist())
    assert set(found) == set(combinations(range(5), 2))
    assert found[1, 3] == ([5, MASK, 2, MASK, 4], [9, 7])


@given(some_users, st.floats(0.01, 1), st.integers(1, 9), st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 99))
def test_masking_touches_exactly_what_is_asked_for(
    histories: list[list[int]], share: float, most: int, last: float, seed: int
) -> None:
    batch = batch_of(histories)
    examples = masked(share=share, most=most, last=last)(batch, rng_of(seed))
    inputs, positions, users = examples.inputs, examples.positions, len(histories)
    assert positions is not None and inputs.kinds is not None and inputs.values is not None
    # where each token came from: the times are of no use to an encoder that knows nothing but order
    source = inputs.times // 10
    asked = np.isin(np.arange(len(source)), positions)
    assert len(np.unique(positions)) == len(positions) == len(examples.targets)
    assert (examples.targets == batch.items[source[positions]]).all()
    assert (inputs.items == np.where(asked, MASK, batch.items[source])).all()
    assert (inputs.kinds == np.where(asked, 0, source % 3)).all()
    assert (np.isnan(inputs.values) == asked).all() and (inputs.values[~asked] == source[~asked]).all()
    whole = users_of(np.arange(len(batch.items)), batch.lengths)
    found, hidden = users_of(source, inputs.lengths), users_of(asked, inputs.lengths)
    assert found[:users] == whole
    expected = [min(most, max(1, int(np.floor(len(history) * share + 0.5)))) for history in histories]
    assert [sum(flags) for flags in hidden[:users]] == expected
    again = [whole.index(user) for user in found[users:]]
    assert again == sorted(set(again)) and (last == 0.5 or len(again) == users * last)
    assert all(flags == [False] * (len(flags) - 1) + [True] for flags in hidden[users:])
    assert batch.items.tolist() == [item for history in histories for item in history], "left as it was"
    assert batch.values is not None and batch.values.tolist() == list(range(len(batch.items)))


@pytest.mark.parametrize(
    ("length", "share", "most", "hidden"),
    [(200, 0.2, 40, 40), (200, 0.2, 20, 20), (50, 0.6, 30, 30), (2, 0.2, 9, 1), (5, 0.5, 9, 3), (7, 0.5, 9, 4)],
)
def test_how_many_are_hidden(length: int, share: float, most: int, hidden: int) -> None:
    """Half an event is rounded up, as in the original."""
    examples = masked(share=share, most=most)(batch_of([[1] * length]), rng_of())
    assert len(examples.targets) == hidden


def test_every_choice_of_places_is_as_likely() -> None:
    """Two of seven, 21 pairs; and each of two users draws for itself."""
    users = 8_000
    examples = masked(share=2 / 7)(batch_of([[1] * 7] * users), rng_of(3))
    assert examples.positions is not None
    pairs = examples.positions.reshape(users, 2) - 7 * np.arange(users)[:, None]
    found = np.bincount(pairs[:, 0] * 7 + pairs[:, 1], minlength=49)
    cells = [first * 7 + second for first, second in combinations(range(7), 2)]
    assert found.sum() == found[cells].sum() == users
    assert chi_square(found[cells], np.full(21, users / 21)) < most_chi_square(21)
    neighbours = np.bincount(pairs[:-1:2, 0] * 7 + pairs[1::2, 0], minlength=49).reshape(7, 7)[:6, :6]
    chance = np.arange(6, 0, -1) / 21  # of the first place of a pair
    assert chi_square(neighbours, users / 2 * np.outer(chance, chance)) < most_chi_square(36)


def test_labels_are_spread_as_the_items_are() -> None:
    """What is asked for is a fair sample of what there is."""
    rng = rng_of(4)
    histories = [rng.choice(5, size=10, p=[0.4, 0.3, 0.15, 0.1, 0.05]) + 1 for _ in range(4_000)]
    batch = batch_of([history.tolist() for history in histories])
    examples = masked(share=0.1)(batch, rng)  # one a user: independent of each other
    expected = np.bincount(batch.items, minlength=6)[1:] / 10
    assert chi_square(np.bincount(examples.targets, minlength=6)[1:], expected) < most_chi_square(5)


def test_some_users_come_again_each_with_the_chance_asked_for() -> None:
    users, share = 10_000, 0.3
    examples = masked(last=share)(batch_of([[1, 2, 3]] * users), rng_of(5))
    again = len(examples.inputs.lengths) - users
    assert abs(again - share * users) < 4 * np.sqrt(users * share * (1 - share))


def test_drawn_anew_at_each_call_and_by_the_generator_alone() -> None:
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
