"""An encoder of the history and a decoder that continues it: the next items are one plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from segue.data.batch import ragged_rows
from segue.errors import SettingsError
from segue.kinds import Count, Kind
from segue.layers.blocks.block import Block
from segue.layers.blocks.transformer import PostNormBlock
from segue.layers.decoders.decoder import Decoder, EncodedHistories
from segue.layers.decoders.recurrent import BidirectionalGRU, RecurrentDecoder
from segue.layers.decoders.transformer import TransformerDecoder
from segue.layers.packed import PackedBatch
from segue.layers.positions.embeddings import NoPositions, Positions
from segue.models.attention import AttentionMap
from segue.models.inputs import ItemInputSettings
from segue.models.positions import LearnedPositionSettings, NewestPositionSettings
from segue.models.sequence import Parts, SequenceModel
from segue.models.settings import EncoderSettings
from segue.models.weight_init import xavier_init, zero_recurrent_biases

Decoding = tuple[EncodedHistories, Any]
"""Partial plans, a row each: their histories, and the decoder's state after the steps so far."""


class EncoderDecoder(SequenceModel):
    """A model with a bidirectional encoder and a decoder with attention to the encoded history.

    A batch may hold more than histories: the events after a history are the decoder's input (teacher forcing), and its
    outputs are the queries for the event after each. The encoder reads the history alone.
    """

    has_decoder = True
    decoder: Decoder

    def __init__(
        self,
        parts: Parts,
        positions: Positions,
        blocks: Sequence[nn.Module],
        decoder: Decoder,
        *,
        dropout: float,
        norm: nn.Module | None = None,
    ) -> None:
        """`blocks`: the encoder; `norm` is applied to the outputs of the decoder."""
        super().__init__(parts, positions, blocks, norm=norm, scale=math.sqrt(parts.width), dropout=dropout)
        self.decoder = decoder
        self.start = nn.Parameter(torch.zeros(parts.width))

    def encode(self, batch: PackedBatch) -> Tensor:
        """The decoder's states at the last event of each history and at each event after it [T, D]; the rows of earlier
        events are zero."""
        parts = _Parts.of(batch)
        outputs = self.norm(self.decoder(self._decoder_inputs(parts), self.read(parts.histories)))  # [B, M, D]
        states: Tensor = outputs.flatten(0, 1)[parts.steps]
        return states.new_zeros(len(batch.items), states.shape[1]).index_copy(0, parts.tokens, states)

    def read(self, batch: PackedBatch) -> EncodedHistories:
        """Encode histories."""
        assert int(batch.lengths.min()) > 0, "a user without events has no history to encode"
        x = self._tokens(batch)
        for block in self.blocks:
            x = block(x, batch)
        return EncodedHistories.of(x, batch)

    def query(self, batch: PackedBatch) -> Tensor:
        """Each user's query [B, D']: that of the first step of a plan."""
        return self.begin_plan(batch)[0]

    def begin_plan(self, batch: PackedBatch) -> tuple[Tensor, Decoding]:
        """The queries for the first items of plans [B, D'], and the state for the next steps."""
        histories = self.read(batch)
        return self._step(self._start_tokens(batch.size)[:, 0], histories, self.decoder.begin(histories))

    def extend_plan(self, decoding: Decoding, rows: Tensor, items: Tensor) -> tuple[Tensor, Decoding]:
        """The queries for the next items of plans [P, D'], and the state after them. Plan p extends the plan at
        `rows[p]` of `decoding` by `items[p]`."""
        histories, state = decoding
        newest = self.items.input(items) * self.scale
        return self._step(newest, histories.rows(rows), self.decoder.rows(state, rows))

    def attention_maps(self, batch: PackedBatch) -> list[AttentionMap]:
        """Attention weights of the encoder's layers, then of the decoder's: to earlier steps, and to the history. There
        is a first step, and one for each item of the batch after a history."""
        parts = _Parts.of(batch)
        x, maps = self._tokens(parts.histories), []
        for layer, block in enumerate(self.blocks, start=1):
            weights = cast(Block, block).attention_weights(x, parts.histories)
            maps += [] if weights is None else [AttentionMap(f"encoder, layer {layer}", weights)]
            x = block(x, parts.histories)
        encoded = EncodedHistories.of(x, parts.histories)
        layers = self.decoder.attention_weights(self._decoder_inputs(parts), encoded)
        for layer, (to_steps, to_history) in enumerate(layers, start=1):
            name = f"decoder, layer {layer}"
            if to_steps is not None:
                maps.append(AttentionMap(f"{name}, at its steps", to_steps, rows="steps", columns="steps"))
            maps.append(AttentionMap(f"{name}, at the history", to_history, rows="steps"))
        return maps

    def _step(self, newest: Tensor, histories: EncodedHistories, state: Any) -> tuple[Tensor, Decoding]:
        output, state = self.decoder.step(newest, histories, state)
        return self.head(self.norm(output)), (histories, state)

    def _decoder_inputs(self, parts: _Parts) -> Tensor:
        """The decoder's inputs [B, M, D]: the start token, and the items after the history."""
        vectors = self.items.input(parts.next_items) * self.scale  # [B, M - 1, D]
        return torch.cat((self._start_tokens(vectors.shape[0]), vectors), dim=1)

    def _start_tokens(self, users: int) -> Tensor:  # [B, 1, D]
        return self.start.expand(users, 1, -1)


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """A batch split into histories and the events after them."""

    histories: PackedBatch
    next_items: Tensor  # [B, M - 1] int64: the items after each history, 0 after the last
    steps: Tensor  # [S]: the decoder's steps without padding, as indices into [B * M]
    tokens: Tensor  # [S]: the token of each of these steps

    @staticmethod
    def of(batch: PackedBatch) -> _Parts:
        lengths = batch.lengths.cpu().numpy()
        history = lengths if batch.histories is None else batch.histories.cpu().numpy()
        begins, extra = np.cumsum(lengths) - lengths, lengths - history
        n_steps = int(extra.max()) + 1
        rows = np.arange(len(lengths)) * n_steps

        def tensor(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(batch.lengths.device)

        before, after = tensor(ragged_rows(begins, history)), tensor(ragged_rows(begins + history, extra))
        inputs = batch.items.new_zeros(len(lengths) * n_steps)
        inputs[tensor(ragged_rows(rows + 1, extra))] = batch.items[after]
        return _Parts(
            histories=PackedBatch(items=batch.items[before], times=batch.times[before], lengths=tensor(history)),
            next_items=inputs.view(len(lengths), n_steps)[:, 1:],
            steps=tensor(ragged_rows(rows, extra + 1)),
            tokens=tensor(ragged_rows(begins + history - 1, extra + 1)),
        )


class GRUBodySettings(Kind, frozen=True, tag="gru"):
    """Two recurrent networks with attention between them."""

    def build(self, parts: Parts, *, depth: int, length: int, dropout: float) -> EncoderDecoder:
        return EncoderDecoder(
            parts,
            NoPositions(length),  # a recurrent network knows the order by itself
            [BidirectionalGRU(parts.width, depth)],
            RecurrentDecoder(parts.width, depth, dropout),
            norm=nn.LayerNorm(parts.width),
            dropout=dropout,
        )


class TransformerBodySettings(Kind, frozen=True, tag="transformer"):
    """The original Transformer: an encoder and a decoder of attention alone."""

    heads: Count = 1
    """Attention heads; they share the features of a token evenly."""
    feed_forward: Count = 4
    """Hidden width of a block's feed-forward part, in multiples of the width."""
    positions: LearnedPositionSettings = NewestPositionSettings()
    """Where learned positions are counted from."""

    def build(self, parts: Parts, *, depth: int, length: int, dropout: float) -> EncoderDecoder:
        width, hidden = parts.width, self.feed_forward * parts.width
        return EncoderDecoder(
            parts,
            self.positions.build(length, width),
            [PostNormBlock(width, self.heads, hidden, dropout, causal=False) for _ in range(depth)],
            TransformerDecoder(width, depth, self.heads, hidden, dropout),
            dropout=dropout,
        )


class Seq2SeqSettings(EncoderSettings, frozen=True, tag="seq2seq"):
    """An encoder that reads the history and a decoder that continues it."""

    decodes: ClassVar[bool] = True

    inputs: ItemInputSettings = ItemInputSettings()
    """What a token is made of. A plan has no values, kinds and times."""
    body: TransformerBodySettings | GRUBodySettings = TransformerBodySettings()
    """What the encoder and the decoder are made of."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.body, TransformerBodySettings) and self.width % self.body.heads:
            raise SettingsError(
                f"model.body.heads must divide model.width, got {self.body.heads} heads of {self.width} features; "
                "change one of them."
            )

    def build(self, parts: Parts, generator: torch.Generator) -> SequenceModel:
        """The initial item vectors, scaled, have features of size one, like the decoder's positions."""
        model = self.body.build(parts, depth=self.depth, length=self.length, dropout=self.dropout)
        xavier_init(model, generator)
        nn.init.normal_(model.start, generator=generator)
        for table in model.items.learned:
            nn.init.normal_(table, std=parts.width**-0.5, generator=generator)
        model.items.clear_padding()
        zero_recurrent_biases(model)
        return model
