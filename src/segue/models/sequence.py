"""A whole model: items → tokens → blocks → a query that is compared with items."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from segue.errors import InputError
from segue.layers.blocks.block import Block
from segue.layers.dropout import Dropout
from segue.layers.incremental import Incremental, Timed
from segue.layers.packed import PackedBatch
from segue.layers.positions.embeddings import Positions
from segue.models.inputs import ItemInputs
from segue.models.items.coded import CodeTable
from segue.models.items.tables import ItemTable
from segue.models.similarity.dot import Dot, Similarity
from segue.models.similarity.outputs import MLPOutput


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """The parts of a model around its encoder."""

    items: ItemTable
    inputs: ItemInputs
    similarity: Similarity
    output: nn.Module | None = None
    """Applied to a query before it is compared with items."""

    @property
    def width(self) -> int:
        """Features of a token."""
        return self.inputs.width

    def tokens(self, events: int) -> int:
        """Tokens of so many events."""
        return events * self.inputs.tokens_an_event


class SequenceModel(nn.Module):
    """An encoder over packed tokens.

    In a causal model, the state at a token is the query for the next item. In a bidirectional one, the item table has a
    mask token, and the state at a mask is the query for the item that it hides.
    """

    kinds: tuple[str, ...] = ()
    """Names of the kinds of events in the log that the model was built for, by number."""
    members = 1
    """Encoders side by side, each with its share of the features and a loss of its own."""
    has_decoder = False
    """Whether a decoder computes the queries, so that a batch may hold events that continue its histories."""

    def __init__(
        self,
        parts: Parts,
        positions: Positions,
        blocks: Sequence[nn.Module],
        *,
        dropout: float,
        scale: float = 1.0,
        norm: nn.Module | None = None,
        norm_tokens: nn.Module | None = None,
        query_transform: nn.Module | None = None,
        target_time: bool = False,
    ) -> None:
        """Tokens are multiplied by `scale`. `norm_tokens` is applied before the blocks and `norm` after them;
        `query_transform` and then the output part only to states that become queries. `target_time`: whether queries
        depend on their request time.
        """
        super().__init__()
        self.items = parts.items
        self.inputs = parts.inputs
        self.positions = positions
        self.target_time = target_time
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm or nn.Identity()
        self.scale = scale
        self.drop = Dropout(dropout)
        self.similarity = parts.similarity
        self.norm_tokens = norm_tokens or nn.Identity()
        self.query_transform = query_transform or nn.Identity()
        self.output = parts.output or nn.Identity()
        # The first features of a state, as many as an item has, unless an output network reads all of them.
        self._query_features = parts.output.width if isinstance(parts.output, MLPOutput) else parts.items.width

    @property
    def length(self) -> int:
        """The most events of a window; the caller cuts histories to it. A mask needs a position of its own."""
        return self.positions.length // self.inputs.tokens_an_event - (self.items.mask is not None)

    @cached_property
    def incremental(self) -> bool:
        """Whether a new event does not change the tokens before it, so that it can be encoded alone."""
        causal = all(isinstance(block, Incremental) and block.causal for block in self.blocks)
        return causal and self.inputs.incremental and self.positions.counted_from == "oldest"

    @cached_property
    def timed(self) -> bool:
        """Whether the model uses the times of events."""
        return self.inputs.timed or any(isinstance(block, Timed) and block.timed for block in self.blocks)

    @property
    def input_kinds(self) -> tuple[str, ...]:
        """The kinds of events that the model distinguishes, by number; none if it does not use kinds."""
        return self.kinds if self.inputs.kinded else ()

    @property
    def window_step(self) -> int:
        """Events by which the start of the window moves when a history outgrows `length`. While it stays, new events
        can be encoded alone; without incremental encoding, it moves with every event."""
        return max(1, self.length // 4) if self.incremental else 1

    def answerable(self, counts: np.ndarray) -> np.ndarray:
        """Which items may be recommended and encoded [V + 1] bool, given their counts in training.

        The model decides it, never the counts alone: with content, items unseen in training may be recommended. They
        are no negatives.
        """
        return self.items.answerable(counts)

    def with_items(self, items: ItemTable) -> SequenceModel:
        """A copy of this model over another item table; all other parts are shared."""
        other = copy.copy(self)
        other._modules = {**self._modules, "items": items}
        if "items" in self.__dict__:  # submodules may be plain attributes, too
            other.__dict__["items"] = items
            items.__dict__.update(items._modules)
            items.__dict__.update(items._parameters)
        if any(part is self.items for part in other.modules()):
            raise InputError(
                "Items cannot be added to this model, as its encoder has a second reference to the item table; use "
                "`self.items` only."
            )
        return other

    def encode(self, batch: PackedBatch) -> Tensor:
        """The state after each event [T, D]; `head` turns states into queries."""
        batch = self.inputs.expanded(batch)
        x = self._tokens(batch)
        for block in self.blocks:
            x = block(x, batch)
        return self.inputs.at_events(self.norm(x))

    def head(self, states: Tensor) -> Tensor:
        """States [M, D] → queries [M, D'], compared with `item_vectors`; with item biases, the last feature is 1."""
        query = self.similarity.query(self.output(self.query_transform(states)[:, : self._query_features]))
        return query if self.items.bias is None else torch.cat((query, query.new_ones(query.shape[0], 1)), dim=1)

    def query(self, batch: PackedBatch) -> Tensor:
        """Each user's query [B, D']: `encode` and `head` at the newest token, with less work in the last block. If the
        model has a mask token, it is appended to the history."""
        *before, last = self.blocks  # slicing a ModuleList builds a new one, as slow as a block
        batch = self.inputs.expanded(self._with_query_token(batch)).with_padding()
        x = self._tokens(batch)
        for block in before:
            x = block(x, batch)
        return self.head(self.norm(cast(Block, last).newest(x, batch)))

    def query_with_kv(self, batch: PackedBatch, users: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """`query`, and for some users the keys and values of their tokens [blocks, tokens, 2, H, d]."""
        assert self.incremental
        batch = self.inputs.expanded(batch).with_padding()
        lengths, ends = batch.lengths[users].tolist(), (batch.last[users] + 1).tolist()
        rows = torch.cat([torch.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)])
        x, kv = self._tokens(batch), []
        *before, last = self.blocks
        for block in before:
            kv.append(cast(Incremental, block).keys_values(x[rows]))
            x = block(x, batch)
        kv.append(cast(Incremental, last).keys_values(x[rows]))
        queries = self.head(self.norm(cast(Block, last).newest(x, batch)))
        return queries, list(torch.split(torch.stack(kv), lengths, dim=1))

    def item_vectors(self, numbers: Tensor | None = None) -> Tensor:
        """Vectors that queries are compared with, of these items or of all [V + 1, D']; row 0 is padding."""
        vectors = self.similarity.item(self.items.output(numbers))
        bias = self.items.bias
        if bias is None:
            return vectors
        return torch.cat((vectors, (bias if numbers is None else bias[numbers])[:, None]), dim=1)

    def item_features(self, numbers: Tensor | None = None) -> Tensor:
        """Vectors for comparing items with each other, of these items or of all [V + 1, D]: without biases."""
        return self.items.output(numbers)

    def score_all(self, queries: Tensor) -> Tensor:
        """Scores of all items [B, V + 1]; column 0 is padding and meaningless."""
        if isinstance(self.items, CodeTable) and isinstance(self.similarity, Dot):
            return self.items.score(queries, normal=self.similarity.normal)
        return self.similarity.score(queries, self.item_vectors())

    def attention(self, batch: PackedBatch) -> Tensor | None:
        """Attention weights in evaluation mode [layers, B, heads, N, N]: rows are queries, columns keys; None if no
        block has attention. If the model has a mask token, that is each user's last token."""
        batch = self.inputs.expanded(self._with_query_token(batch))
        x, weights = self._tokens(batch), []
        for block in self.blocks:
            block_weights = cast(Block, block).attention_weights(x, batch)
            weights += [] if block_weights is None else [block_weights]
            x = block(x, batch)
        return self.inputs.between_events(torch.stack(weights)) if weights else None

    def _with_query_token(self, batch: PackedBatch) -> PackedBatch:
        return batch if self.items.mask is None else batch.with_query_token(self.items.mask_number)

    def _tokens(self, batch: PackedBatch) -> Tensor:
        positioned = self.positions(self.inputs(self.items, batch) * self.scale, batch)
        tokens: Tensor = self.drop(self.norm_tokens(positioned))
        return tokens
