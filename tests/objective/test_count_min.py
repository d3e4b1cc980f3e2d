"""Counting in bounded memory: never too little, seldom much too much."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from segue.objective.samplers.count_min import CountMin

EPSILON, DELTA = 0.01, 0.05


def stream(n_items: int, count: int, seed: int, power: float) -> torch.Tensor:
    """Items 1 to n, the popular ones far more often than the others."""
    rng = np.random.default_rng(seed)
    weight = 1 / np.arange(1, n_items + 1) ** power
    return torch.from_numpy(rng.permutation(n_items)[rng.choice(n_items, count, p=weight / weight.sum())] + 1)


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_estimates_lie_within_their_bound(power: float, seed: int) -> None:
    """5,000 items on 272 counters a row: above the true count by over epsilon · N at most once in twenty."""
    items, sketch = stream(5000, 40_000, seed, power), CountMin(epsilon=EPSILON, delta=DELTA)
    for batch in torch.split(items, 1234):
        sketch.add(batch)
    counts = torch.bincount(items, minlength=5001)[1:]
    above = sketch.estimate(torch.arange(1, 5001)) - counts
    assert above.min() >= 0
    assert (above > EPSILON * len(items)).double().mean() <= DELTA
    assert sketch.total == len(items)


def test_the_bound_is_what_the_size_is_chosen_for() -> None:
    sketch = CountMin(epsilon=EPSILON, delta=DELTA)
    assert sketch.counts.shape == (3, 272), "ln 20 = 2.996 rows of e / .01 = 271.8 counters"


@given(st.lists(st.lists(st.integers(1, 2**31 - 2), max_size=12), max_size=5))
def test_never_too_little_and_exact_where_there_is_room(batches: list[list[int]]) -> None:
    small, roomy = CountMin(epsilon=0.7, delta=0.5), CountMin(epsilon=1e-5, delta=1e-3)
    every = [item for batch in batches for item in batch]
    for batch in batches:
        for sketch in (small, roomy):
            sketch.add(torch.tensor(batch, dtype=torch.int64))
    distinct = sorted(set(every))
    wanted, true = torch.tensor(distinct, dtype=torch.int64), [every.count(item) for item in distinct]
    assert all(found >= count for found, count in zip(small.estimate(wanted).tolist(), true, strict=True))
    assert roomy.estimate(wanted).tolist() == true


def test_what_was_counted_is_all_that_is_kept() -> None:
    """Another process, with the counts copied into it, goes on as this one."""
    one, other = (CountMin(epsilon=EPSILON, delta=DELTA) for _ in range(2))
    one.add(stream(50, 500, 1, 1.0))
    other.counts.copy_(one.counts)
    assert torch.equal(one.estimate(torch.arange(60)), other.estimate(torch.arange(60)))
    assert other.total == 500
