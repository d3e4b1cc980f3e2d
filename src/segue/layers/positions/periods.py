"""Features of times: a cosine and a sine for each of some fixed periods, with learned phases, and a logarithm.

Kazemi et al., "Time2Vec: Learning a Vector Representation of Time", 2019, but with fixed periods, such as a day and a
week, instead of learned ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

HOUR, DAY = 3600, 86_400
ABSOLUTE = (*(HOUR // 4 * 2**power for power in range(7)), DAY, 7 * DAY, 28 * DAY, 365 * DAY)
"""Periods of a date, in seconds: from a quarter of an hour to 16 hours, a day, a week, four weeks, a year."""

RELATIVE = tuple(math.exp(math.log(28 * DAY) / 31 * index) for index in range(32))
"""Periods of an elapsed time: from a second to four weeks, each longer than the one before it by the same ratio."""


class Periods(nn.Module):
    """Seconds [T] → cos(2πt/p + φ) for each period p, then sin(2πt/p + φ'), with learned phases [T, 2 * periods].

    float32 resolves a date, billions of seconds, to a minute or two only. The remainder is therefore taken first: in
    int64 if all periods are whole seconds, in float64 otherwise.
    """

    def __init__(self, periods: Sequence[float]) -> None:
        super().__init__()
        self.periods = tuple(periods)  # no buffer, which would be converted to float32 with the model
        self.phases = nn.Parameter(torch.zeros(2, len(self.periods)))

    @property
    def width(self) -> int:
        """Features of a time."""
        return self.phases.numel()

    def forward(self, seconds: Tensor) -> Tensor:
        whole = all(isinstance(period, int) for period in self.periods)
        dtype = torch.int64 if whole else torch.float64
        periods = torch.tensor(self.periods, dtype=dtype, device=seconds.device)
        remainder = torch.remainder(seconds.to(dtype)[:, None], periods)  # [T, periods]
        angles = (remainder.to(torch.float64) * (2 * math.pi / periods.to(torch.float64))).to(self.phases.dtype)
        cosines, sines = self.phases
        return torch.cat(((angles + cosines).cos(), (angles + sines).sin()), dim=1)


def log_seconds(seconds: Tensor) -> Tensor:
    """The natural logarithm of seconds [T] in float64; 0 below one second."""
    return seconds.clamp(min=1).to(torch.float64).log()
