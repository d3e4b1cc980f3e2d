"""SASRec: Kang and McAuley, "Self-Attentive Sequential Recommendation", ICDM 2018."""

from __future__ import annotations

import math

import torch
from torch import nn

from segue.layers.blocks.transformer import SASRecBlock
from segue.layers.positions.embeddings import LearnedPositions
from segue.models.inputs import make_inputs
from segue.models.items.tables import ItemTable
from segue.models.sequence import SequenceModel
from segue.models.settings import ModelSettings
from segue.models.similarity.mol import make_similarity
from segue.models.similarity.outputs import make_output
from segue.models.weight_init import xavier_init


def sasrec(settings: ModelSettings, items: ItemTable, generator: torch.Generator) -> SequenceModel:
    """The original blocks, item vectors scaled by sqrt(width), a layer norm at the end."""
    inputs = make_inputs(settings, items)
    width, hidden = inputs.width, settings.feed_forward * inputs.width
    model = SequenceModel(
        items,
        inputs,
        LearnedPositions(settings.length * inputs.tokens_an_event, width, settings.counted_from),
        [SASRecBlock(width, settings.heads, hidden, settings.dropout) for _ in range(settings.depth)],
        norm=nn.LayerNorm(width, eps=1e-8),
        scale=math.sqrt(width),
        dropout=settings.dropout,
        similarity=make_similarity(settings),
        output=make_output(settings),
    )
    xavier_init(model, generator)
    return model
