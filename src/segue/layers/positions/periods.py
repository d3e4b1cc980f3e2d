"""Times as waves: a cosine and a sine for each of some fixed periods, their phases learned, and a logarithm.

Kazemi et al., "Time2Vec: Learning a Vector Representation of Time", 2019, with periods that are chosen, as a day and a
week are, and not learned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

HOUR, DAY = 3600, 86_400
ABSOLUTE = (*(HOUR // 4 * 2**doubled for doubled in range(7)), DAY, 7 * DAY, 28 * DAY, 365 * DAY)
"""Periods of a date, in seconds: from a quarter of an hour to 16 hours, a day, a week, four weeks, a year."""


def log_spaced(count: int, shortest: float, longest: float) -> tuple[float, ...]:
    """So many periods, each longer than the one before it by the same ratio."""
    ratio = math.log(longest / shortest) / (count - 1)
    return tuple(shortest * math.exp(ratio * place) for place in range(count))


RELATIVE = log_spaced(32, 1, 28 * DAY)
"""Periods of a time that has passed: from a second to four weeks."""


class Periods(nn.Module):
    """Seconds [T] → cos(2πt/p + φ) of each period p, then sin(2πt/p + φ'), the phases learned [T, 2 * periods].

    A date is some billions of seconds, which single precision knows to a minute or two: the remainder is taken first,
    of whole periods in whole seconds and of others in double precision.
    """

    def __init__(self, periods: Sequence[float]) -> None:
        super().__init__()
        self.periods = tuple(periods)  # no buffer: that would become single precision with the model's weights
        self.phases = nn.Parameter(torch.zeros(2, len(self.periods)))

    @property
    def width(self) -> int:
        """Features of a time."""
        return self.phases.numel()

    def forward(self, seconds: Tensor) -> Tensor:
        whole = all(isinstance(period, int) for period in self.periods)
        kind = torch.int64 if whole else torch.float64
        periods = torch.tensor(self.periods, dtype=kind, device=seconds.device)
        passed = torch.remainder(seconds.to(kind)[:, None], periods)  # [T, periods]: since the last full turn
        angles = (passed.to(torch.float64) * (2 * math.pi / periods.to(torch.float64))).to(self.phases.dtype)
        cosines, sines = self.phases
        return torch.cat(((angles + cosines).cos(), (angles + sines).sin()), dim=1)


def log_seconds(seconds: Tensor) -> Tensor:
    """The natural logarithm of seconds [T] in double precision, of less than one second 0."""
    return seconds.clamp(min=1).to(torch.float64).log()
