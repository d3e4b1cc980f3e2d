"""A whole model: items → tokens → blocks → a vector that is compared with items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from segue.layers.blocks import Block
from segue.layers.dropout import Dropout
from segue.layers.packed import PackedBatch, with_question
from segue.layers.positions import LearnedPositions
from segue.models.items import IdTable
from segue.models.similarity import Dot


class SequenceModel(nn.Module):
    """An encoder over packed tokens.

    Where tokens look back only, the state at a token asks for the item that comes next. Where they look both ways, the
    item table has a mask, and the state at a mask asks for the item that it hides.
    """

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
        similarity: Dot,
        norm_tokens: nn.Module | None = None,
        at_question: nn.Module | None = None,
    ) -> None:
        """`norm_tokens` stands before the blocks and `norm` after them; `at_question` only where a state is asked."""
        assert items.bias is None or not similarity.normal, "a bias is no direction"
        super().__init__()
        self.items = items
        self.positions = positions
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm
        self.scale = scale
        self.drop = Dropout(dropout)
        self.similarity = similarity
        self.norm_tokens = norm_tokens or nn.Identity()
        self.at_question = at_question or nn.Identity()

    @property
    def length(self) -> int:
        """Newest events the model can look at; the caller cuts histories to it. A mask needs a place of its own."""
        return len(self.positions.table) - (self.items.mask is not None)

    @property
    def width(self) -> int:
        return self.items.into.shape[1]

    def encode(self, batch: PackedBatch) -> Tensor:
        """The state after each token [T, D]. Those that are questioned go through `head` next."""
        x = self._tokens(batch)
        for block in self.blocks:
            x = block(x, batch)
        result: Tensor = self.norm(x)
        return result

    def head(self, states: Tensor) -> Tensor:
        """States [M, D] → what is compared with `item_vectors` [M, D']; a last feature of 1 meets the items' biases."""
        query = self.similarity.side(self.at_question(states))
        return query if self.items.bias is None else torch.cat((query, query.new_ones(len(query), 1)), dim=1)

    def query(self, batch: PackedBatch) -> Tensor:
        """Each user's question [B, D']: `encode` and `head` at the newest token, with less work in the last block.

        The newest token is a mask, put after the history, where the model has one.
        """
        *before, last = self.blocks  # a slice of a ModuleList would be built anew, as slow as a block
        batch = self._asked(batch).with_room()
        x = self._tokens(batch)
        for block in before:
            x = block(x, batch)
        return self.head(self.norm(cast(Block, last).newest(x, batch)))

    def item_vectors(self, numbers: Tensor | None = None) -> Tensor:
        """What questions are compared with, of these items or of all of them [V + 1, D']; row 0 is padding."""
        vectors = self.similarity.side(self.items.output(numbers))
        if self.items.bias is None:
            return vectors
        return torch.cat((vectors, self.items.biases(numbers)[:, None]), dim=1)

    def item_features(self) -> Tensor:
        """What items are compared with each other by [V + 1, D]: their vectors, without biases."""
        return self.items.output()

    def score_all(self, queries: Tensor) -> Tensor:
        """Scores of every item [B, V + 1]; column 0 is padding and means nothing."""
        return self.similarity.score(queries, self.item_vectors())

    def attention(self, batch: PackedBatch) -> Tensor:
        """Who looked at whom [layers, B, heads, N, N], in evaluation mode.

        Where the model asks with a mask, that is each user's last token, after its events.
        """
        batch = self._asked(batch)
        x, weights = self._tokens(batch), []
        for block in self.blocks:
            weights.append(cast(Block, block).attention_weights(x, batch))
            x = block(x, batch)
        return torch.stack(weights)

    def _asked(self, batch: PackedBatch) -> PackedBatch:
        return batch if self.items.mask is None else with_question(batch, self.items.mask_number)

    def _tokens(self, batch: PackedBatch) -> Tensor:
        placed = self.positions(self.items.input(batch.items) * self.scale, batch)
        tokens: Tensor = self.drop(self.norm_tokens(placed))
        return tokens
