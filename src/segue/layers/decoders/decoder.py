"""Encoded histories, and the interface of the decoders that continue them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from segue.layers.packed import PackedBatch, pad


@dataclass(frozen=True, slots=True, eq=False)
class EncodedHistories:
    """The states of histories, padded on the right."""

    states: Tensor  # [B, N, W]
    lengths: Tensor  # [B] int64, each at least 1
    may_attend: Tensor | None  # [B, 1, 1, N]: True at events, False at padding; None without padding

    @staticmethod
    def of(states: Tensor, batch: PackedBatch) -> EncodedHistories:
        """From packed states [T, W]."""
        return EncodedHistories(pad(states, batch), batch.lengths, batch.may_attend)

    @property
    def newest(self) -> Tensor:
        """The last state of each history [B, W]."""
        rows = torch.arange(self.lengths.shape[0], device=self.lengths.device)
        return self.states[rows, self.lengths - 1]

    def rows(self, index: Tensor) -> EncodedHistories:
        """The histories at these indices, which may repeat."""
        may_attend = None if self.may_attend is None else self.may_attend[index]
        return EncodedHistories(self.states[index], self.lengths[index], may_attend)


class Decoder(Protocol):
    """Continues encoded histories item by item. Its state has a row for each history, or for each row of a beam."""

    def __call__(self, inputs: Tensor, encoded: EncodedHistories) -> Tensor:
        """The outputs of all steps at once: inputs [B, M, D], first the start token → [B, M, D]."""
        ...

    def begin(self, encoded: EncodedHistories) -> Any:
        """The state before the first step."""
        ...

    def step(self, newest: Tensor, encoded: EncodedHistories, state: Any) -> tuple[Tensor, Any]:
        """One step: the newest input [B, D] → its output [B, D], and the next state."""
        ...

    def rows(self, state: Any, index: Tensor) -> Any:
        """The state's rows at these indices, which may repeat."""
        ...

    def attention_weights(self, inputs: Tensor, encoded: EncodedHistories) -> list[tuple[Tensor | None, Tensor]]:
        """Of each layer, the attention weights of the steps with inputs [B, M, D]: to the steps [B, heads, M, M], None
        if steps do not attend to each other, and to the history [B, heads, M, N]."""
        ...
