from __future__ import annotations

import math

import pytest
import torch
from packed_users import most_chi_square, normal
from torch import Tensor, nn

from segue.layers.dropout import Dropout, byte_mask, set_generator

COUNT = 200_000
CPU = torch.device("cpu")


def seeded(share: float, seed: int = 0) -> Dropout:
    dropout = Dropout(share)
    set_generator(dropout, torch.Generator().manual_seed(seed))
    return dropout.train()


def random_bytes(count: int, seed: int) -> Tensor:
    """The bytes behind the masks: a byte is the number of thresholds 1..255 that it reaches."""
    value = torch.zeros(count, dtype=torch.int64)
    for threshold in range(1, 256):
        value += byte_mask(torch.Size([count]), threshold, CPU, torch.Generator().manual_seed(seed))
    return value


def test_bytes_are_uniform() -> None:
    values = random_bytes(102_400, seed=3)
    expected = 102_400 / 256
    counts = torch.bincount(values, minlength=256)
    assert len(counts) == 256
    assert ((counts - expected) ** 2 / expected).sum().item() < most_chi_square(256)


@pytest.mark.parametrize("position", range(8))
def test_each_byte_of_a_random_number_is_uniform(position: int) -> None:
    """One 64-bit random number gives eight bytes: the highest, with the sign bit, is as random as the lowest."""
    values = random_bytes(51_200, seed=4)[position::8]
    expected = len(values) / 64
    counts = torch.bincount(values // 4, minlength=64)
    assert ((counts - expected) ** 2 / expected).sum().item() < most_chi_square(64)


def test_neighbouring_bytes_are_independent() -> None:
    values = random_bytes(102_400, seed=5) // 16
    pairs = torch.bincount(values[:-1] * 16 + values[1:], minlength=256)
    expected = (len(values) - 1) / 256
    assert ((pairs - expected) ** 2 / expected).sum().item() < most_chi_square(256)


@pytest.mark.parametrize(("share", "of_256"), [(0.1, 26), (0.2, 51), (0.25, 64), (0.5, 128), (0.9, 230), (0.003, 1)])
def test_share_dropped_and_scale_of_the_rest(share: float, of_256: int) -> None:
    dropped_share = of_256 / 256
    output = seeded(share)(torch.ones(COUNT, dtype=torch.float64))
    zeros = int((output == 0).sum())
    assert abs(zeros - COUNT * dropped_share) < 3 * math.sqrt(COUNT * dropped_share * (1 - dropped_share))
    (scale,) = output[output != 0].unique().tolist()
    assert scale * (1 - dropped_share) == pytest.approx(1, abs=1e-15), "the expectation is unchanged"


def test_nothing_dropped_at_zero() -> None:
    x = normal(100)
    assert torch.equal(seeded(0)(x), x)


@pytest.mark.parametrize("share", [0.995, 0.999, 1 - 1e-9])
def test_any_share_below_one_keeps_something(share: float) -> None:
    """Every share in [0, 1) is a valid setting, so none may divide by zero."""
    output = seeded(share)(torch.ones(COUNT, dtype=torch.float64))
    assert torch.isfinite(output).all() and (output != 0).any()


def test_off_outside_training() -> None:
    dropout, x = seeded(0.5).eval(), normal(100)
    assert dropout(x) is x


def test_repeatable_from_its_generator_and_new_at_each_call() -> None:
    x = torch.ones(1000)
    first, second, other = seeded(0.5), seeded(0.5), seeded(0.5, seed=1)
    masks = [first(x) for _ in range(3)]
    assert all(torch.equal(mask, second(x)) for mask in masks)
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])
    assert not torch.equal(masks[0], other(x))


def test_consecutive_masks_are_independent() -> None:
    dropout, x = seeded(0.5), torch.ones(COUNT, dtype=torch.float64)
    both = int(((dropout(x) != 0) & (dropout(x) != 0)).sum())
    assert abs(both - COUNT / 4) < 3 * math.sqrt(COUNT * 3 / 16)


def test_global_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    seeded(0.5)(torch.ones(1000))
    assert torch.equal(torch.get_rng_state(), before)


def test_gradient_has_the_mask_of_its_call() -> None:
    dropout = seeded(0.5)
    x = torch.full((4, 25), 3.0, dtype=torch.float64, requires_grad=True)
    first, second = dropout(x), dropout(x)
    (gradient,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(gradient, first.detach() / 3)
    (gradient,) = torch.autograd.grad(second.sum(), x)
    assert torch.equal(gradient, second.detach() / 3)


def test_gradient_check() -> None:
    def drop(x: Tensor) -> Tensor:
        result: Tensor = seeded(0.3, seed=2)(x)
        return result

    assert torch.autograd.gradcheck(drop, (normal(5, 7).requires_grad_(),))


def test_the_input_is_unchanged() -> None:
    x = torch.ones(50)
    seeded(0.5)(x)
    assert (x == 1).all()


@pytest.mark.parametrize("count", [1, 7, 8, 9])
def test_any_number_of_elements(count: int) -> None:
    assert seeded(0.5)(torch.ones(count, 1)).shape == (count, 1)


def test_one_generator_for_every_dropout_of_a_module() -> None:
    parts = nn.Sequential(Dropout(0.1), nn.Sequential(Dropout(0.2)), nn.Dropout(0.3))
    generator = torch.Generator()
    set_generator(parts, generator)
    dropouts = [part for part in parts.modules() if isinstance(part, Dropout)]
    assert len(dropouts) == 2
    assert all(part.generator is generator for part in dropouts)
