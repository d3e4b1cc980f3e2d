"""What is known of users beyond a batch: all weigh the same over an epoch, and no positive of theirs is a negative."""

from __future__ import annotations

from collections import defaultdict
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from fixed_samples import model_of
from hypothesis import assume, given
from hypothesis import settings as laws
from hypothesis import strategies as st
from settings_tables import objective_settings
from torch import Tensor

from segue.data.sequences import Sequences
from segue.objective.objective import Objective
from segue.objective.tasks.examples import Examples
from segue.training.windows import Windows, training_windows

N_ITEMS, LENGTH, TOKENS = 8, 4, 30
COUNTS = np.r_[0, np.ones(N_ITEMS, dtype=np.int64)]
MODEL = model_of([[0.1 * item, -0.2] for item in range(N_ITEMS)])
TASKS = ("dense-all-action", "all-action", "next-action")


def log_of(lengths: list[int], seed: int) -> Sequences:
    """Users with so many events, some at the same second, some days apart, each bought or looked at."""
    rng, total = np.random.default_rng(seed), sum(lengths)
    return Sequences(
        offsets=np.concatenate(([0], np.cumsum(lengths))),
        items=rng.integers(1, N_ITEMS + 1, total).astype(np.int32),
        times=np.concatenate([np.cumsum(rng.integers(0, 3, n) * 86_400_000_000) for n in lengths]),
        kinds=rng.integers(0, 2, total).astype(np.uint16),
    )


logs = st.builds(log_of, st.lists(st.integers(1, 40), min_size=2, max_size=12), st.integers(0, 99))


def prepared(
    log: Sequences, ends: np.ndarray, stride: int | None, changed: dict[str, Any]
) -> tuple[Objective, Windows]:
    ahead = {"task__labels": 3, "task__days": 5.0} if changed["task"] in TASKS[:2] else {}
    settings = objective_settings(**{**ahead, **changed})
    objective = Objective(settings, COUNTS, ("look", "buy"), length=LENGTH)
    windows = training_windows(log, ends, length=LENGTH + objective.extra, stride=stride)
    objective.prepare(windows.in_order(TOKENS), windows.histories(TOKENS), log.n_users)
    return objective, windows


@pytest.mark.parametrize("task", ["next-item", *TASKS])
@laws(max_examples=25, deadline=None)
@given(log=logs, stride=st.none() | st.integers(1, 4))
def test_over_an_epoch_every_user_weighs_the_same(task: str, log: Sequences, stride: int | None) -> None:
    """However long its history is, in however many windows and batches it comes: what the gradients of its questions
    are multiplied by adds up to the same."""
    assume((np.diff(log.offsets) >= 2).any())
    objective, windows = prepared(log, log.offsets[1:], stride, {"task": task, "equal_users": True})
    weighed: defaultdict[int, float] = defaultdict(float)
    for batch in windows.batches(TOKENS, np.random.default_rng(3)):
        examples = objective.examples(batch, np.random.default_rng(4))
        if not len(examples.targets):
            continue
        assert examples.inputs.users is not None
        shares = shares_of_questions(objective, examples) * objective.scale(examples)
        for user, share in zip(examples.inputs.users[examples.users], shares, strict=True):
            weighed[int(user)] += float(share)
    assume(weighed)
    assert list(weighed.values()) == pytest.approx([next(iter(weighed.values()))] * len(weighed), rel=1e-5)


def shares_of_questions(objective: Objective, examples: Examples) -> np.ndarray:
    """How much of a batch's loss each question is, as the loss is told [M]."""
    told: list[Tensor] = []

    def listening(states: Tensor, vectors: Tensor, places: Tensor, weights: Tensor) -> Tensor:  # noqa: ARG001
        told.append(weights / weights.sum())
        return states.sum()

    states = torch.ones(len(examples.inputs.items), 2, dtype=torch.float64)
    with patch("segue.objective.losses.catalogue.full_softmax", listening):
        objective.loss(MODEL, states, examples, torch.Generator())
    (shares,) = told
    return shares.numpy()


@pytest.mark.parametrize("task", TASKS)
@laws(max_examples=25, deadline=None)
@given(log=logs, stride=st.none() | st.integers(1, 4), left=st.integers(0, 5), bought=st.booleans())
def test_own_positives_are_those_of_the_whole_training_history(
    task: str, log: Sequences, stride: int | None, left: int, bought: bool
) -> None:
    """Also what an older window holds, or none; but nothing from the cut on."""
    ends = np.maximum(log.offsets[:-1], log.offsets[1:] - left)
    assume((ends - log.offsets[:-1] >= 2).any())
    positive = [{"kind": "buy"}] if bought else []
    drawn = {"loss": "bce", "sampler": "uniform", "sampler__negatives": 2}
    objective, windows = prepared(log, ends, stride, {"task": task, "task__positive": positive, **drawn})
    assert log.kinds is not None
    for batch in windows.batches(TOKENS, np.random.default_rng(3)):
        examples = objective.examples(batch, np.random.default_rng(4))
        assert examples.own is not None and examples.inputs.users is not None
        for row, user in enumerate(examples.inputs.users):
            history = slice(log.offsets[user], ends[user])
            wanted = log.items[history][log.kinds[history] == 1] if bought else log.items[history]
            assert set(examples.own[1][examples.own[0] == row]) == set(wanted.tolist())


def test_a_batch_of_many_users_counts_more() -> None:
    """By hand: a user of thirteen events has three windows, of which each counts a third, two of three events have one
    each, which counts one. All fit into one batch of 30 tokens, so that a batch has three users on average."""
    log = log_of([13, 3, 3], 0)
    objective, windows = prepared(log, log.offsets[1:], 4, {"task": "next-item", "equal_users": True})
    assert (windows.ends - windows.starts).tolist() == [5, 5, 5, 3, 3]
    first = objective.examples(next(windows.in_order(10)), np.random.default_rng(0))
    assert objective.weight(first) == pytest.approx(2 / 3)
    assert objective.scale(first) == pytest.approx(2 / 3 / 3)
