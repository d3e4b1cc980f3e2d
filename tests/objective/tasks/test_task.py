from __future__ import annotations

import numpy as np
from hypothesis import given
from task_users import batch_of, some_users

from segue.data.batch import gather
from segue.data.sequences import Sequences
from segue.data.split import split_last
from segue.objective.tasks.next_item import NextItem

RNG = np.random.default_rng(0)


def test_the_toy_user() -> None:
    """Log [10, 20, 30, 40, 50] at 0, 100 … 400: train 10 → 20 → 30, validate on 40, test on 50."""
    log = Sequences(
        offsets=np.array([0, 5]),
        items=np.array([10, 20, 30, 40, 50], dtype=np.int32),
        times=np.array([0, 100, 200, 300, 400]) * 1_000_000,
    )
    split = split_last(log)
    examples = NextItem()(gather(log, log.offsets[:-1], split.train_end), RNG)
    assert examples.inputs.items.tolist() == [10, 20]
    assert examples.inputs.times.tolist() == [0, 100]
    assert examples.inputs.lengths.tolist() == [2]
    assert examples.targets.tolist() == [20, 30]
    assert examples.positions is None and examples.weights is None
    for part, history, target in (("valid", [10, 20, 30], 40), ("test", [10, 20, 30, 40], 50)):
        cases = split.cases(part)  # type: ignore[arg-type]
        assert gather(log, cases.starts, cases.targets).items.tolist() == history
        assert log.items[cases.targets].tolist() == [target]


@given(some_users)
def test_inputs_omit_each_users_last_event_and_targets_the_first(histories: list[list[int]]) -> None:
    batch = batch_of(histories)
    examples = NextItem()(batch, RNG)
    inputs, lengths = examples.inputs, [len(history) - 1 for history in histories]
    assert inputs.lengths.tolist() == lengths
    assert inputs.items.tolist() == [item for history in histories for item in history[:-1]]
    assert examples.targets.tolist() == [item for history in histories for item in history[1:]]
    assert inputs.items.dtype == examples.targets.dtype == np.int64


@given(some_users)
def test_no_pair_crosses_users_and_all_of_an_event_stays_together(histories: list[list[int]]) -> None:
    batch = batch_of(histories)
    examples = NextItem()(batch, RNG)
    inputs = examples.inputs
    assert inputs.kinds is not None and inputs.values is not None and inputs.query_times is not None
    rows = inputs.values.astype(np.int64)  # the row of each input in the batch
    owner = np.repeat(np.arange(len(histories)), batch.lengths)
    assert (owner[rows] == owner[rows + 1]).all()
    assert (batch.items[rows] == inputs.items).all() and (batch.items[rows + 1] == examples.targets).all()
    assert (inputs.times == rows * 10).all() and (inputs.kinds == rows % 3).all()
    assert inputs.query_times.tolist() == [10 * (end - 1) for end in np.cumsum(batch.lengths)]


@given(some_users)
def test_the_batch_is_not_changed(histories: list[list[int]]) -> None:
    batch = batch_of(histories)
    NextItem()(batch, RNG)
    assert batch.items.tolist() == [item for history in histories for item in history]
    assert batch.lengths.tolist() == [len(history) for history in histories]


def test_the_generator_is_not_used() -> None:
    rng = np.random.default_rng(1)
    NextItem()(batch_of([[1, 2, 3]]), rng)
    assert rng.random() == np.random.default_rng(1).random()
