"""What was read, as whatever continues it looks at it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from segue.layers.packed import PackedBatch, pad


@dataclass(frozen=True, slots=True, eq=False)
class EncodedHistories:
    """Histories, encoded and padded on the right."""

    states: Tensor  # [B, N, W]
    lengths: Tensor  # [B] int64, each at least 1
    may_attend: Tensor | None  # [B, 1, 1, N]: True at events, False at padding; None where there is no padding

    @staticmethod
    def of(states: Tensor, batch: PackedBatch) -> EncodedHistories:
        """From packed states [T, W]."""
        return EncodedHistories(pad(states, batch), batch.lengths, batch.may_attend)

    @property
    def newest(self) -> Tensor:
        """Each history's last state [B, W]."""
        rows = torch.arange(self.lengths.shape[0], device=self.lengths.device)
        return self.states[rows, self.lengths - 1]

    def rows(self, chosen: Tensor) -> EncodedHistories:
        """Some of the histories, some perhaps more than once."""
        looks = None if self.may_attend is None else self.may_attend[chosen]
        return EncodedHistories(self.states[chosen], self.lengths[chosen], looks)


class Decoder(Protocol):
    """Continues what was read, an item at a time. What it keeps of the steps before has a row a plan."""

    def __call__(self, inputs: Tensor, read: EncodedHistories) -> Tensor:
        """All steps at once: the states after each of the inputs [B, M, D] → [B, M, D]; none sees a later one."""
        ...

    def begin(self, read: EncodedHistories) -> Any:
        """What is kept before the first step."""
        ...

    def step(self, newest: Tensor, read: EncodedHistories, kept: Any) -> tuple[Tensor, Any]:
        """One step more: the newest input [B, D] → its state [B, D], and what is kept now."""
        ...

    def rows(self, kept: Any, chosen: Tensor) -> Any:
        """What is kept of some of the plans, some perhaps more than once."""
        ...

    def attention_weights(self, inputs: Tensor, read: EncodedHistories) -> list[tuple[Tensor | None, Tensor]]:
        """Where each step, whose inputs [B, M, D] are given, looks in each layer: back at the steps [B, heads, M, M],
        None where steps do not look at each other, and across at what was read [B, heads, M, N]."""
        ...
