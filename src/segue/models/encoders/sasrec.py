"""SASRec: Kang and McAuley, "Self-Attentive Sequential Recommendation", ICDM 2018."""

from __future__ import annotations

import math

import torch
from torch import nn

from segue.layers.blocks.transformer import SASRecBlock
from segue.models.sequence import Parts, SequenceModel
from segue.models.settings import TransformerBlockSettings
from segue.models.weight_init import xavier_init


class SASRecSettings(TransformerBlockSettings, frozen=True, tag="sasrec"):
    """SASRec as published: post-norm blocks with causal attention."""

    def build(self, parts: Parts, generator: torch.Generator) -> SequenceModel:
        """The original blocks, item vectors scaled by sqrt(width), a layer norm at the end."""
        model = SequenceModel(
            parts,
            *self.stack(parts, SASRecBlock),
            norm=nn.LayerNorm(parts.width, eps=1e-8),
            scale=math.sqrt(parts.width),
            dropout=self.dropout,
        )
        return xavier_init(model, generator)
