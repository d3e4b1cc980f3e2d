"""PinnerFormer: Pancha et al., "PinnerFormer: Sequence Modeling for User Representation at Pinterest", KDD 2022."""

from __future__ import annotations

import torch
from torch import nn

from segue.layers.blocks.transformer import PreNormBlock
from segue.models.sequence import Parts, SequenceModel
from segue.models.settings import TransformerBlockSettings
from segue.models.weight_init import xavier_init


class PinnerFormerSettings(TransformerBlockSettings, frozen=True, tag="pinnerformer"):
    """PinnerFormer: pre-norm blocks whose queries are meant to stay valid for days.

    With inputs = 'events', items = 'vectors', output = 'mlp' and a cosine with a learned temperature it is the
    original, with two differences: an event without a kind, value or time is used without it instead of dropped, and
    one kind stands for an action and its surface."""

    def build(self, parts: Parts, generator: torch.Generator) -> SequenceModel:
        """Causal pre-norm blocks, learned positions, a layer norm at the end."""
        norm = nn.LayerNorm(parts.width)
        model = SequenceModel(parts, *self.stack(parts, PreNormBlock), norm=norm, dropout=self.dropout)
        return xavier_init(model, generator)
