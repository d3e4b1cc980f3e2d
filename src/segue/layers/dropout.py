"""Dropout from random bytes: one 64-bit random number decides for eight elements, several times faster than one each.

The dropout rate is rounded to 1/256, and kept elements are scaled by exactly its inverse, so the expectation is exact.
The generator is the trainer's, which saves and restores it.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

STEPS = 256


def byte_mask(shape: torch.Size, dropped: int, device: torch.device, generator: torch.Generator | None) -> Tensor:
    """A boolean mask, True with probability 1 - dropped / 256."""
    count = shape.numel()
    words = torch.empty((count + 7) // 8, dtype=torch.int64)  # on the CPU, like the generator
    words.random_(-(2**63), None, generator=generator)  # by default the top bit would never be set
    return (words.view(torch.uint8)[:count].to(device) >= dropped).view(shape)


class _Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return (x * mask).mul_(scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return (gradients[0] * mask).mul_(ctx.scale), None, None


class Dropout(nn.Module):
    """In training, zero a share of the elements and scale the rest; otherwise the identity."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.dropped = min(round(share * STEPS), STEPS - 1)  # never all
        self.generator: torch.Generator | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.dropped == 0:
            return x
        mask = byte_mask(x.shape, self.dropped, x.device, self.generator)
        masked: Tensor = _Masked.apply(x, mask, STEPS / (STEPS - self.dropped))  # type: ignore[no-untyped-call]
        return masked


@runtime_checkable
class UsesGenerator(Protocol):
    """A module that uses random numbers in training."""

    generator: torch.Generator | None


def set_generator(module: nn.Module, generator: torch.Generator) -> None:
    """Let all submodules that use random numbers in training take them from `generator`."""
    for part in module.modules():
        if isinstance(part, UsesGenerator):
            part.generator = generator
