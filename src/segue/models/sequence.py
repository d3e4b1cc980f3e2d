"""A whole model: items → tokens → blocks → a vector that is compared with items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from segue.layers.blocks import Block
from segue.layers.dropout import Dropout
from segue.layers.packed import PackedBatch
from segue.layers.positions import LearnedPositions
from segue.models.items import IdTable
from segue.models.similarity import Dot


class SequenceModel(nn.Module):
    """A causal encoder over packed tokens. The state at a token asks for the item that comes next."""

    target_time = False
    """Whether answers depend on the moment of the question."""

    def __init__(
        self,
        items: IdTable,
        positions: LearnedPositions,
        blocks: Sequence[nn.Module],
        *,
        norm: nn.Module,
        scale: float,
        dropout: float,
    ) -> None:
        super().__init__()
        self.items = items
        self.positions = positions
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm
        self.scale = scale
        self.drop = Dropout(dropout)
        self.similarity = Dot()

    @property
    def length(self) -> int:
        """Newest events the model can look at; the caller cuts histories to it."""
        return len(self.positions.table)

    @property
    def width(self) -> int:
        return self.items.into.shape[1]

    def encode(self, batch: PackedBatch) -> Tensor:
        """The state after each token [T, D]."""
        x = self._tokens(batch)
        for block in self.blocks:
            x = block(x, batch)
        result: Tensor = self.norm(x)
        return result

    def query(self, batch: PackedBatch) -> Tensor:
        """The state after each user's newest token [B, D]: `encode` at that token, with less work in the last block."""
        *before, last = self.blocks  # a slice of a ModuleList would be built anew, as slow as a block
        batch = batch.with_room()
        x = self._tokens(batch)
        for block in before:
            x = block(x, batch)
        result: Tensor = self.norm(cast(Block, last).newest(x, batch))
        return result

    def item_vectors(self) -> Tensor:
        """What queries are compared with [V + 1, D]; row 0 is padding."""
        return self.items.output()

    def score_all(self, queries: Tensor) -> Tensor:
        """Scores of every item [B, V + 1]; column 0 is padding and means nothing."""
        return self.similarity.score(queries, self.item_vectors())

    def attention(self, batch: PackedBatch) -> Tensor:
        """Who looked at whom [layers, B, heads, N, N], in evaluation mode."""
        x, weights = self._tokens(batch), []
        for block in self.blocks:
            weights.append(cast(Block, block).attention_weights(x, batch))
            x = block(x, batch)
        return torch.stack(weights)

    def _tokens(self, batch: PackedBatch) -> Tensor:
        tokens: Tensor = self.drop(self.positions(self.items.input(batch.items) * self.scale, batch))
        return tokens


POSITION_SPREAD = 0.02  # about that of the item vectors of a catalogue of thousands: at Xavier's own, the places
# drown the items in every normalised input, and the first epochs go into unlearning them


def start_weights(model: nn.Module, generator: torch.Generator) -> None:
    """Xavier-normal matrices and tables, drawn from `generator`; small positions; biases and padding rows zero."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_normal_(parameter, generator=generator)
    for part in model.modules():
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
        if isinstance(part, LearnedPositions):
            nn.init.normal_(part.table, std=POSITION_SPREAD, generator=generator)
        if isinstance(part, IdTable):
            part.clear_padding()
