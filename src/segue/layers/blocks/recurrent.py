"""Recurrent blocks over packed tokens [T, D]."""

from __future__ import annotations

from torch import Tensor, nn

from segue.layers.blocks.block import WithoutAttention
from segue.layers.dropout import Dropout
from segue.layers.packed import PackedBatch, pack, pad


class GRUBlock(WithoutAttention):
    """A layer of gated recurrent units, from each user's oldest token to its newest: [T, D] → [T, S].

    The units are torch's: gate z keeps the old state, and gate r is applied after the old state's linear map. The layer
    runs on the right-padded view, two to four times as fast on a CPU as torch's packed sequences.
    """

    def __init__(self, width: int, state_width: int, dropout: float) -> None:
        super().__init__()
        self.cell = nn.GRU(width, state_width, batch_first=True)
        self.drop = Dropout(dropout)

    def forward(self, x: Tensor, batch: PackedBatch) -> Tensor:
        states, _ = self.cell(pad(x, batch))  # [B, N, S]
        result: Tensor = self.drop(pack(states, batch))
        return result


def gru_blocks(width: int, state_width: int, depth: int, dropout: float) -> list[GRUBlock]:
    """`depth` layers: the first reads tokens [T, width], the others states."""
    return [GRUBlock(state_width if layer else width, state_width, dropout) for layer in range(depth)]
