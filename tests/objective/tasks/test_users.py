"""Users beyond a batch: all have the same weight over an epoch, and none of their positives is a negative."""

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


def objective_and_windows(
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
    """For any length of its history and any number of windows and batches: the weights of the gradients of its queries
    have the same sum."""
    assume((np.diff(log.offsets) >= 2).any())
    objective, windows = objective_and_windows(log, log.offsets[1:], stride, {"task": task, "equal_users": True})
    totals: defaultdict[int, float] = defaultdict(float)
    for batch in windows.batches(TOKENS, np.random.default_rng(3)):
        examples = objective.examples(batch, np.random.default_rng(4))
        if not len(examples.targets):
            continue
        assert examples.inputs.users is not None
        shares = shares_of_queries(objective, examples) * objective.scale(examples)
        for user, share in zip(examples.inputs.users[examples.users], shares, strict=True):
            totals[int(user)] += float(share)
    assume(totals)
    assert list(totals.values()) == pytest.approx([next(iter(totals.values()))] * len(totals), rel=1e-5)


def shares_of_queries(objective: Objective, examples: Examples) -> np.ndarray:
    """The share of each query in the loss of a batch, as passed to the loss [M]."""
    calls: list[Tensor] = []

    def record(states: Tensor, vectors: Tensor, positions: Tensor, weights: Tensor) -> Tensor:  # noqa: ARG001
        calls.append(weights / weights.sum())
        return states.sum()

    states = torch.ones(len(examples.inputs.items), 2, dtype=torch.float64)
    with patch("segue.objective.losses.catalogue.full_softmax", record):
        objective.loss(MODEL, states, examples, torch.Generator())
    (shares,) = calls
    return shares.numpy()


@pytest.mark.parametrize("task", TASKS)
@laws(max_examples=25, deadline=None)
@given(log=logs, stride=st.none() | st.integers(1, 4), held_out=st.integers(0, 5), only_buys=st.booleans())
def test_own_positives_are_those_of_the_whole_training_history(
    task: str, log: Sequences, stride: int | None, held_out: int, only_buys: bool
) -> None:
    """Also those of an older window, or of none; but none from the cut on."""
    ends = np.maximum(log.offsets[:-1], log.offsets[1:] - held_out)
    assume((ends - log.offsets[:-1] >= 2).any())
    positive = [{"kind": "buy"}] if only_buys else []
    loss = {"loss": "bce", "sampler": "uniform", "sampler__negatives": 2}
    objective, windows = objective_and_windows(log, ends, stride, {"task": task, "task__positive": positive, **loss})
    assert log.kinds is not None
    for batch in windows.batches(TOKENS, np.random.default_rng(3)):
        examples = objective.examples(batch, np.random.default_rng(4))
        assert examples.own is not None and examples.inputs.users is not None
        for row, user in enumerate(examples.inputs.users):
            history = slice(log.offsets[user], ends[user])
            expected = log.items[history][log.kinds[history] == 1] if only_buys else log.items[history]
            assert set(examples.own[1][examples.own[0] == row]) == set(expected.tolist())


def test_a_batch_of_many_users_counts_more() -> None:
    """By hand: a user of thirteen events has three windows, of which each counts a third, two of three events have one
    each, which counts one. All fit into one batch of 30 tokens, so that a batch has three users on average."""
    log = log_of([13, 3, 3], 0)
    objective, windows = objective_and_windows(log, log.offsets[1:], 4, {"task": "next-item", "equal_users": True})
    assert (windows.ends - windows.starts).tolist() == [5, 5, 5, 3, 3]
    first = objective.examples(next(windows.in_order(10)), np.random.default_rng(0))
    assert objective.weight(first) == pytest.approx(2 / 3)
    assert objective.scale(first) == pytest.approx(2 / 3 / 3)
