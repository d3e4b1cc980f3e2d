"""The Transformer, as an encoder that looks back: Vaswani et al., "Attention Is All You Need", NeurIPS 2017. Where its
norms stand, how places count and how scores are made are choices."""

from __future__ import annotations

import math

import torch
from torch import nn

from segue.layers.attention.multi_head import Relative
from segue.layers.blocks.transformer import PostNormBlock, PreNormBlock
from segue.layers.positions.embeddings import LearnedPositions, NoPositions, Positions, SinusoidalPositions
from segue.layers.positions.relative import RelativeBuckets, Rotary
from segue.models.inputs import make_inputs
from segue.models.items.tables import ItemTable
from segue.models.sequence import SequenceModel
from segue.models.settings import ModelSettings
from segue.models.similarity.mol import make_similarity
from segue.models.similarity.outputs import make_output
from segue.models.weight_init import transformer_init


def transformer(settings: ModelSettings, items: ItemTable, generator: torch.Generator) -> SequenceModel:
    """Item vectors scaled by sqrt(width); a layer norm at the end, unless every block has one there."""
    inputs = make_inputs(settings, items)
    places = settings.length * inputs.tokens_an_event
    model = SequenceModel(
        items,
        inputs,
        _positions(settings, places, inputs.width),
        [_block(settings, places, inputs.width) for _ in range(settings.depth)],
        norm=nn.LayerNorm(inputs.width) if settings.norm == "pre" else nn.Identity(),
        scale=math.sqrt(inputs.width),
        dropout=settings.dropout,
        similarity=make_similarity(settings),
        output=make_output(settings),
    )
    transformer_init(model, generator)
    return model


def _positions(settings: ModelSettings, places: int, width: int) -> Positions:
    """What is added to tokens: nothing, where attention knows distances."""
    match settings.positions:
        case "newest" | "oldest":
            return LearnedPositions(places, width, settings.positions)
        case "sinusoidal":
            return SinusoidalPositions(places, width)
        case "rotary" | "buckets":
            return NoPositions(places)


def _relative(settings: ModelSettings, places: int, width: int) -> Relative | None:
    match settings.positions:
        case "rotary":
            return Rotary(places, width // settings.heads)
        case "buckets":
            return RelativeBuckets(settings.heads, places, causal=True)
        case _:
            return None


def _block(settings: ModelSettings, places: int, width: int) -> PreNormBlock | PostNormBlock:
    kind = PreNormBlock if settings.norm == "pre" else PostNormBlock
    return kind(
        width,
        settings.heads,
        settings.feed_forward * width,
        settings.dropout,
        scores=settings.scores,
        relative=_relative(settings, places, width),
    )
