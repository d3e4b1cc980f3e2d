"""PinnerFormer: Pancha et al., "PinnerFormer: Sequence Modeling for User Representation at Pinterest", KDD 2022."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import nn

from segue.layers.blocks.transformer import PreNormBlock
from segue.layers.positions.embeddings import Positions
from segue.models.encoders.sasrec import SASRecSettings
from segue.models.sequence import Parts, SequenceModel
from segue.models.weight_init import xavier_init


def pinnerformer(
    parts: Parts,
    positions: Positions,
    *,
    depth: int,
    heads: int,
    hidden: int,
    dropout: float,
    generator: torch.Generator,
) -> SequenceModel:
    """Causal pre-norm blocks, learned positions, a layer norm at the end.

    With inputs = 'events', items = 'vectors', output = 'mlp' and a cosine with a learned temperature it is the
    original, with two differences: an event without a kind, value or time is used without it instead of dropped, and
    one kind stands for an action and its surface."""
    model = SequenceModel(
        parts,
        positions,
        [PreNormBlock(parts.width, heads, hidden, dropout) for _ in range(depth)],
        norm=nn.LayerNorm(parts.width),
        scale=1.0,
        dropout=dropout,
    )
    xavier_init(model, generator)
    return model


class PinnerFormerSettings(SASRecSettings, frozen=True, tag="pinnerformer"):
    """PinnerFormer: pre-norm blocks whose queries are meant to stay valid for days."""

    builder: ClassVar[Callable[..., SequenceModel]] = pinnerformer
