"""A clock that moves by a second at each step of training, so that time limits and timings are exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from segue.objective.objective import Objective
from segue.runs import make, plan
from segue.training import loop, timing


class StepClock:
    """Stands for the module `time`."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.step = 1.0
        """Seconds of a step of training. Everything else takes no time."""

    def perf_counter(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


def step_clock(monkeypatch: pytest.MonkeyPatch) -> StepClock:
    """Give training, its timing and its plan such a clock."""
    clock, loss_of = StepClock(), Objective.loss

    def loss(self: Objective, *arguments: Any) -> torch.Tensor:
        clock.now += clock.step
        return loss_of(self, *arguments)

    monkeypatch.setattr(Objective, "loss", loss)
    for module in (loop, timing, plan, make):
        monkeypatch.setattr(module, "time", clock)
    return clock
