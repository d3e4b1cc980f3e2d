"""The keys that the settings of every encoder have. Each encoder's own are in its file in `encoders/`."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import nn

from segue.errors import SettingsError
from segue.kinds import Count, Kind, Rate
from segue.layers.positions.embeddings import Positions
from segue.models.inputs import EventInputSettings, InputSettings, ItemInputSettings
from segue.models.items import ItemSettings
from segue.models.items.coded import CodeSettings
from segue.models.items.tables import IdSettings
from segue.models.positions import LearnedPositionSettings, NewestPositionSettings
from segue.models.sequence import Parts, SequenceModel
from segue.models.similarity.dot import CosineSettings, DotSettings
from segue.models.similarity.mol import SimilaritySettings
from segue.models.similarity.outputs import L2OutputSettings, MLPOutputSettings, NoOutputSettings, OutputSettings


class EncoderSettings(Kind, frozen=True):
    """The section `model` of the settings, for any encoder."""

    bidirectional: ClassVar[bool] = False
    """Whether tokens attend to later ones: such an encoder is trained to recover masked items."""
    decodes: ClassVar[bool] = False
    """Whether a decoder continues the history item by item: such an encoder can plan."""
    timed: ClassVar[bool] = False
    """Whether the encoder itself needs the times of events."""

    width: Count = 64
    """Features of a token and of an item."""
    depth: Count = 2
    """Blocks."""
    length: Count = 200
    """Newest events of a history that the model reads, at most."""
    dropout: Rate = 0.2
    """Share of features dropped in training, on the input and on each block's updates."""
    items: ItemSettings = IdSettings()
    """What an item's vector is made of."""
    inputs: InputSettings = ItemInputSettings()
    """What a token is made of."""
    similarity: SimilaritySettings = DotSettings()
    """How a query is compared with an item."""
    output: OutputSettings = NoOutputSettings()
    """How a query is transformed before it is compared with items."""
    encoder: str = ""
    """A builder from outside segue as module:name, used instead of this kind's own. Set by
    `segue.train(…, encoder=build)` only."""

    @property
    def item_width(self) -> int:
        """Features of an item's vector."""
        return (isinstance(self.output, MLPOutputSettings) and self.output.item_width) or self.width

    @property
    def token_width(self) -> int:
        """Features of a token."""
        return self.width + self.inputs.extra_width()

    def __post_init__(self) -> None:
        if self.item_width != self.width and not isinstance(self.inputs, EventInputSettings):
            raise SettingsError(
                "model.output.item_width needs model.inputs = 'events', whose tokens may have another width than "
                "items: choose that, or leave it at 0."
            )
        if isinstance(self.output, L2OutputSettings) and isinstance(self.similarity, CosineSettings):
            raise SettingsError(
                "model.output = 'l2' has no effect with model.similarity = 'cosine', which ignores lengths: leave "
                "model.output out."
            )
        if isinstance(self.items, CodeSettings) and self.item_width % self.items.parts:
            raise SettingsError(
                f"model.items.parts must divide the features of an item, got {self.items.parts} parts of "
                f"{self.item_width} features; change model.items.parts or model.width."
            )

    def build(self, parts: Parts, generator: torch.Generator) -> SequenceModel:
        """A new model of these parts, whose initial weights come from the generator."""
        raise NotImplementedError


class AttentionSettings(EncoderSettings, frozen=True):
    """The section `model` for an encoder with attention."""

    heads: Count = 1
    """Attention heads; they share the features of a token evenly."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.token_width % self.heads:
            raise SettingsError(
                f"model.heads must divide the features of a token, got {self.heads} heads of {self.token_width} "
                "features; change model.heads or model.width."
            )


class TransformerBlockSettings(AttentionSettings, frozen=True):
    """The section `model` for an encoder of blocks with attention and a feed-forward part."""

    feed_forward: Count = 4
    """Hidden width of a block's feed-forward part, in multiples of the token's width."""
    positions: LearnedPositionSettings = NewestPositionSettings()
    """Where learned positions are counted from."""

    def stack(
        self, parts: Parts, block: Callable[[int, int, int, float], nn.Module]
    ) -> tuple[Positions, list[nn.Module]]:
        """The positions and the blocks; `block` takes the width, the heads, the hidden width and the dropout rate."""
        width, hidden = parts.width, self.feed_forward * parts.width
        positions = self.positions.build(parts.tokens(self.length), width)
        return positions, [block(width, self.heads, hidden, self.dropout) for _ in range(self.depth)]
