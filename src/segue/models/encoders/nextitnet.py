"""NextItNet: Yuan et al., "A Simple Convolutional Generative Network for Next Item Recommendation", WSDM 2019."""

from __future__ import annotations

from typing import Annotated

import torch
from msgspec import Meta
from torch import nn

from segue.kinds import Count
from segue.layers.blocks.convolution import DilatedBlock
from segue.layers.positions.embeddings import NoPositions
from segue.models.sequence import Parts, SequenceModel
from segue.models.settings import EncoderSettings
from segue.models.weight_init import truncated_normal_init


class NextItNetSettings(EncoderSettings, frozen=True, tag="nextitnet"):
    """NextItNet: dilated causal convolutions. `depth` is the number of repetitions of its dilations."""

    kernel: Count = 3
    """Events that a convolution reads."""
    dilations: Annotated[tuple[Count, ...], Meta(min_length=1)] = (1, 2)
    """Distance between these events, block by block; in a block's second convolution it is twice as large."""

    def build(self, parts: Parts, generator: torch.Generator) -> SequenceModel:
        return nextitnet(
            parts,
            width=self.width,
            kernel=self.kernel,
            dilations=self.dilations * self.depth,
            length=self.length,
            dropout=self.dropout,
            generator=generator,
        )


def nextitnet(
    parts: Parts,
    *,
    width: int,
    kernel: int,
    dilations: tuple[int, ...],
    length: int,
    dropout: float,
    generator: torch.Generator,
) -> SequenceModel:
    """Residual blocks of dilated causal convolutions, and a linear map from a state to a query of `width` features.

    The original also trains on padding, which is left out, and has separate output vectors for items; here input and
    output share them unless `model.items.tied` is false.
    """
    model = SequenceModel(
        parts,
        NoPositions(parts.tokens(length)),
        [DilatedBlock(parts.width, kernel, dilation, dropout) for dilation in dilations],
        norm=nn.Identity(),
        scale=1.0,
        dropout=dropout,
        query_transform=nn.Linear(parts.width, width),
    )
    truncated_normal_init(model, generator)
    return model
