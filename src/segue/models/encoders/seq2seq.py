"""An encoder reads the history, a decoder continues it: the next items as one plan."""

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
from segue.models.attention_map import AttentionMap
from segue.models.inputs import ItemInputSettings
from segue.models.positions import LearnedPositionSettings, NewestPositionSettings
from segue.models.sequence import Parts, SequenceModel
from segue.models.settings import EncoderSettings
from segue.models.weight_init import xavier_init


@dataclass(frozen=True, slots=True, eq=False)
class Decoding:
    """Plans that are being made, a row each."""

    read: EncodedHistories
    kept: Any
    """What the decoder keeps of the steps before."""


class EncoderDecoder(SequenceModel):
    """A model whose events are read both ways, and which is asked by a decoder that looks at all that was read.

    A batch may hold more than histories: the events after a history are then fed to the decoder, which is asked for the
    one after each. The encoder reads the history alone, so that nothing it says knows them.
    """

    has_decoder = True

    def __init__(
        self,
        parts: Parts,
        positions: Positions,
        blocks: Sequence[nn.Module],
        decoder: nn.Module,
        *,
        norm: nn.Module,
        dropout: float,
    ) -> None:
        """`blocks` read; `decoder` is a `Decoder`, and `norm` stands after it."""
        super().__init__(parts, positions, blocks, norm=norm, scale=math.sqrt(parts.width), dropout=dropout)
        self.decoder = decoder
        self.start = nn.Parameter(torch.zeros(parts.width))

    def encode(self, batch: PackedBatch) -> Tensor:
        """The states that ask for what comes after each history and after each event that continues it [T, D]; the
        events before a history's last ask nothing, and their rows are zero."""
        parts = _Parts.of(batch)
        states = self.norm(self._decoder(self._fed(parts), self.read(parts.histories)))  # [B, M, D]
        asking: Tensor = states.flatten(0, 1)[parts.steps]
        return asking.new_zeros(len(batch.items), asking.shape[1]).index_copy(0, parts.tokens, asking)

    def read(self, batch: PackedBatch) -> EncodedHistories:
        """Histories, encoded."""
        assert int(batch.lengths.min()) > 0, "a user without events has nothing to be read"
        x = self._tokens(batch)
        for block in self.blocks:
            x = block(x, batch)
        return EncodedHistories.of(x, batch)

    def query(self, batch: PackedBatch) -> Tensor:
        """Each user's question: that of a plan's first step."""
        return self.begin_plan(batch)[0]

    def begin_plan(self, batch: PackedBatch) -> tuple[Tensor, Decoding]:
        """What asks for the first item of a plan for each history [B, D'], and what the next steps need."""
        read = self.read(batch)
        return self._stepped(self._starts(batch.size)[:, 0], read, self._decoder.begin(read))

    def extend_plan(self, decoding: Decoding, rows: Tensor, items: Tensor) -> tuple[Tensor, Decoding]:
        """What asks for the item after each of some plans, when `items` [P] are the newest; `rows` [P]: the plans among
        those decoded that each of them goes on from."""
        read, kept = decoding.read.rows(rows), self._decoder.rows(decoding.kept, rows)
        return self._stepped(self.items.input(items) * self.scale, read, kept)

    def attention_maps(self, batch: PackedBatch) -> list[AttentionMap]:
        """The encoder's layers, where events look at each other, and then those of the decoder, whose steps look back
        at each other and across at the history: the first step, and one more for each item of the batch that continues
        a history."""
        parts = _Parts.of(batch)
        x, maps = self._tokens(parts.histories), []
        for layer, block in enumerate(self.blocks, start=1):
            weights = cast(Block, block).attention_weights(x, parts.histories)
            maps += [] if weights is None else [AttentionMap(f"encoder, layer {layer}", weights)]
            x = block(x, parts.histories)
        looks = self._decoder.attention_weights(self._fed(parts), EncodedHistories.of(x, parts.histories))
        for layer, (back, across) in enumerate(looks, start=1):
            if back is not None:
                maps.append(AttentionMap(f"decoder, layer {layer}, at its steps", back, rows="steps", columns="steps"))
            maps.append(AttentionMap(f"decoder, layer {layer}, at the history", across, rows="steps"))
        return maps

    def _stepped(self, newest: Tensor, read: EncodedHistories, kept: Any) -> tuple[Tensor, Decoding]:
        state, kept = self._decoder.step(newest, read, kept)
        return self.head(self.norm(state)), Decoding(read, kept)

    def _fed(self, parts: _Parts) -> Tensor:
        """The decoder's inputs [B, M, D]: what begins a plan, and the items that continue it."""
        vectors = self.items.input(parts.fed) * self.scale  # [B, M - 1, D]
        return torch.cat((self._starts(vectors.shape[0]), vectors), dim=1)

    def _starts(self, users: int) -> Tensor:
        """What a plan begins with [B, 1, D]."""
        return self.start.expand(users, 1, -1)

    @property
    def _decoder(self) -> Decoder:
        return cast(Decoder, self.decoder)


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """A batch of histories and what continues them, taken apart."""

    histories: PackedBatch
    fed: Tensor  # [B, M - 1] int64: the items that continue each history, 0 after the last
    steps: Tensor  # [S]: the decoder's steps that ask something, in its states flattened to [B * M]
    tokens: Tensor  # [S]: the tokens that they stand at

    @staticmethod
    def of(batch: PackedBatch) -> _Parts:
        lengths = batch.lengths.cpu().numpy()
        read = lengths if batch.histories is None else batch.histories.cpu().numpy()
        begins, fed = np.cumsum(lengths) - lengths, lengths - read
        most = int(fed.max()) + 1
        rows = np.arange(len(lengths)) * most

        def tensor(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(batch.lengths.device)

        before, after = tensor(ragged_rows(begins, read)), tensor(ragged_rows(begins + read, fed))
        slots = batch.items.new_zeros(len(lengths) * most)
        slots[tensor(ragged_rows(rows + 1, fed))] = batch.items[after]
        return _Parts(
            histories=PackedBatch(items=batch.items[before], times=batch.times[before], lengths=tensor(read)),
            fed=slots.view(len(lengths), most)[:, 1:],
            steps=tensor(ragged_rows(rows, fed + 1)),
            tokens=tensor(ragged_rows(begins + read - 1, fed + 1)),
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
    """The Transformer as it was first published: an encoder and a decoder of attention alone."""

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
            norm=nn.Identity(),  # the last block ends with one
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
        model = self.body.build(parts, depth=self.depth, length=self.length, dropout=self.dropout)
        return seq2seq(model, generator)


def seq2seq(model: EncoderDecoder, generator: torch.Generator) -> EncoderDecoder:
    """Draw the first weights. Scaled item vectors start at size one, like the decoder's positions."""
    xavier_init(model, generator)
    nn.init.normal_(model.start, generator=generator)
    for table in model.items.learned:
        nn.init.normal_(table, std=model.inputs.width**-0.5, generator=generator)
    model.items.clear_padding()
    for part in model.modules():
        if isinstance(part, nn.GRU):
            for name, weight in part.named_parameters():
                if name.startswith("bias"):
                    nn.init.zeros_(weight)
    return model
