"""HSTU: Zhai et al., "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for Generative
Recommendations", ICML 2024, as its authors' research code has it; and the SASRec that they compare it with."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from segue.layers.blocks.hstu import HSTUBlock
from segue.layers.blocks.transformer import SASRecBlock
from segue.layers.positions.embeddings import LearnedPositions
from segue.models.inputs import Inputs, make_inputs
from segue.models.items.tables import ItemTable
from segue.models.sequence import SequenceModel
from segue.models.settings import ModelSettings
from segue.models.similarity.mol import make_similarity
from segue.models.similarity.outputs import make_output
from segue.models.weight_init import hstu_init


def hstu(settings: ModelSettings, items: ItemTable, generator: torch.Generator) -> SequenceModel:
    """Pointwise attention with biases by distance and by time; no feed-forward, no norm at the end."""
    inputs = make_inputs(settings, items)
    places = settings.length * inputs.tokens_an_event
    blocks = [
        HSTUBlock(inputs.width, settings.heads, settings.dropout, length=places, target_time=settings.target_time)
        for _ in range(settings.depth)
    ]
    return _meta_model(settings, items, inputs, blocks, generator, target_time=settings.target_time)


def sasrec_meta(settings: ModelSettings, items: ItemTable, generator: torch.Generator) -> SequenceModel:
    """SASRec's blocks with a projection after the heads and norms without weights; no norm at the end."""
    inputs = make_inputs(settings, items)
    width, hidden = inputs.width, settings.feed_forward * inputs.width
    blocks = [
        SASRecBlock(width, settings.heads, hidden, settings.dropout, output=True, weighted_norms=False)
        for _ in range(settings.depth)
    ]
    return _meta_model(settings, items, inputs, blocks, generator, target_time=False)


def _meta_model(
    settings: ModelSettings,
    items: ItemTable,
    inputs: Inputs,
    blocks: Sequence[nn.Module],
    generator: torch.Generator,
    *,
    target_time: bool,
) -> SequenceModel:
    """What both have around their blocks."""
    model = SequenceModel(
        items,
        inputs,
        LearnedPositions(settings.length * inputs.tokens_an_event, inputs.width, settings.counted_from),
        blocks,
        norm=nn.Identity(),
        scale=math.sqrt(inputs.width),
        dropout=settings.dropout,
        similarity=make_similarity(settings),
        output=make_output(settings),
        target_time=target_time,
    )
    hstu_init(model, generator)
    return model
