"""The optimiser, its learning rate, and the moving average of the weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from segue.training.settings import TrainSettings

BETAS = (0.9, 0.98)


def optimiser(model: nn.Module, settings: TrainSettings) -> torch.optim.AdamW:
    """AdamW in its fused form, which is several times faster on a CPU."""
    return torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, betas=BETAS, weight_decay=settings.weight_decay, fused=True
    )


def set_learning_rate(adamw: torch.optim.AdamW, settings: TrainSettings, *, step: int, passed: float) -> None:
    """A linear warm-up, then constant; with `settings.decay`, a linear fall to 0 at the end of the planned epochs, of
    which the share `passed` is done.

    Defazio et al., Optimal Linear Decay Learning Rate Schedules and Further Refinements, 2023: linear decay is the best
    of the simple schedules. Without decay the learning rate does not depend on the number of epochs.
    """
    rise = min(1.0, (step + 1) / settings.warmup) if settings.warmup else 1.0
    fall = min(1.0, max(0.0, 1 - passed) / settings.decay) if settings.decay else 1.0
    for group in adamw.param_groups:
        group["lr"] = settings.learning_rate * rise * fall


def averaging_decay(settings: TrainSettings, step: int) -> float:
    """The decay of the moving average. It grows with the steps, so that the first weights fade soon."""
    return min(settings.averaging, (1 + step) / (10 + step))


@torch.no_grad()
def average_into(average: Sequence[Tensor], weights: Sequence[Tensor], decay: float) -> None:
    """Move the average towards the weights."""
    torch._foreach_lerp_(list(average), list(weights), 1 - decay)
