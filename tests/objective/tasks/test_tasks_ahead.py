"""Tasks that look days ahead: their queries and targets, as laws over random logs and by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from task_users import chi_square, most_chi_square, users_of

from segue.data.batch import Batch, gather
from segue.data.sequences import Sequences
from segue.errors import SettingsError
from segue.objective.tasks.actions import AllAction, DenseAllAction, NextAction, positives_ahead
from segue.objective.tasks.examples import Examples, Task, TaskFacts
from segue.objective.tasks.next_item import NextItem
from segue.objective.tasks.positive import ALL_EVENTS, Positive, PositiveEvents
from segue.training.windows import training_windows

DAY = 86400
KINDS = ("look", "save@home", "save@search", "saved", "buy")


def batch_at(*days: Sequence[float], kinds: list[int] | None = None, values: list[float] | None = None) -> Batch:
    """Users with events on these days; the items are 1, 2, … over all of them."""
    lengths = np.array([len(user) for user in days])
    return Batch(
        items=np.arange(1, lengths.sum() + 1),
        times=np.array([round(day * DAY) for user in days for day in user]),
        lengths=lengths,
        kinds=None if kinds is None else np.array(kinds),
        values=None if values is None else np.array(values, dtype=np.float32),
    )


TaskCase = tuple[Task, TaskFacts]


def dense(*, length: int = 99, positive: PositiveEvents = ALL_EVENTS, **more: Any) -> TaskCase:
    return DenseAllAction(**more), TaskFacts(positive=positive, length=length)


def all_action(*, length: int = 99, **more: Any) -> TaskCase:
    return AllAction(**more), TaskFacts(length=length)


NEXT: TaskCase = NextAction(), TaskFacts()


def examples_of(case: TaskCase, batch: Batch, seed: int = 0) -> Examples:
    task, facts = case
    return task(batch, np.random.default_rng(seed), facts)


# --- by hand ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("days", "expected"), [(14, [[1, 2], [2], [], [], []]), (28, [[1, 2, 3], [2, 3], [3], [4], []])], ids=str
)
def test_candidates_of_g26(days: int, expected: list[list[int]]) -> None:
    """Events on the days 0, 1, 5, 20 and 40; the same of a second user in the batch."""
    batch = batch_at([0, 1, 5, 20, 40], [0, 1, 5, 20, 40])
    ahead = positives_ahead(batch, np.ones(10, dtype=bool), days * DAY)
    candidates = [ahead.positives[first:last].tolist() for first, last in zip(ahead.first, ahead.last, strict=True)]
    assert candidates == expected + [[position + 5 for position in positions] for positions in expected]


def test_a_window_includes_its_last_second_and_excludes_the_querys_own() -> None:
    batch = Batch(items=np.arange(1, 6), times=np.array([0, 0, DAY, DAY + 1, DAY + 1]), lengths=np.array([5]))
    ahead = positives_ahead(batch, np.ones(5, dtype=bool), DAY)
    candidates = [ahead.positives[first:last].tolist() for first, last in zip(ahead.first, ahead.last, strict=True)]
    assert candidates == [[2], [2], [3, 4], [], []]


def test_five_events_in_a_month_have_four_queries() -> None:
    examples = examples_of(dense(), batch_at([0, 1, 2, 3, 4]))
    assert examples.inputs.items.tolist() == [1, 2, 3, 4] and examples.inputs.lengths.tolist() == [4]
    assert examples.positions is not None and examples.positions.tolist() == [0, 1, 2, 3]
    assert examples.inputs.query_times is not None and examples.inputs.query_times.tolist() == [4 * DAY]


def test_events_after_the_last_query_are_no_inputs() -> None:
    """The second user's events are years apart, the third's have equal times; the fourth's last are years apart."""
    batch = batch_at([0, 1], [0, 999], [5, 5, 5], [0, 0, 1, 999, 1999])
    examples = examples_of(dense(), batch)
    assert examples.inputs.lengths.tolist() == [1, 2]
    assert examples.inputs.items.tolist() == [1, 8, 9] and examples.targets.tolist() == [2, 10, 10]
    assert examples.positions is not None and examples.positions.tolist() == [0, 1, 2]
    assert examples.own is not None
    assert examples.own[0].tolist() == [0, 0, 1, 1, 1, 1, 1] and examples.own[1].tolist() == [1, 2, 8, 9, 10, 11, 12]


def test_users_without_queries() -> None:
    for task in (dense(), all_action(), NEXT):
        examples = examples_of(task, batch_at([3, 3], [4, 4, 4]))
        assert len(examples.targets) == len(examples.inputs.items) == len(examples.inputs.lengths) == 0


def test_events_beyond_the_models_length_are_only_targets() -> None:
    examples = examples_of(dense(length=3, labels=2), batch_at([0, 1, 2, 3, 4]))
    assert examples.inputs.items.tolist() == [1, 2, 3] and len(examples.targets) == 3
    assert DenseAllAction(labels=2).extra == 2 == AllAction(labels=2).extra


def test_targets_are_uniform_over_candidates_and_sampled_anew() -> None:
    users = 3000
    examples = examples_of(dense(), batch_at(*[[0, 1, 2, 3, 4, 5]] * users))
    answers = (examples.targets - 1) % 6
    for position in range(5):
        counts = np.bincount(answers[position::5], minlength=6)[position + 1 :]
        if position < 4:
            assert chi_square(counts, np.full(5 - position, users / (5 - position))) < most_chi_square(5 - position)
        assert counts.sum() == users
    other = examples_of(dense(), batch_at(*[[0, 1, 2, 3, 4, 5]] * users), seed=1)
    assert (other.targets != examples.targets).mean() > 0.3


def test_all_action_ends_its_inputs_at_any_possible_query() -> None:
    """The last of six events comes years after the others, so that only the first four can be queries; with three
    labels the inputs end after the third or the fourth."""
    users = 3000
    examples = examples_of(all_action(labels=3), batch_at(*[[0, 1, 2, 3, 4, 999]] * users))
    counts = np.bincount(examples.inputs.lengths, minlength=7)
    assert counts[[0, 1, 2, 5, 6]].sum() == 0
    assert chi_square(counts[3:5], np.full(2, users / 2)) < most_chi_square(2)


def test_targets_of_all_action_are_all_candidates_of_the_newest_state() -> None:
    examples = examples_of(all_action(length=2, labels=9), batch_at([0, 1, 2, 2.5, 30, 40], [0, 99, 100]))
    assert examples.inputs.lengths.tolist() in ([1, 2], [2, 2])
    states = users_of(examples.targets, np.bincount(examples.users))
    assert states == ([[2, 3, 4], [9]] if examples.inputs.lengths[0] == 1 else [[3, 4], [9]])


def test_all_action_takes_the_earliest_of_too_many_candidates() -> None:
    examples = examples_of(all_action(length=1, labels=2), batch_at([0, 1, 2, 3, 4]))
    assert examples.targets.tolist() == [2, 3]


# --- equivalences -------------------------------------------------------------------------------------------------

apart = st.lists(st.lists(st.integers(1, 3), min_size=2, max_size=9), min_size=1, max_size=5)


def same(one: Examples, other: Examples) -> bool:
    ours, theirs = one.inputs, other.inputs
    pairs = [(getattr(ours, name), getattr(theirs, name)) for name in ("items", "times", "lengths", "query_times")]
    pairs += [(one.targets, other.targets), (one.users, other.users)]
    return all(np.array_equal(*pair) for pair in pairs) and np.array_equal(
        np.arange(len(one.targets)) if one.positions is None else one.positions,
        np.arange(len(other.targets)) if other.positions is None else other.positions,
    )


@given(apart)
def test_a_window_of_one_event_is_the_next_item_task(gaps: list[list[int]]) -> None:
    """29.8: events one to three days apart, of which the window of a query has exactly one."""
    batch = batch_at(*[np.cumsum(user).tolist() for user in gaps])
    assert same(examples_of(NEXT, batch), NextItem()(batch, np.random.default_rng(0)))
    even = batch_at(*[[float(position) for position in range(len(user))] for user in gaps])
    one_day = dense(days=1.0, labels=1, length=int(even.lengths.max()) - 1)
    assert same(examples_of(one_day, even), NextItem()(even, np.random.default_rng(0)))


@given(apart)
def test_all_action_is_dense_all_action_of_the_newest_state_alone(gaps: list[list[int]]) -> None:
    """For any window: the targets of all-action are the candidates of dense all-action there."""
    batch = batch_at(*[np.cumsum(user).tolist() for user in gaps])
    whole = examples_of(all_action(days=9999.0), batch)
    ahead = positives_ahead(batch, np.ones(len(batch.items), dtype=bool), 9999 * DAY)
    newest = np.cumsum(batch.lengths) - batch.lengths + whole.inputs.lengths - 1
    expected = [batch.items[ahead.positives[ahead.first[at] : ahead.last[at]]].tolist() for at in newest]
    assert users_of(whole.targets, np.bincount(whole.users)) == expected
    assert whole.positions is not None
    assert (whole.positions == np.cumsum(whole.inputs.lengths)[whole.users] - 1).all()


# --- laws over random logs ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Law:
    """A log whose items are its rows, so that every event can be identified, and how it is cut."""

    log: Sequences
    ends: np.ndarray
    length: int
    labels: int
    stride: int | None
    seconds: int
    entries: tuple[Positive, ...]

    def is_positive(self, row: int) -> bool:
        """By the definition, one event at a time."""
        assert self.log.kinds is not None and self.log.values is not None
        name, value = KINDS[self.log.kinds[row]], float(self.log.values[row])
        return not self.entries or any(
            (entry.kind is None or name.split("@")[0] == entry.kind or name == entry.kind)
            and (entry.min_value is None or value >= entry.min_value)
            for entry in self.entries
        )


positives = st.sampled_from(
    [
        (),
        (Positive(kind="save"),),
        (Positive(kind="buy", min_value=0.5), Positive(kind="save@home")),
        (Positive(min_value=0.25),),
    ]
)


@st.composite
def laws(draw: st.DrawFn) -> Law:
    users = draw(st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=12), min_size=1, max_size=5))
    total, lengths = sum(map(len, users)), np.array([len(user) for user in users])
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    seed = np.random.default_rng(draw(st.integers(0, 99)))
    log = Sequences(
        offsets=offsets,
        items=np.arange(1, total + 1, dtype=np.int32),
        times=np.concatenate([np.cumsum(user) for user in users]) * 1_000_000,
        kinds=seed.integers(0, len(KINDS), total).astype(np.uint16),
        values=np.where(seed.random(total) < 0.2, np.nan, seed.integers(0, 5, total) / 4).astype(np.float32),
    )
    ends = offsets[:-1] + np.array([draw(st.integers(0, length)) for length in lengths])
    assume((ends - offsets[:-1] >= 2).any())
    return Law(
        log=log,
        ends=ends,
        length=draw(st.integers(1, 6)),
        labels=draw(st.integers(1, 4)),
        stride=draw(st.none() | st.integers(1, 3)),
        seconds=draw(st.integers(1, 15)),
        entries=draw(positives),
    )


def batch_and_examples(law: Law, task: TaskCase) -> tuple[Batch, Examples]:
    """All windows in one batch."""
    windows = training_windows(law.log, law.ends, length=law.length + task[0].extra, stride=law.stride)
    batch = gather(law.log, windows.starts, windows.ends)
    return batch, examples_of(task, batch)


def task_of(law: Law, name: str) -> TaskCase:
    facts = TaskFacts(positive=PositiveEvents(law.entries, KINDS), length=law.length)
    if name == "next-action":
        return NextAction(), facts
    task_class = DenseAllAction if name == "dense-all-action" else AllAction
    return task_class(days=law.seconds / DAY, labels=law.labels), facts


@pytest.mark.parametrize("name", ["dense-all-action", "all-action", "next-action"])
@settings(max_examples=50, deadline=None)
@given(law=laws())
def test_labels_are_later_positive_events_of_the_user_before_the_cut(name: str, law: Law) -> None:
    _, examples = batch_and_examples(law, task_of(law, name))
    assert examples.positions is not None and len(examples.positions) == len(examples.targets)
    user = np.repeat(np.arange(law.log.n_users), np.diff(law.log.offsets))
    queries, answers = examples.inputs.items[examples.positions] - 1, examples.targets - 1
    assert (user[queries] == user[answers]).all()
    assert (law.log.times[answers] > law.log.times[queries]).all()
    assert (answers < law.ends[user[answers]]).all(), "nothing after the cut"
    assert all(law.is_positive(row) for row in answers)
    if name != "next-action":
        assert (law.log.times[answers] <= law.log.times[queries] + law.seconds * 1_000_000).all()


@pytest.mark.parametrize("name", ["dense-all-action", "all-action", "next-action"])
@settings(max_examples=50, deadline=None)
@given(law=laws())
def test_inputs_are_the_oldest_of_a_window_and_every_possible_query_is_one(name: str, law: Law) -> None:
    task = task_of(law, name)
    batch, examples = batch_and_examples(law, task)
    seconds = law.seconds if name != "next-action" else 10**9
    expected, queries, own = [], [], []
    for rows in (np.array(user) - 1 for user in users_of(batch.items, batch.lengths)):
        times, positive = law.log.times[rows] // 1_000_000, [law.is_positive(row) for row in rows]
        ahead = [
            [row for row, at, fits in zip(rows, times, positive, strict=True) if fits and now < at <= now + seconds]
            for now in times
        ]
        positions = [position for position in range(min(law.length, len(rows))) if ahead[position]]
        if positions:
            expected.append(rows[: positions[-1] + 1])
            queries.append([rows[position] for position in positions])
            own.append({row for row, fits in zip(rows, positive, strict=True) if fits})
    inputs = [np.array(user) - 1 for user in users_of(examples.inputs.items, examples.inputs.lengths)] if own else []
    assert len(inputs) == len(expected) == len(examples.inputs.lengths)
    assert examples.inputs.lengths.max(initial=0) <= law.length
    assert examples.positions is not None and examples.own is not None
    for position, (actual, full) in enumerate(zip(inputs, expected, strict=True)):
        own_queries = examples.inputs.items[examples.positions[examples.users == position]] - 1
        assert set(examples.own[1][examples.own[0] == position] - 1) == own[position]
        if name == "all-action":
            assert actual.tolist() == full[: len(actual)].tolist() and set(own_queries) == {actual[-1]} <= set(
                queries[position]
            )
        else:
            assert actual.tolist() == full.tolist() and own_queries.tolist() == queries[position]


# --- positive events ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ((Positive(kind="save"),), [0, 1, 1, 0, 0]),
        ((Positive(kind="save@home"),), [0, 1, 0, 0, 0]),
        ((Positive(kind="saved"), Positive(kind="look")), [1, 0, 0, 1, 0]),
        ((Positive(min_value=0.7),), [0, 0, 1, 1, 0]),
        ((Positive(kind="save", min_value=0.7), Positive(kind="look", min_value=-1.0)), [1, 0, 1, 0, 0]),
        ((), [1, 1, 1, 1, 1]),
    ],
)
def test_positive_events(entries: tuple[Positive, ...], expected: list[int]) -> None:
    """One of each kind; the last has no value. .7 is .69999999 in the log."""
    batch = batch_at([0, 1, 2, 3, 4], kinds=[0, 1, 2, 3, 4], values=[0.0, 0.5, 0.7, 2.0, np.nan])
    assert PositiveEvents(entries, KINDS)(batch).astype(int).tolist() == expected


def test_a_kind_that_the_log_does_not_have_is_refused_with_those_it_has() -> None:
    with pytest.raises(SettingsError, match=r"'sav'.* look, save@home, save@search, saved, buy"):
        PositiveEvents((Positive(kind="buy"), Positive(kind="sav")), KINDS)
    with pytest.raises(SettingsError, match=r"'buy', and the log has no kinds.*--kind"):
        PositiveEvents((Positive(kind="buy"),), ())


def test_values_that_the_log_does_not_have_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"at least 3\.0.*no values.*--value"):
        PositiveEvents((Positive(min_value=3.0),), KINDS)(batch_at([0, 1]))


def test_an_empty_entry_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"objective\.task\.positive .* neither"):
        Positive()
    with pytest.raises(SettingsError, match=r"min_value must be a finite number, got nan"):
        Positive(min_value=float("nan"))
