"""HSTU: Zhai et al., "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for Generative
Recommendations", ICML 2024, as in its authors' research code; and the SASRec that they compare it with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn

from segue.kinds import Count
from segue.layers.blocks.hstu import HSTUBlock
from segue.layers.blocks.transformer import SASRecBlock
from segue.layers.positions.embeddings import Positions
from segue.models.encoders.sasrec import SASRecSettings
from segue.models.positions import LearnedPositionSettings, NewestPositionSettings
from segue.models.sequence import Parts, SequenceModel
from segue.models.settings import EncoderSettings, refuse_uneven_heads
from segue.models.weight_init import hstu_init


class HSTUSettings(EncoderSettings, frozen=True, tag="hstu"):
    """HSTU: gated pointwise attention with biases by distance and by time."""

    timed: ClassVar[bool] = True

    heads: Count = 1
    """Attention heads; they share the features of a token evenly."""
    positions: LearnedPositionSettings = NewestPositionSettings()
    """Where learned positions are counted from."""
    target_time: bool = True
    """Whether the model reads the time of the query (at the service: now), or only the times of the history."""

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_uneven_heads(self, self.heads)

    def build(self, parts: Parts, generator: torch.Generator) -> SequenceModel:
        length = parts.tokens(self.length)
        blocks = [
            HSTUBlock(parts.width, self.heads, self.dropout, length=length, target_time=self.target_time)
            for _ in range(self.depth)
        ]
        return hstu(
            parts,
            self.positions.build(length, parts.width),
            blocks,
            dropout=self.dropout,
            generator=generator,
            target_time=self.target_time,
        )


class SASRecMetaSettings(SASRecSettings, frozen=True, tag="sasrec-meta"):
    """SASRec as HSTU's authors compare with it: a projection after the heads and norms without weights."""

    def build(self, parts: Parts, generator: torch.Generator) -> SequenceModel:
        width, hidden = parts.width, self.feed_forward * parts.width
        blocks = [
            SASRecBlock(width, self.heads, hidden, self.dropout, output=True, weighted_norms=False)
            for _ in range(self.depth)
        ]
        positions = self.positions.build(parts.tokens(self.length), width)
        return hstu(parts, positions, blocks, dropout=self.dropout, generator=generator, target_time=False)


def hstu(
    parts: Parts,
    positions: Positions,
    blocks: Sequence[nn.Module],
    *,
    dropout: float,
    generator: torch.Generator,
    target_time: bool,
) -> SequenceModel:
    """Blocks with learned positions before them and no norm after them."""
    model = SequenceModel(
        parts,
        positions,
        blocks,
        norm=nn.Identity(),
        scale=math.sqrt(parts.width),
        dropout=dropout,
        target_time=target_time,
    )
    hstu_init(model, generator)
    return model
