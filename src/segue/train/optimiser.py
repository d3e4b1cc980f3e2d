"""The optimiser, its step size, and the running average of the weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from segue.train.settings import TrainSettings

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


def set_step_size(adamw: torch.optim.AdamW, settings: TrainSettings, step: int) -> None:
    """A linear rise over the warm-up and then constant: it must not depend on how many epochs are planned."""
    rise = min(1.0, (step + 1) / settings.warmup) if settings.warmup else 1.0
    for group in adamw.param_groups:
        group["lr"] = settings.learning_rate * rise


def memory_at(settings: TrainSettings, step: int) -> float:
    """How much the average keeps of itself. It grows with the steps, so that the first weights fade soon."""
    return min(settings.averaging, (1 + step) / (10 + step))


@torch.no_grad()
def average_into(average: Sequence[Tensor], weights: Sequence[Tensor], settings: TrainSettings, step: int) -> None:
    """Move the average towards the weights."""
    torch._foreach_lerp_(list(average), list(weights), 1 - memory_at(settings, step))
