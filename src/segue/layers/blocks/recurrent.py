"""Recurrent blocks over packed tokens [T, D]."""

from __future__ import annotations

from torch import Tensor, nn

from segue.layers.blocks.transformer import WithoutAttention
from segue.layers.dropout import Dropout
from segue.layers.packed import PackedBatch, pack, pad


class GRUBlock(WithoutAttention):
    """A layer of gated recurrent units, from each user's oldest token to its newest: [T, D] → [T, S].

    It is torch's form: the gate z keeps the old state, and r is applied to what the old state was mapped to. It runs on
    the right-padded view, where padding comes after all that is asked; on a CPU that is two to four times as fast as
    torch's own packed sequences.
    """

    def __init__(self, width: int, state_width: int, dropout: float) -> None:
        super().__init__()
        self.cell = nn.GRU(width, state_width, batch_first=True)
        self.drop = Dropout(dropout)

    def forward(self, x: Tensor, batch: PackedBatch) -> Tensor:
        states, _ = self.cell(pad(x, batch))  # [B, N, S]
        result: Tensor = self.drop(pack(states, batch))
        return result

    def newest(self, x: Tensor, batch: PackedBatch) -> Tensor:
        return self.forward(x, batch)[batch.last]
