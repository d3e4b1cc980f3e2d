from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from segue.errors import SettingsError
from segue.kinds import decode
from segue.training.optimiser import average_into, averaging_decay, optimiser, set_learning_rate
from segue.training.settings import TrainSettings


def settings_of(**options: Any) -> TrainSettings:
    return msgspec.convert(options, TrainSettings)


def step_sizes(steps: int, **options: Any) -> list[float]:
    settings = settings_of(**options)
    adamw, sizes = optimiser(nn.Linear(1, 1), settings), []
    for step in range(steps):
        set_learning_rate(adamw, settings, step=step, passed=step / steps)
        sizes.append(adamw.param_groups[0]["lr"])
    return sizes


def test_the_learning_rate_rises_over_the_warm_up_and_stays() -> None:
    assert step_sizes(7, learning_rate=0.8, warmup=4) == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8, 0.8])
    assert step_sizes(2, learning_rate=0.8, warmup=0) == [0.8, 0.8]


def test_with_a_decay_the_learning_rate_falls_to_zero_over_the_last_share_of_training() -> None:
    assert step_sizes(5, learning_rate=0.8, warmup=0, decay=1.0) == pytest.approx([0.8, 0.64, 0.48, 0.32, 0.16])
    assert step_sizes(5, learning_rate=0.8, warmup=0, decay=0.4) == pytest.approx([0.8, 0.8, 0.8, 0.8, 0.4])
    assert step_sizes(5, learning_rate=0.8, warmup=2, decay=1.0) == pytest.approx([0.4, 0.64, 0.48, 0.32, 0.16])


def test_past_the_planned_end_the_learning_rate_is_zero() -> None:
    settings = settings_of(decay=0.5)
    adamw = optimiser(nn.Linear(1, 1), settings)
    set_learning_rate(adamw, settings, step=1000, passed=1.25)
    assert adamw.param_groups[0]["lr"] == 0


def test_two_steps_of_adamw_by_hand() -> None:
    """Bias-corrected moments with .9 and .98, and decoupled weight decay."""
    settings = settings_of(learning_rate=0.1, weight_decay=0.5, warmup=0)
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, 2.0)
    adamw, weight, first, second = optimiser(layer, settings), 2.0, 0.0, 0.0
    for step, gradient in enumerate((3.0, -1.0), start=1):
        layer.weight.grad = torch.full_like(layer.weight, gradient)
        adamw.step()
        first, second = 0.9 * first + 0.1 * gradient, 0.98 * second + 0.02 * gradient**2
        weight -= 0.1 * 0.5 * weight
        weight -= 0.1 * (first / (1 - 0.9**step)) / (math.sqrt(second / (1 - 0.98**step)) + 1e-8)
        assert layer.weight.item() == pytest.approx(weight, rel=1e-6)


def test_the_decay_of_the_average_starts_small() -> None:
    """The decay is (1 + step) / (10 + step), at most the setting: .1, 2/11, then .2."""
    average, settings = [torch.zeros(1)], settings_of(averaging=0.2)
    expected = 0.0
    for step, (weight, decay) in enumerate([(10.0, 0.1), (20.0, 2 / 11), (30.0, 0.2), (40.0, 0.2)]):
        average_into(average, [torch.full((1,), weight)], averaging_decay(settings, step))
        expected = decay * expected + (1 - decay) * weight
        assert average[0].item() == pytest.approx(expected, rel=1e-6)


def test_an_average_with_decay_zero_is_the_weights_bit_for_bit() -> None:
    generator = torch.Generator()
    average, weights = torch.randn(50, generator=generator), 1e3 * torch.randn(50, generator=generator)
    average_into([average], [weights], averaging_decay(settings_of(averaging=0.0), 7))
    assert torch.equal(average, weights) and average.data_ptr() != weights.data_ptr()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("epochs", 0),
        ("patience", 0),
        ("tokens", 1),
        ("warmup", -1),
        ("seed", -1),
        ("threads", -1),
        ("learning_rate", 0.0),
        ("learning_rate", -1e-3),
        ("learning_rate", math.nan),
        ("learning_rate", math.inf),
        ("weight_decay", -0.1),
        ("weight_decay", math.nan),
        ("decay", -0.1),
        ("decay", 1.5),
        ("decay", math.nan),
        ("averaging", 1.0),
        ("averaging", -0.1),
        ("averaging", math.nan),
    ],
)
def test_invalid_settings_are_refused_by_name(key: str, value: float) -> None:
    with pytest.raises(SettingsError, match=rf"train\.{key}: expected .*, got {value}"):
        decode({key: value}, TrainSettings, path="train")
