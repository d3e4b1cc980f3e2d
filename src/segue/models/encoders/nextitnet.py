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
    """NextItNet: dilated causal convolutions. `depth` is the number of repetitions of its dilations.

    The original also trains on padding, which is left out, and has separate output vectors for items; here input and
    output share them unless `model.items.tied` is false.
    """

    kernel: Count = 3
    """Events that a convolution reads."""
    dilations: Annotated[tuple[Count, ...], Meta(min_length=1)] = (1, 2)
    """Distance between these events, block by block; in a block's second convolution it is twice as large."""

    def build(self, parts: Parts, generator: torch.Generator) -> SequenceModel:
        """Residual blocks, and a linear map from a state to a query."""
        width, dilations = parts.width, self.dilations * self.depth
        model = SequenceModel(
            parts,
            NoPositions(parts.tokens(self.length)),
            [DilatedBlock(width, self.kernel, dilation, self.dropout) for dilation in dilations],
            dropout=self.dropout,
            query_transform=nn.Linear(width, self.width),
        )
        return truncated_normal_init(model, generator)
