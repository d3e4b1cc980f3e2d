"""Caser: Tang and Wang, "Personalized Top-N Sequential Recommendation via Convolutional Sequence Embedding",
WSDM 2018."""

from __future__ import annotations

import torch
from torch import nn

from segue.layers.blocks.convolution import CaserBlock
from segue.layers.positions.embeddings import NoPositions
from segue.models.inputs import make_inputs
from segue.models.items.tables import ItemTable
from segue.models.sequence import SequenceModel
from segue.models.settings import ModelSettings
from segue.models.similarity.mol import make_similarity
from segue.models.similarity.outputs import make_output
from segue.models.weight_init import xavier_init


def caser(settings: ModelSettings, items: ItemTable, generator: torch.Generator) -> SequenceModel:
    """Horizontal and vertical convolutions over the last few events, at every event.

    The original also learns a vector for each user; here there is none, for a run holds no users, and who comes later
    is answered all the same. It asks for the next three items and takes padding for an item, which is left out too.
    """
    inputs = make_inputs(settings, items)
    shape = inputs.width, settings.image_events, settings.horizontal, settings.vertical, settings.dropout
    model = SequenceModel(
        items,
        inputs,
        NoPositions(settings.length * inputs.tokens_an_event),
        [CaserBlock(*shape) for _ in range(settings.depth)],
        norm=nn.Identity(),
        scale=inputs.width**0.5,
        dropout=0.0,  # it drops what the filters found, and nothing before
        similarity=make_similarity(settings),
        output=make_output(settings),
    )
    xavier_init(model, generator)
    return model
