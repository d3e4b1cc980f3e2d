"""The optimiser, its step size, and the running average of the weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from segue.training.settings import TrainSettings

BETAS = (0.9, 0.98)


def optimiser(model: nn.Module, settings: TrainSettings) -> torch.optim.AdamW:
    """AdamW in its fused form, which is several times faster on a CPU."""
    return torch.optim.AdamW(
        model.parameters(),
        lr=settings.learning_rate,
        betas=BETAS,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def set_step_size(adamw: torch.optim.AdamW, settings: TrainSettings, *, step: int, passed: float) -> None:
    """A linear rise over the warm-up, then constant, then with `settings.decay` a linear fall to nothing at the end of
    the epochs that are planned, of which the share `passed` is over.

    Defazio et al., Optimal Linear Decay Learning Rate Schedules and Further Refinements, 2023: of the simple schedules
    the linear fall is the best. Without a fall the step size does not depend on how many epochs are planned.
    """
    rise = min(1.0, (step + 1) / settings.warmup) if settings.warmup else 1.0
    fall = min(1.0, max(0.0, 1 - passed) / settings.decay) if settings.decay else 1.0
    for group in adamw.param_groups:
        group["lr"] = settings.learning_rate * rise * fall


def memory_at(settings: TrainSettings, step: int) -> float:
    """How much the average keeps of itself. It grows with the steps, so that the first weights fade soon."""
    return min(settings.averaging, (1 + step) / (10 + step))


@torch.no_grad()
def average_into(average: Sequence[Tensor], weights: Sequence[Tensor], settings: TrainSettings, step: int) -> None:
    """Move the average towards the weights."""
    torch._foreach_lerp_(list(average), list(weights), 1 - memory_at(settings, step))
