"""What holds for every sampler, and the numbers of each."""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from segue.kinds import variants_of
from segue.objective.samplers import AnySamplerSettings
from segue.objective.samplers import samplers as room
from segue.objective.samplers.samplers import (
    InBatchSampler,
    MixedSampler,
    PopularitySampler,
    Sampler,
    TargetSampler,
    UniformSampler,
)

COUNTS = np.array([0, 8, 4, 1, 20, 0, 2, 11])
N_ITEMS = 7
PRESENT = torch.tensor([4, 4, 0, 8, 1, 6, 4, 0, 6, 7, 4])  # with padding and a mask token
SOME = torch.tensor([1, 4, 6])
CATALOGUE = torch.arange(1, N_ITEMS + 1)


def mixed(share: float, candidates: Tensor | None = None) -> MixedSampler:
    return MixedSampler(share, InBatchSampler(N_ITEMS), UniformSampler(N_ITEMS, candidates))


def target_sampler(*batches: Tensor, n_items: int = N_ITEMS) -> TargetSampler:
    sampler = TargetSampler(n_items)
    for batch in batches:
        sampler.observe(batch, batch)
    return sampler


# Each with its probabilities of the items 1 to 7, from the definition: COUNTS to a power, four distinct items present,
# which are eight with repeats.
SAMPLERS: dict[str, tuple[Sampler, list[float]]] = {
    "uniform": (UniformSampler(N_ITEMS), [1 / 7] * 7),
    "uniform, of some": (UniformSampler(N_ITEMS, SOME), [1 / 3, 0, 0, 1 / 3, 0, 1 / 3, 0]),
    "popularity": (PopularitySampler(COUNTS, 1.0), [8 / 46, 4 / 46, 1 / 46, 20 / 46, 0, 2 / 46, 11 / 46]),
    "popularity, flattened": (
        PopularitySampler(COUNTS, 0.5),
        [part / 15.031402 for part in (2.828427, 2, 1, 4.472136, 0, 1.414214, 3.316625)],
    ),
    "popularity, power 0": (PopularitySampler(COUNTS, 0.0), [1 / 6] * 4 + [0] + [1 / 6] * 2),
    "in-batch": (InBatchSampler(N_ITEMS), [1 / 4, 0, 0, 1 / 4, 0, 1 / 4, 1 / 4]),
    "mixed": (
        mixed(0.3),
        [0.175, 0.1, 0.1, 0.175, 0.1, 0.175, 0.175],
    ),
    "mixed, all of it in-batch": (
        mixed(1.0),
        [1 / 4, 0, 0, 1 / 4, 0, 1 / 4, 1 / 4],
    ),
    "mixed, of some": (
        mixed(0.4, SOME),
        [0.3, 0, 0, 0.3, 0, 0.3, 0.1],
    ),
    "mixed, nothing in-batch": (mixed(0.0), [1 / 7] * 7),
    "targets": (target_sampler(PRESENT, PRESENT), [1 / 8, 0, 0, 4 / 8, 0, 2 / 8, 1 / 8]),
    "targets+uniform": (
        MixedSampler(0.3, target_sampler(PRESENT), UniformSampler(N_ITEMS)),
        [0.1 + 0.3 * part / 8 for part in (1, 0, 0, 4, 0, 2, 1)],
    ),
}

every_sampler = pytest.mark.parametrize("sampler", [sampler for sampler, _ in SAMPLERS.values()], ids=list(SAMPLERS))


def test_this_contract_covers_every_sampler() -> None:
    """Every one there is, and every one that settings can name."""
    classes = {
        cls for _, cls in inspect.getmembers(room, inspect.isclass) if hasattr(cls, "sample") and cls is not Sampler
    }
    assert classes == {type(sampler) for sampler, _ in SAMPLERS.values()}
    assert len(classes) == 5
    assert set(variants_of(AnySamplerSettings)) - {"none"} <= set(SAMPLERS)


def samples_of(sampler: Sampler, count: int, seed: int = 0) -> Tensor:
    return sampler.sample(count, torch.Generator().manual_seed(seed), PRESENT)


def bound(freedom: int) -> float:
    """The chi-square that one in a thousand exceeds (Wilson and Hilferty)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize("name", SAMPLERS)
def test_probabilities_are_those_of_the_definition(name: str) -> None:
    sampler, expected = SAMPLERS[name]
    log_q = sampler.log_q(CATALOGUE, PRESENT)
    assert log_q.exp().tolist() == pytest.approx(expected, abs=1e-6)
    assert log_q.double().exp().sum().item() == pytest.approx(1, abs=1e-6)
    assert log_q.dtype == torch.float32


@every_sampler
def test_samples_are_items_with_their_log_probability(sampler: Sampler) -> None:
    items = sampler.sample(5000, torch.Generator().manual_seed(1), PRESENT)
    log_q = sampler.log_q(items, PRESENT)
    assert items.dtype == torch.int64 and items.shape == log_q.shape == (5000,)
    assert items.min() >= 1 and items.max() <= N_ITEMS
    assert torch.isfinite(log_q).all() and log_q.dtype == torch.float32
    assert torch.equal(sampler.log_q(items.view(50, 100), PRESENT), log_q.view(50, 100))


@every_sampler
def test_samples_follow_the_stated_probabilities(sampler: Sampler) -> None:
    count = 50_000
    counts = torch.bincount(samples_of(sampler, count), minlength=N_ITEMS + 1)[1:].double()
    expected = count * sampler.log_q(CATALOGUE, PRESENT).double().exp()
    possible = expected > 0
    assert (counts[~possible] == 0).all()
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum().item()
    assert chi_square < bound(int(possible.sum()) - 1)


@every_sampler
def test_any_part_of_the_samples_has_the_distribution_of_the_whole(sampler: Sampler) -> None:
    """Rows of [M, K] are parts of one sample: a sampler that began with its in-batch part would favour the first."""
    count = 20_000
    q = sampler.log_q(CATALOGUE, PRESENT).double().exp()
    for part in samples_of(sampler, 2 * count).view(2, count):
        counts = torch.bincount(part, minlength=N_ITEMS + 1)[1:].double()
        possible = q > 0
        chi_square = ((counts - count * q)[possible] ** 2 / (count * q)[possible]).sum().item()
        assert chi_square < bound(int(possible.sum()) - 1)


@every_sampler
def test_consecutive_samples_are_independent(sampler: Sampler) -> None:
    """Negatives collide with a given item as often as its probability says, also twice in a row."""
    first = samples_of(sampler, 50_000)
    q = float(sampler.log_q(torch.tensor([4]), PRESENT).exp())
    repeats = int(((first[:-1] == 4) & (first[1:] == 4)).sum())
    assert abs(repeats - 49_999 * q * q) < 4 * math.sqrt(50_000 * q * q)


@every_sampler
def test_samples_depend_on_the_generator_alone(sampler: Sampler) -> None:
    before = torch.get_rng_state()
    generator = torch.Generator().manual_seed(7)
    first, second = (sampler.sample(100, generator, PRESENT) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, samples_of(sampler, 100, seed=7))
    assert not torch.equal(first, second), "the next batch has other negatives"
    assert not torch.equal(first, samples_of(sampler, 100, seed=8))


@pytest.mark.parametrize(
    ("power", "expected"), [(0.75, [0.554070, 0.329452, 0.116479]), (1.0, [0.615385, 0.307692, 0.076923])]
)
def test_popularity_of_g46(power: float, expected: list[float]) -> None:
    sampler = PopularitySampler(np.array([0, 8, 4, 1]), power)
    assert sampler.log_q(torch.tensor([1, 2, 3]), PRESENT).exp().tolist() == pytest.approx(expected, abs=1e-6)


def test_popularity_samples_neither_padding_nor_untrained_items() -> None:
    """Also if padding has a count, and at both ends of the catalogue."""
    sampler = PopularitySampler(np.array([9, 0, 3, 0, 5, 0]), 0.5)
    assert set(samples_of(sampler, 5000).tolist()) == {2, 4}


def test_uniform_reaches_both_ends() -> None:
    assert set(samples_of(UniformSampler(3), 200).tolist()) == {1, 2, 3}
    assert UniformSampler(3).log_q(torch.tensor([1, 3]), PRESENT).tolist() == pytest.approx(
        [-math.log(3)] * 2, abs=1e-6
    )


def test_batch_of_g52() -> None:
    """Rows [10, 20, 30] and [20, 50], padded: 20 is one of four and not two of five."""
    present = torch.tensor([10, 20, 30, 0, 20, 50, 0, 0])
    sampler = InBatchSampler(60)
    candidates = torch.tensor([10, 20, 30, 50, 40])
    assert sampler.log_q(candidates, present).exp().tolist() == pytest.approx([0.25, 0.25, 0.25, 0.25, 0])
    items = sampler.sample(40_000, torch.Generator().manual_seed(0), present)
    frequencies = torch.bincount(items, minlength=61)[candidates].double() / 40_000
    assert frequencies.tolist() == pytest.approx([0.25, 0.25, 0.25, 0.25, 0], abs=0.01)


def test_in_batch_samples_more_than_there_are_items() -> None:
    sampler, present = InBatchSampler(9), torch.tensor([10, 3, 3, 0])
    items = sampler.sample(50, torch.Generator().manual_seed(0), present)
    assert set(items.tolist()) == {3} and (sampler.log_q(items, present) == 0).all()


@pytest.mark.parametrize(
    "sampler", [InBatchSampler(9), MixedSampler(0.5, InBatchSampler(9), UniformSampler(9))], ids=["in-batch", "mixed"]
)
def test_each_batch_has_its_own_probabilities(sampler: Sampler) -> None:
    """Nothing is cached from the batch before."""
    candidates = torch.tensor([1, 5])
    first = sampler.log_q(candidates, torch.tensor([1, 2, 3])).tolist()
    sampler.sample(10, torch.Generator(), torch.tensor([5, 6]))
    assert sampler.log_q(candidates, torch.tensor([1, 2, 3])).tolist() == first
    assert sampler.log_q(candidates, torch.tensor([5, 6])).tolist() != first


@pytest.mark.parametrize("share", [None, 0.25], ids=["answers", "answers+uniform"])
def test_answers_of_g46_in_the_proportion_of_all_answers_so_far(share: float | None) -> None:
    """Items 1, 2 and 3 came 8, 4 and 1 times in several batches, although the last has only one of them."""
    batches = torch.split(torch.tensor([1] * 8 + [2] * 4 + [3]), 5)
    counting, candidates = target_sampler(*batches, n_items=100), torch.tensor([1, 2, 3, 4])
    expected = [0.615385, 0.307692, 0.076923, 0.0]
    sampler: Sampler = counting
    if share is not None:
        sampler = MixedSampler(share, counting, UniformSampler(100))
        expected = [share * part + (1 - share) / 100 for part in expected]
    assert sampler.log_q(candidates, batches[-1]).exp().tolist() == pytest.approx(expected, abs=1e-6)


def test_answers_are_sampled_from_their_batch_and_counted_across_batches() -> None:
    sampler = target_sampler(torch.tensor([1, 1, 2, 3]), n_items=9)
    before = sampler.log_q(CATALOGUE, PRESENT)
    samples = sampler.sample(50, torch.Generator().manual_seed(0), torch.tensor([3, 2]))
    assert set(samples.tolist()) == {2, 3}
    assert torch.equal(sampler.log_q(CATALOGUE, PRESENT), before)
