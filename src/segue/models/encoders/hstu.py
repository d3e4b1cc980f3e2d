"""HSTU: Zhai et al., "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for Generative
Recommendations", ICML 2024, as in its authors' research code; and the SASRec that they compare it with.

Both have learned positions before the blocks and no norm after them."""

from __future__ import annotations

import math
from functools import partial
from typing import ClassVar

import torch

from segue.layers.blocks.hstu import HSTUBlock
from segue.layers.blocks.transformer import SASRecBlock
from segue.models.positions import LearnedPositionSettings, NewestPositionSettings
from segue.models.sequence import Parts, SequenceModel
from segue.models.settings import AttentionSettings, TransformerBlockSettings
from segue.models.weight_init import hstu_init


class HSTUSettings(AttentionSettings, frozen=True, tag="hstu"):
    """HSTU: gated pointwise attention with biases by distance and by time."""

    timed: ClassVar[bool] = True

    positions: LearnedPositionSettings = NewestPositionSettings()
    """Where learned positions are counted from."""
    target_time: bool = True
    """Whether the model reads the time of the query (at the service: now), or only the times of the history."""

    def build(self, parts: Parts, generator: torch.Generator) -> SequenceModel:
        width, length = parts.width, parts.tokens(self.length)
        block = partial(HSTUBlock, length=length, target_time=self.target_time)
        model = SequenceModel(
            parts,
            self.positions.build(length, width),
            [block(width, self.heads, self.dropout) for _ in range(self.depth)],
            scale=math.sqrt(width),
            dropout=self.dropout,
            target_time=self.target_time,
        )
        return hstu_init(model, generator)


class SASRecMetaSettings(TransformerBlockSettings, frozen=True, tag="sasrec-meta"):
    """SASRec as HSTU's authors compare with it: a projection after the heads and norms without weights."""

    def build(self, parts: Parts, generator: torch.Generator) -> SequenceModel:
        stack = self.stack(parts, partial(SASRecBlock, output=True, weighted_norms=False))
        return hstu_init(SequenceModel(parts, *stack, scale=math.sqrt(parts.width), dropout=self.dropout), generator)
