"""Caser: Tang and Wang, "Personalized Top-N Sequential Recommendation via Convolutional Sequence Embedding",
WSDM 2018."""

from __future__ import annotations

import torch
from torch import nn

from segue.kinds import Count
from segue.layers.blocks.convolution import CaserBlock
from segue.layers.positions.embeddings import NoPositions
from segue.models.sequence import Parts, SequenceModel
from segue.models.settings import EncoderSettings
from segue.models.weight_init import xavier_init


class CaserSettings(EncoderSettings, frozen=True, tag="caser"):
    """Caser: convolutions over the newest few events."""

    image_events: Count = 5
    """Newest events that the convolutions read."""
    horizontal: Count = 16
    """Filters of each height, from one event to `image_events`."""
    vertical: Count = 4
    """Filters over one feature of all `image_events`."""

    def build(self, parts: Parts, generator: torch.Generator) -> SequenceModel:
        return caser(
            parts,
            image_events=self.image_events,
            horizontal=self.horizontal,
            vertical=self.vertical,
            depth=self.depth,
            length=self.length,
            dropout=self.dropout,
            generator=generator,
        )


def caser(
    parts: Parts,
    *,
    image_events: int,
    horizontal: int,
    vertical: int,
    depth: int,
    length: int,
    dropout: float,
    generator: torch.Generator,
) -> SequenceModel:
    """Horizontal and vertical convolutions over the last few events, at every event.

    Left out of the original: a vector for each user, because a run holds no users and serves new ones; the prediction
    of the next three items; padding as an item.
    """
    model = SequenceModel(
        parts,
        NoPositions(parts.tokens(length)),
        [CaserBlock(parts.width, image_events, horizontal, vertical, dropout) for _ in range(depth)],
        norm=nn.Identity(),
        scale=parts.width**0.5,
        dropout=0.0,  # only the outputs of the filters are dropped
    )
    xavier_init(model, generator)
    return model
