"""Caser: Tang and Wang, "Personalized Top-N Sequential Recommendation via Convolutional Sequence Embedding",
WSDM 2018."""

from __future__ import annotations

import torch

from segue.kinds import Count
from segue.layers.blocks.convolution import CaserBlock
from segue.layers.positions.embeddings import NoPositions
from segue.models.sequence import Parts, SequenceModel
from segue.models.settings import EncoderSettings
from segue.models.weight_init import xavier_init


class CaserSettings(EncoderSettings, frozen=True, tag="caser"):
    """Caser: convolutions over the newest few events.

    They are computed at every event. Left out of the original: a vector for each user, because a run holds no users and
    serves new ones; the prediction of the next three items; padding as an item.
    """

    image_events: Count = 5
    """Newest events that the convolutions read."""
    horizontal: Count = 16
    """Filters of each height, from one event to `image_events`."""
    vertical: Count = 4
    """Filters over one feature of all `image_events`."""

    def build(self, parts: Parts, generator: torch.Generator) -> SequenceModel:
        width, filters = parts.width, (self.image_events, self.horizontal, self.vertical)
        model = SequenceModel(
            parts,
            NoPositions(parts.tokens(self.length)),
            [CaserBlock(width, *filters, self.dropout) for _ in range(self.depth)],
            scale=width**0.5,
            dropout=0.0,  # only the outputs of the filters are dropped
        )
        return xavier_init(model, generator)
