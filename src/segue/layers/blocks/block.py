"""The interface of an encoder layer."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from segue.layers.packed import PackedBatch


class Block(Protocol):
    """One layer of an encoder."""

    def __call__(self, x: Tensor, batch: PackedBatch) -> Tensor:
        """[T, D] → [T, D]."""
        ...

    def newest(self, x: Tensor, batch: PackedBatch) -> Tensor:
        """The output at each user's newest token only [B, D]: inference needs no more of the last block."""
        ...

    def attention_weights(self, x: Tensor, batch: PackedBatch) -> Tensor | None:
        """Attention weights [B, heads, N, N]: rows are queries, columns keys; None in a block without attention."""
        ...


class WithoutAttention(nn.Module):
    """Base of blocks without attention."""

    def newest(self, x: Tensor, batch: PackedBatch) -> Tensor:
        output: Tensor = self(x, batch)
        return output[batch.last]

    def attention_weights(self, x: Tensor, batch: PackedBatch) -> None:
        """None."""
