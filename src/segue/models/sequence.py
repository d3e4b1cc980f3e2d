"""A whole model: items → tokens → blocks → a vector that is compared with items."""

from __future__ import annotations

import copy
from collections.abc import Sequence
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
from segue.models.inputs import Inputs
from segue.models.items.coded import CodeTable
from segue.models.items.tables import ItemTable
from segue.models.similarity.dot import Dot, Similarity
from segue.models.similarity.outputs import MLPOutput


class SequenceModel(nn.Module):
    """An encoder over packed tokens.

    Where tokens look back only, the state at a token asks for the item that comes next. Where they look both ways, the
    item table has a mask, and the state at a mask asks for the item that it hides.
    """

    kinds: tuple[str, ...] = ()
    """Names of the kinds of events that the model was built over, by number."""
    has_decoder = False
    """Whether a decoder is asked for item after item, so that a batch may hold what continues its histories."""

    def __init__(
        self,
        items: ItemTable,
        inputs: Inputs,
        positions: Positions,
        blocks: Sequence[nn.Module],
        *,
        norm: nn.Module,
        scale: float,
        dropout: float,
        similarity: Similarity,
        norm_tokens: nn.Module | None = None,
        query_transform: nn.Module | None = None,
        output: nn.Module | None = None,
        target_time: bool = False,
    ) -> None:
        """`norm_tokens` stands before the blocks and `norm` after them; `query_transform` and then `output` only where
        a state is asked: `output` gets the features that are compared with items.

        `target_time` says whether answers depend on the moment of the question.
        """
        super().__init__()
        self.items = items
        self.inputs = inputs
        self.positions = positions
        self.target_time = target_time
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm
        self.scale = scale
        self.drop = Dropout(dropout)
        self.similarity = similarity
        self.norm_tokens = norm_tokens or nn.Identity()
        self.query_transform = query_transform or nn.Identity()
        self.output = output or nn.Identity()
        # Of a state: what is compared is an item's width of it, unless a network makes that of all of it.
        self._asked_features = output.width if isinstance(output, MLPOutput) else items.width

    @property
    def length(self) -> int:
        """Newest events the model can look at; the caller cuts histories to it. A mask needs a place of its own."""
        return self.positions.length // self.inputs.tokens_an_event - (self.items.mask is not None)

    @cached_property
    def incremental(self) -> bool:
        """Whether a new event leaves the tokens before it as they are, so that it can be encoded alone."""
        looking_back = all(isinstance(block, Incremental) and block.causal for block in self.blocks)
        return looking_back and self.inputs.incremental and self.positions.counted_from == "oldest"

    @cached_property
    def timed(self) -> bool:
        """Whether it looks at the times of a history's events."""
        return self.inputs.timed or any(isinstance(block, Timed) and block.timed for block in self.blocks)

    @property
    def input_kinds(self) -> tuple[str, ...]:
        """The kinds of events that it tells apart, by number; none where it looks at none."""
        return self.kinds if self.inputs.kinded else ()

    @property
    def window_step(self) -> int:
        """Events by which the start of the window moves on where a history outgrows `length`: while it stays, new
        events can be encoded alone; where they cannot be, it need not stay."""
        return max(1, self.length // 4) if self.incremental else 1

    @property
    def width(self) -> int:
        """Features of an item."""
        return self.items.width

    def answerable(self, counts: np.ndarray) -> np.ndarray:
        """Which items may be answered and read [V + 1] bool, where training met each so often."""
        return self.items.answerable(counts)

    def with_items(self, items: ItemTable) -> SequenceModel:
        """This model over another item table, to which it is the same; all the rest is shared. This one stays as it
        is."""
        other = copy.copy(self)
        other._modules = {**self._modules, "items": items}
        if "items" in self.__dict__:  # parts are plain attributes, too
            other.__dict__["items"] = items
            items.__dict__.update(items._modules)
            items.__dict__.update(items._parameters)
        if any(part is self.items for part in other.modules()):
            raise InputError("This model's encoder holds its items in a place of its own, so none can be added to it.")
        return other

    def encode(self, batch: PackedBatch) -> Tensor:
        """The state after each event [T, D]. Those that are questioned go through `head` next."""
        batch = self.inputs.expanded(batch)
        x = self._tokens(batch)
        for block in self.blocks:
            x = block(x, batch)
        return self.inputs.at_events(self.norm(x))

    def head(self, states: Tensor) -> Tensor:
        """States [M, D] → what is compared with `item_vectors` [M, D']; a last feature of 1 meets the items' biases."""
        query = self.similarity.query(self.output(self.query_transform(states)[:, : self._asked_features]))
        return query if self.items.bias is None else torch.cat((query, query.new_ones(query.shape[0], 1)), dim=1)

    def query(self, batch: PackedBatch) -> Tensor:
        """Each user's question [B, D']: `encode` and `head` at the newest token, with less work in the last block.

        The newest token is a mask, put after the history, where the model has one.
        """
        *before, last = self.blocks  # a slice of a ModuleList would be built anew, as slow as a block
        batch = self.inputs.expanded(self._asked(batch)).with_padding()
        x = self._tokens(batch)
        for block in before:
            x = block(x, batch)
        return self.head(self.norm(cast(Block, last).newest(x, batch)))

    def query_with_kv(self, batch: PackedBatch, users: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """`query`, and for some users what tokens that come after theirs need of every block
        [blocks, tokens, 2, H, d]."""
        assert self.incremental
        batch = self.inputs.expanded(batch).with_padding()
        lengths, ends = batch.lengths[users].tolist(), (batch.last[users] + 1).tolist()
        rows = torch.cat([torch.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)])
        x, kept = self._tokens(batch), []
        *before, last = self.blocks
        for block in before:
            kept.append(cast(Incremental, block).keys_values(x[rows]))
            x = block(x, batch)
        kept.append(cast(Incremental, last).keys_values(x[rows]))
        questions = self.head(self.norm(cast(Block, last).newest(x, batch)))
        return questions, list(torch.split(torch.stack(kept), lengths, dim=1))

    def item_vectors(self, numbers: Tensor | None = None) -> Tensor:
        """What questions are compared with, of these items or of all of them [V + 1, D']; row 0 is padding."""
        vectors = self.similarity.item(self.items.output(numbers))
        if self.items.bias is None:
            return vectors
        return torch.cat((vectors, self.items.biases(numbers)[:, None]), dim=1)

    def item_features(self, numbers: Tensor | None = None) -> Tensor:
        """What items are compared with each other by, these or all [V + 1, D]: their vectors, without biases."""
        return self.items.output(numbers)

    def score_all(self, queries: Tensor) -> Tensor:
        """Scores of every item [B, V + 1]; column 0 is padding and means nothing."""
        if isinstance(self.items, CodeTable) and isinstance(self.similarity, Dot):
            return self.items.score(queries, normal=self.similarity.normal)
        return self.similarity.score(queries, self.item_vectors())

    def attention(self, batch: PackedBatch) -> Tensor | None:
        """Who looked at whom [layers, B, heads, N, N], in evaluation mode; the layers are the blocks that have
        attention. None where no block has.

        Where the model asks with a mask, that is each user's last token, after its events.
        """
        batch = self.inputs.expanded(self._asked(batch))
        x, weights = self._tokens(batch), []
        for block in self.blocks:
            looked = cast(Block, block).attention_weights(x, batch)
            weights += [] if looked is None else [looked]
            x = block(x, batch)
        return self.inputs.between_events(torch.stack(weights)) if weights else None

    def _asked(self, batch: PackedBatch) -> PackedBatch:
        return batch if self.items.mask is None else batch.with_query_token(self.items.mask_number)

    def _tokens(self, batch: PackedBatch) -> Tensor:
        placed = self.positions(self.inputs(self.items, batch) * self.scale, batch)
        tokens: Tensor = self.drop(self.norm_tokens(placed))
        return tokens
