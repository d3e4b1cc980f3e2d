"""Recency sampling: recent events are likelier targets, the rest is the input, and its last state is the query."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from task_users import batch_of, chi_square, most_chi_square, owners, some_users, users_of

from segue.data.batch import Batch
from segue.objective.tasks.examples import Examples
from segue.objective.tasks.next_item import NextItem
from segue.objective.tasks.recency import Exponential, Linear, Recency

G9 = {
    0.8: (0.121847, 0.152308, 0.190386, 0.237982, 0.297477),
    0.5: (0.032258, 0.064516, 0.129032, 0.258065, 0.516129),
    1.0: (0.2, 0.2, 0.2, 0.2, 0.2),
}
GRID = (np.arange(1_000_000) + 0.5) / 1_000_000


def importance_of(kind: str, alpha: float) -> Exponential | Linear:
    return Exponential(alpha=alpha) if kind == "exponential" else Linear()


def recency(*, importance: str = "exponential", alpha: float = 0.8, share: float = 0.2, cuts: int = 1) -> Recency:
    return Recency(importance=importance_of(importance, alpha), share=share, cuts=cuts)


def rng_of(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def shares(events: int, *, importance: str = "exponential", alpha: float = 0.8) -> np.ndarray:
    """The probability of each event: exact but for the grid."""
    positions = importance_of(importance, alpha).sampled(np.full(len(GRID), events), GRID)
    return np.bincount(positions, minlength=events) / len(GRID)


@pytest.mark.parametrize("alpha", sorted(G9))
def test_importance_of_g9(alpha: float) -> None:
    assert shares(5, alpha=alpha) == pytest.approx(G9[alpha], abs=3e-6)


def test_linear_importance_of_g9() -> None:
    assert shares(5, importance="linear") == pytest.approx(np.arange(1, 6) / 15, abs=3e-6)


@given(st.integers(1, 40), st.floats(0.05, 1))
def test_importance_is_its_formula(events: int, alpha: float) -> None:
    """At the edges of each event's interval of uniform numbers, the event changes."""
    weights = np.exp((events - 1 - np.arange(events)) * np.log(alpha))
    edges = np.cumsum(weights[::-1] / weights.sum())[:-1]  # counted from the newest
    uniform = np.concatenate((edges - 1e-9, edges + 1e-9)).clip(0, 1 - 1e-9)
    sampled = Exponential(alpha=alpha).sampled(np.full(len(uniform), events), uniform)
    ages = events - 1 - sampled if alpha < 1 else sampled
    wide = np.concatenate((weights[::-1][:-1], weights[::-1][1:])) / weights.sum() > 1e-8
    assert (ages == np.concatenate((np.arange(events - 1), np.arange(1, events))))[wide].all()


@pytest.mark.parametrize("alpha", [1e-9, 0.5, 0.8, 1 - 1e-12, 1 - 2**-53, 1.0])
@pytest.mark.parametrize("importance", ["exponential", "linear"])
def test_long_histories_and_extreme_uniform_numbers(importance: str, alpha: float) -> None:
    before = np.repeat([1, 2, 3, 1500, 5_000_000], 3)
    uniform = np.tile([0.0, 0.5, 1 - 2**-53], 5)
    positions = importance_of(importance, alpha).sampled(before, uniform)
    assert positions.dtype == np.int64 and (positions >= 0).all() and (positions < before).all()
    ends = positions.reshape(5, 3)[:, [0, 2]]  # the ends of the interval are the ends of the history
    if importance == "exponential" and alpha < 1:
        assert (ends[:, 0] == [0, 1, 2, 1499, 4_999_999]).all() and (ends[:, 1] <= ends[:, 0]).all()
    else:
        assert (ends[:, 0] == 0).all() and (ends[:, 1] == [0, 1, 2, 1499, 4_999_999]).all()


class Uniforms:
    """A stub generator: uniform numbers fixed by a test."""

    def __init__(self, *numbers: float) -> None:
        self.numbers = list(numbers)

    def random(self, count: int) -> np.ndarray:
        return np.array([self.numbers.pop(0) for _ in range(count)])


def test_the_toy_user() -> None:
    """[10, 20, 30] at .8: one sample, of these probabilities; index 1 makes 20 the target of the state after 30."""
    assert shares(3) == pytest.approx([0.262295, 0.327869, 0.409836], abs=3e-6)
    examples = recency()(batch_of([[10, 20, 30]]), cast(np.random.Generator, Uniforms(0.5)))
    assert examples.inputs.items.tolist() == [10, 30] and examples.inputs.lengths.tolist() == [2]
    assert examples.inputs.times.tolist() == [0, 20]
    assert examples.inputs.query_times is not None and examples.inputs.query_times.tolist() == [20]
    assert examples.targets.tolist() == [20]
    assert examples.positions is not None and examples.positions.tolist() == [1]
    assert examples.weights is None


def removed_positions(batch: Batch, examples: Examples) -> np.ndarray:
    """Positions in the batch of events that are no inputs."""
    assert examples.inputs.values is not None
    return np.setdiff1d(np.arange(len(batch.items)), examples.inputs.values.astype(np.int64))


@pytest.mark.parametrize("alpha", sorted(G9))
def test_targets_are_as_frequent_as_in_g9(alpha: float) -> None:
    users = 10_000
    batch = batch_of([[1, 2, 3, 4, 5]] * users)
    examples = recency(alpha=alpha)(batch, rng_of(1))
    counts = np.bincount(removed_positions(batch, examples) % 5, minlength=5)
    assert chi_square(counts, users * np.array(G9[alpha]) / sum(G9[alpha])) < most_chi_square(5)


def test_distinct_answers_of_g55() -> None:
    """n = 10, two samples with replacement: 1.862158 distinct ones on average."""
    users = 20_000
    examples = recency()(batch_of([list(range(1, 11))] * users), rng_of(2))
    assert examples.positions is not None
    each = np.bincount(owners(examples.inputs.lengths)[examples.positions], minlength=users)
    assert set(each) == {1, 2}
    assert abs(each.mean() - 1.862158) < 4 * each.std() / np.sqrt(users)


def test_with_the_last_event_alone_it_is_the_last_query_of_next_item() -> None:
    """alpha → 0 and one sample: the last query of next-item, and no other."""
    histories = [list(range(1, length + 1)) for length in (2, 3, 7, 10)]
    batch = batch_of(histories)
    examples, shifted = recency(alpha=1e-9, share=0.1)(batch, rng_of(3)), NextItem()(batch, rng_of(3))
    assert users_of(examples.inputs.items, examples.inputs.lengths) == [history[:-1] for history in histories]
    assert examples.inputs.items.tolist() == shifted.inputs.items.tolist()
    assert examples.inputs.query_times is not None and shifted.inputs.query_times is not None
    assert examples.inputs.query_times.tolist() == shifted.inputs.query_times.tolist()
    ends = np.cumsum(shifted.inputs.lengths) - 1
    assert examples.positions is not None and examples.positions.tolist() == ends.tolist()
    assert examples.targets.tolist() == shifted.targets[ends].tolist()


@given(
    some_users,
    st.floats(0.3, 1),
    st.floats(0.05, 0.99),
    st.sampled_from(["exponential", "linear"]),
    st.integers(1, 12),
    st.integers(0, 99),
)
def test_inputs_and_answers_are_the_history(
    histories: list[list[int]], alpha: float, share: float, importance: str, cuts: int, seed: int
) -> None:
    batch = batch_of(histories)
    examples = recency(importance=importance, alpha=alpha, share=share, cuts=cuts)(batch, rng_of(seed))
    inputs, positions = examples.inputs, examples.positions
    assert positions is not None and inputs.values is not None
    source, removed, owner = inputs.values.astype(np.int64), removed_positions(batch, examples), owners(batch.lengths)
    assert (np.diff(source) > 0).all() and (inputs.items == batch.items[source]).all(), "in order"
    assert inputs.lengths.min() >= 1 and inputs.lengths.tolist() == np.bincount(owner[source]).tolist()
    assert (np.diff(positions) >= 0).all(), "the targets of one state are adjacent"
    states = source[positions]
    for user in range(len(histories)):
        of_user = owner[states] == user
        answers, n_inputs = sorted(batch.items[removed[owner[removed] == user]].tolist()), inputs.lengths[user]
        begin = np.cumsum(batch.lengths)[user] - batch.lengths[user]
        assert of_user.any(), "every user has a query"
        if cuts == 1:
            assert sorted(examples.targets[of_user].tolist()) == answers
            assert set(positions[of_user]) == {np.cumsum(inputs.lengths)[user] - 1}, "the query is the last state"
            assert len(answers) <= max(1, int(len(histories[user]) * share))
        else:
            targets = set(examples.targets[of_user].tolist())
            after_an_input = removed[(owner[removed] == user) & (removed > source[owner[source] == user][0])]
            assert targets >= set(batch.items[after_an_input].tolist())
            assert targets <= set(answers)
        assert n_inputs + len(answers) == len(histories[user]) and begin <= states[of_user].min()
    assert batch.items.tolist() == [item for history in histories for item in history], "the batch is not changed"


@given(some_users, st.floats(0.3, 1), st.integers(2, 12), st.integers(0, 99))
def test_no_target_of_a_state_lies_beyond_the_next_input(
    histories: list[list[int]], alpha: float, cuts: int, seed: int
) -> None:
    """The state is the last input before a cut: a target lies before it, or after it with only targets between."""
    numbered = batch_of([list(range(1, len(history) + 1)) for history in histories])  # items are positions
    examples = recency(alpha=alpha, share=0.3, cuts=cuts)(numbered, rng_of(seed))
    assert examples.positions is not None
    inputs = users_of(examples.inputs.items, examples.inputs.lengths)
    user, state = owners(examples.inputs.lengths)[examples.positions], examples.inputs.items[examples.positions]
    for one, at, answer in zip(user.tolist(), state.tolist(), examples.targets.tolist(), strict=True):
        later = [item for item in inputs[one] if item > at]
        assert not later or answer < later[0]
    pairs = list(zip(examples.positions.tolist(), examples.targets.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs), "each target once per state"


def test_the_end_is_a_cut_and_the_others_are_uniform() -> None:
    """Only the newest event is sampled: the removed events show the cuts, which lie after 2 … n - 1 events."""
    users, events = 6_000, 9
    batch = batch_of([list(range(events))] * users)
    removed = removed_positions(batch, recency(alpha=1e-9, cuts=3)(batch, rng_of(4))) % events
    counts = np.bincount(removed, minlength=events)
    assert counts[0] == 0 and counts[-1] == users and counts.sum() == 3 * users
    inner = removed.reshape(users, 3)[:, :2]
    cells = np.bincount(inner[:, 0] * events + inner[:, 1], minlength=events**2)
    cells = cells[cells > 0]
    assert len(cells) == 7 * 6 // 2
    assert chi_square(cells, np.full(len(cells), users / len(cells))) < most_chi_square(len(cells))


def test_each_target_belongs_to_the_state_before_its_cut() -> None:
    """Six events, cuts after four and six; the newest before each is sampled: 3 after 2, and 5 after 4."""
    batch = batch_of([[0, 1, 2, 3, 4, 5]])
    uniform = Uniforms(0.9, 0.5, 0.1, 0.5, 0.0, 0.0)  # the third of positions 0 … 3 is a cut; then two samples
    examples = recency(alpha=0.5, cuts=2)(batch, cast(np.random.Generator, uniform))
    assert examples.inputs.items.tolist() == [0, 1, 2, 4]
    assert examples.targets.tolist() == [3, 5]
    assert examples.positions is not None and examples.positions.tolist() == [2, 3]


def test_more_cuts_than_positions_are_all_positions() -> None:
    """Every event but the oldest is a target of its state: several targets of one state."""
    examples = recency(alpha=1e-9, cuts=99)(batch_of([[1, 2, 3, 4], [5, 6]]), rng_of())
    assert examples.inputs.items.tolist() == [1, 5] and examples.inputs.lengths.tolist() == [1, 1]
    assert examples.positions is not None and examples.positions.tolist() == [0, 0, 0, 1]
    assert examples.targets.tolist() == [2, 3, 4, 6]


def test_an_input_is_never_empty() -> None:
    """Most of three events are sampled at both cuts: if all would be removed, one input stays."""
    users = 500
    examples = recency(alpha=1.0, share=0.99, cuts=9)(batch_of([[1, 2, 3]] * users), rng_of(5))
    assert examples.inputs.lengths.min() == 1
    inputs = users_of(examples.inputs.items, examples.inputs.lengths)
    assert [1] in inputs and [2] in inputs and [3] in inputs
    assert examples.positions is not None
    each = np.bincount(owners(examples.inputs.lengths)[examples.positions], minlength=users)
    assert each.min() >= 1


def test_a_target_without_an_input_before_its_cut_is_dropped() -> None:
    """Cut after two: both are sampled there or at the end, so no query is left there; the end has its own."""
    batch = batch_of([[1, 2, 3]])
    # one inner cut; the end samples twice, the newest but one and the oldest; the inner cut samples its newest
    examples = recency(alpha=0.5, share=0.7, cuts=2)(batch, cast(np.random.Generator, Uniforms(0.5, 0.7, 0.99, 0.1)))
    assert examples.inputs.items.tolist() == [3]
    assert examples.targets.tolist() == [1, 2]
    assert examples.positions is not None and examples.positions.tolist() == [0, 0]


def test_targets_are_sampled_anew_at_each_call_from_the_generator_alone() -> None:
    task, batch, rng = recency(cuts=2), batch_of([list(range(1, 10))] * 20), rng_of(6)
    first, second, same = task(batch, rng), task(batch, rng), task(batch, rng_of(6))
    assert first.inputs.items.tolist() != second.inputs.items.tolist()
    assert first.inputs.items.tolist() == same.inputs.items.tolist()
    assert first.targets.tolist() == same.targets.tolist()
