"""GRU4Rec: Hidasi et al., "Session-based Recommendations with Recurrent Neural Networks", ICLR 2016, and Hidasi and
Karatzoglou, "Recurrent Neural Networks with Top-k Gains for Session-based Recommendations", CIKM 2018."""

from __future__ import annotations

import torch
from torch import nn

from segue.layers.blocks.recurrent import GRUBlock
from segue.layers.positions.embeddings import NoPositions
from segue.models.inputs import make_inputs
from segue.models.items.tables import ItemTable
from segue.models.sequence import SequenceModel
from segue.models.settings import ModelSettings
from segue.models.similarity.mol import make_similarity
from segue.models.similarity.outputs import make_output
from segue.models.weight_init import recurrent_init


def gru4rec(settings: ModelSettings, items: ItemTable, generator: torch.Generator) -> SequenceModel:
    """Layers of gated recurrent units, and a linear map from a state to what is compared with items.

    The original walks many sessions side by side, an event at a time, and learns nothing from one event to the next;
    here histories are whole, and gradients reach back through all of them. Its cell is the older form of the unit, of
    the same power but with other weights: see `GRUBlock`. Its losses are `top1` and `bpr` in its first paper,
    `top1-max` and `bpr-max` in its second.
    """
    inputs = make_inputs(settings, items)
    states = settings.state_width or inputs.width
    model = SequenceModel(
        items,
        inputs,
        NoPositions(settings.length * inputs.tokens_an_event),
        [GRUBlock(states if layer else inputs.width, states, settings.dropout) for layer in range(settings.depth)],
        norm=nn.Identity(),
        scale=inputs.width**0.5,
        dropout=settings.dropout,
        query_transform=nn.Linear(states, settings.width),
        similarity=make_similarity(settings),
        output=make_output(settings),
    )
    recurrent_init(model, generator)
    return model
