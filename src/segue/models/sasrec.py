"""SASRec: Kang and McAuley, "Self-Attentive Sequential Recommendation", ICDM 2018."""

from __future__ import annotations

import math

import torch
from torch import nn

from segue.layers.blocks import SASRecBlock
from segue.layers.positions import LearnedPositions
from segue.models.items import IdTable
from segue.models.sequence import SequenceModel
from segue.models.settings import ModelSettings
from segue.models.similarity import Dot
from segue.models.start import xavier_start


def sasrec(settings: ModelSettings, n_items: int, generator: torch.Generator) -> SequenceModel:
    """The original blocks, item vectors scaled by sqrt(width), a layer norm at the end."""
    width, hidden = settings.width, settings.feed_forward * settings.width
    model = SequenceModel(
        IdTable(n_items, width, tied=settings.tied),
        LearnedPositions(settings.length, width, settings.positions),
        [SASRecBlock(width, settings.heads, hidden, settings.dropout) for _ in range(settings.depth)],
        norm=nn.LayerNorm(width, eps=1e-8),
        scale=math.sqrt(width),
        dropout=settings.dropout,
        similarity=Dot(normal=settings.similarity == "cosine"),
    )
    xavier_start(model, generator)
    return model
