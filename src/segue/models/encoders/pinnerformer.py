"""PinnerFormer: Pancha et al., "PinnerFormer: Sequence Modeling for User Representation at Pinterest", KDD 2022."""

from __future__ import annotations

import torch
from torch import nn

from segue.layers.blocks.transformer import PreNormBlock
from segue.layers.positions.embeddings import LearnedPositions
from segue.models.inputs import make_inputs
from segue.models.items.tables import ItemTable
from segue.models.sequence import SequenceModel
from segue.models.settings import ModelSettings
from segue.models.similarity.mol import make_similarity
from segue.models.similarity.outputs import make_output
from segue.models.weight_init import xavier_init


def pinnerformer(settings: ModelSettings, items: ItemTable, generator: torch.Generator) -> SequenceModel:
    """Pre-norm blocks that look back, learned places, a layer norm at the end.

    With inputs = 'events', items = 'vectors', output = 'mlp', similarity = 'cosine' and a learned temperature it is the
    original, but that a missing kind, value or time is left out instead of the event, and that a kind of action and the
    surface that it happened on are one name.
    """
    inputs = make_inputs(settings, items)
    width, hidden = inputs.width, settings.feed_forward * inputs.width
    model = SequenceModel(
        items,
        inputs,
        LearnedPositions(settings.length * inputs.tokens_an_event, width, settings.counted_from),
        [PreNormBlock(width, settings.heads, hidden, settings.dropout) for _ in range(settings.depth)],
        norm=nn.LayerNorm(width),
        scale=1.0,
        dropout=settings.dropout,
        similarity=make_similarity(settings),
        output=make_output(settings),
    )
    xavier_init(model, generator)
    return model
