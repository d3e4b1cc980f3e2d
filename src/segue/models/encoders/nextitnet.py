"""NextItNet: Yuan et al., "A Simple Convolutional Generative Network for Next Item Recommendation", WSDM 2019."""

from __future__ import annotations

import torch
from torch import nn

from segue.layers.blocks.convolution import DilatedBlock
from segue.layers.positions.embeddings import NoPositions
from segue.models.inputs import make_inputs
from segue.models.items.tables import ItemTable
from segue.models.sequence import SequenceModel
from segue.models.settings import ModelSettings
from segue.models.similarity.mol import make_similarity
from segue.models.similarity.outputs import make_output
from segue.models.weight_init import truncated_normal_init


def nextitnet(settings: ModelSettings, items: ItemTable, generator: torch.Generator) -> SequenceModel:
    """Residual blocks of dilated causal convolutions, and a linear map from a state to what is compared with items.

    The dilations are gone through `depth` times. The original learns from padding as if it were an item, which is
    left out, and maps a state straight to every item's score; here items have the vectors that they come in with,
    unless they are untied.
    """
    inputs = make_inputs(settings, items)
    model = SequenceModel(
        items,
        inputs,
        NoPositions(settings.length * inputs.tokens_an_event),
        [
            DilatedBlock(inputs.width, settings.kernel, dilation, settings.dropout)
            for dilation in settings.dilations * settings.depth
        ],
        norm=nn.Identity(),
        scale=1.0,
        dropout=settings.dropout,
        query_transform=nn.Linear(inputs.width, settings.width),
        similarity=make_similarity(settings),
        output=make_output(settings),
    )
    truncated_normal_init(model, generator)
    return model
