"""Times as waves: published periods, dates exact to the second, learned phases."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from segue.layers.positions.periods import ABSOLUTE, RELATIVE, Periods, log_seconds

DAY = 86_400


def test_relative_periods_grow_by_one_ratio_from_a_second_to_four_weeks() -> None:
    """By hand: 2419200 ^ (1 / 31) is 1.606663."""
    assert len(RELATIVE) == 32
    assert RELATIVE[:4] == pytest.approx((1, 1.606663, 2.581367, 4.147388), abs=1e-6)
    assert RELATIVE[-2:] == pytest.approx((1_505_729, 2_419_200), rel=1e-6)


def test_absolute_periods_are_those_of_a_clock_and_a_calendar() -> None:
    hours = (0.25, 0.5, 1, 2, 4, 8, 16, 24, 7 * 24, 28 * 24, 365 * 24)
    assert tuple(period / 3600 for period in ABSOLUTE) == hours
    assert all(isinstance(period, int) for period in ABSOLUTE), "whole seconds, so that a remainder is exact"


def test_an_hour_of_a_day() -> None:
    """A twenty-fourth of a rotation is 15 degrees."""
    cosine, sine = Periods((DAY,))(torch.tensor([3600]))[0].tolist()
    assert (cosine, sine) == pytest.approx((0.965926, 0.258819), abs=1e-6)
    assert log_seconds(torch.tensor([3600])).item() == pytest.approx(8.188689, abs=1e-6)


def test_a_gap_of_zero_has_a_logarithm() -> None:
    assert log_seconds(torch.tensor([0, 1, -5])).tolist() == [0, 0, 0]


def test_times_are_exact_to_the_second_in_any_year() -> None:
    """In single precision, seconds since 1970 are rounded to 128: of 15 minutes that is 51 degrees."""
    periods = Periods(ABSOLUTE)
    for year in (1970, 2026, 2100):
        noon = int(datetime(year, 6, 1, 12, tzinfo=UTC).timestamp())
        waves = periods(noon + torch.arange(900))
        around = torch.arange(900).double() * (2 * math.pi / 900)
        torch.testing.assert_close(waves[:, 0].double(), around.cos(), rtol=0, atol=1e-6)
        torch.testing.assert_close(waves[:, 11].double(), around.sin(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("periods", [ABSOLUTE, RELATIVE], ids=["absolute", "relative"])
@given(seconds=st.integers(-(10**11), 10**11))
def test_waves_are_those_of_exact_arithmetic(periods: tuple[float, ...], seconds: int) -> None:
    """A period is a fraction, and so is the remainder."""
    waves = Periods(periods)(torch.tensor([seconds]))[0].tolist()
    for index, period in enumerate(periods):
        angle = 2 * math.pi * float(seconds % Fraction(period) / Fraction(period))
        assert waves[index] == pytest.approx(math.cos(angle), abs=2e-6)
        assert waves[index + len(periods)] == pytest.approx(math.sin(angle), abs=2e-6)


def test_weights_of_another_precision_leave_the_periods_as_they_are() -> None:
    """Periods in single precision would be off by more than a rotation after a year."""
    times = torch.tensor([31_536_001, 63_072_003])
    expected = Periods(RELATIVE)(times)
    assert torch.equal(Periods(RELATIVE).double().float()(times), expected)
    torch.testing.assert_close(Periods(RELATIVE).double()(times).float(), expected, rtol=0, atol=1e-6)


def test_phases_move_waves_and_their_gradient_is_right() -> None:
    periods = Periods((10, 60.5)).double()
    with torch.no_grad():
        periods.phases.copy_(torch.tensor([[0.1, -0.4], [2.0, 0.7]]))
    times = torch.tensor([0, 7, 1_700_000_123])
    angles = times[:, None].double() / torch.tensor([10, 60.5], dtype=torch.float64) * 2 * math.pi
    expected = torch.cat(((angles + periods.phases[0]).cos(), (angles + periods.phases[1]).sin()), dim=1)
    torch.testing.assert_close(periods(times), expected, rtol=0, atol=1e-6)

    def waves(phases: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.func.functional_call(periods, {"phases": phases}, (times,))
        return result

    assert torch.autograd.gradcheck(waves, (periods.phases,))
