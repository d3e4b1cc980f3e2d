"""What holds for every sampler, and each one's own numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch

from segue.objective.sampler import PopularitySampler, Sampler, UniformSampler
from segue.objective.settings import ObjectiveSettings

COUNTS = np.array([0, 8, 4, 1, 20, 0, 2, 11])
N_ITEMS = 7

SAMPLERS: dict[str, tuple[str, Callable[[], Sampler]]] = {
    "uniform": ("uniform", lambda: UniformSampler(N_ITEMS)),
    "popularity": ("popularity", lambda: PopularitySampler(COUNTS, 1.0)),
    "popularity, flattened": ("popularity", lambda: PopularitySampler(COUNTS, 0.75)),
    "popularity, power 0": ("popularity", lambda: PopularitySampler(COUNTS, 0.0)),
}

every_sampler = pytest.mark.parametrize("sampler", [make() for _, make in SAMPLERS.values()], ids=list(SAMPLERS))


def test_every_sampler_is_held_to_this_contract() -> None:
    named = set(get_args(get_type_hints(ObjectiveSettings)["sampler"])) - {"none"}
    assert named == {name for name, _ in SAMPLERS.values()}
    assert len(named) == 2


def drawn(sampler: Sampler, count: int, seed: int = 0) -> torch.Tensor:
    return sampler.draw(count, torch.Generator().manual_seed(seed)).items


@every_sampler
def test_probabilities_of_the_catalogue_add_up_to_one(sampler: Sampler) -> None:
    probabilities = sampler.log_q(torch.arange(1, N_ITEMS + 1)).double().exp()
    assert probabilities.sum().item() == pytest.approx(1, abs=1e-6)


@every_sampler
def test_draws_are_items_with_their_log_probability(sampler: Sampler) -> None:
    negatives = sampler.draw(5000, torch.Generator().manual_seed(1))
    assert negatives.items.dtype == torch.int64 and negatives.items.shape == negatives.log_q.shape == (5000,)
    assert negatives.items.min() >= 1 and negatives.items.max() <= N_ITEMS
    assert torch.equal(negatives.log_q, sampler.log_q(negatives.items))
    assert torch.isfinite(negatives.log_q).all() and negatives.log_q.dtype == torch.float32


@every_sampler
def test_draws_are_as_frequent_as_said(sampler: Sampler) -> None:
    count = 50_000
    found = torch.bincount(drawn(sampler, count), minlength=N_ITEMS + 1)[1:].double()
    expected = count * sampler.log_q(torch.arange(1, N_ITEMS + 1)).double().exp()
    possible = expected > 0
    assert (found[~possible] == 0).all()
    chi_square = ((found - expected)[possible] ** 2 / expected[possible]).sum().item()
    freedom = int(possible.sum()) - 1
    assert chi_square < freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3


@every_sampler
def test_consecutive_draws_are_independent(sampler: Sampler) -> None:
    """Negatives collide with a given item as often as its probability says, also twice in a row."""
    first = drawn(sampler, 50_000)
    q = float(sampler.log_q(torch.tensor([4])).exp())
    twice = int(((first[:-1] == 4) & (first[1:] == 4)).sum())
    assert abs(twice - 49_999 * q * q) < 4 * math.sqrt(50_000 * q * q)


@every_sampler
def test_draws_come_from_the_generator_and_from_nowhere_else(sampler: Sampler) -> None:
    before = torch.get_rng_state()
    generator = torch.Generator().manual_seed(7)
    first, second = sampler.draw(100, generator).items, sampler.draw(100, generator).items
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, drawn(sampler, 100, seed=7))
    assert not torch.equal(first, second), "the next batch has other negatives"
    assert not torch.equal(first, drawn(sampler, 100, seed=8))


@pytest.mark.parametrize(
    ("power", "expected"), [(0.75, [0.554070, 0.329452, 0.116479]), (1.0, [0.615385, 0.307692, 0.076923])]
)
def test_popularity_of_g46(power: float, expected: list[float]) -> None:
    sampler = PopularitySampler(np.array([0, 8, 4, 1]), power)
    assert sampler.log_q(torch.tensor([1, 2, 3])).exp().tolist() == pytest.approx(expected, abs=1e-6)


def test_popularity_never_draws_padding_nor_what_was_not_trained_on() -> None:
    """Also where padding has a count, and at the very ends of the catalogue."""
    sampler = PopularitySampler(np.array([9, 0, 3, 0, 5, 0]), 0.5)
    assert set(drawn(sampler, 5000).tolist()) == {2, 4}


def test_uniform_reaches_both_ends() -> None:
    assert set(drawn(UniformSampler(3), 200).tolist()) == {1, 2, 3}
    assert UniformSampler(3).log_q(torch.tensor([1, 3])).tolist() == pytest.approx([-math.log(3)] * 2, abs=1e-6)
