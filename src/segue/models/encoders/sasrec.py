"""SASRec: Kang and McAuley, "Self-Attentive Sequential Recommendation", ICDM 2018."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import nn

from segue.kinds import Count
from segue.layers.blocks.transformer import SASRecBlock
from segue.layers.positions.embeddings import Positions
from segue.models.positions import LearnedPositionSettings, NewestPositionSettings
from segue.models.sequence import Parts, SequenceModel
from segue.models.settings import EncoderSettings, refuse_uneven_heads
from segue.models.weight_init import xavier_init


def sasrec(
    parts: Parts,
    positions: Positions,
    *,
    depth: int,
    heads: int,
    hidden: int,
    dropout: float,
    generator: torch.Generator,
) -> SequenceModel:
    """The original blocks, item vectors scaled by sqrt(width), a layer norm at the end."""
    width = parts.width
    model = SequenceModel(
        parts,
        positions,
        [SASRecBlock(width, heads, hidden, dropout) for _ in range(depth)],
        norm=nn.LayerNorm(width, eps=1e-8),
        scale=math.sqrt(width),
        dropout=dropout,
    )
    xavier_init(model, generator)
    return model


class SASRecSettings(EncoderSettings, frozen=True, tag="sasrec"):
    """SASRec as published: post-norm blocks with causal attention."""

    builder: ClassVar[Callable[..., SequenceModel]] = sasrec
    """Encoders with the same keys set another builder with the same parameters."""

    heads: Count = 1
    """Attention heads; they share the features of a token evenly."""
    feed_forward: Count = 4
    """Hidden width of a block's feed-forward part, in multiples of the token's width."""
    positions: LearnedPositionSettings = NewestPositionSettings()
    """Where learned positions are counted from."""

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_uneven_heads(self, self.heads)

    def build(self, parts: Parts, generator: torch.Generator) -> SequenceModel:
        return type(self).builder(
            parts,
            self.positions.build(parts.tokens(self.length), parts.width),
            depth=self.depth,
            heads=self.heads,
            hidden=self.feed_forward * parts.width,
            dropout=self.dropout,
            generator=generator,
        )
