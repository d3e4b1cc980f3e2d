"""eSASRec: Tikhonovich et al., "eSASRec: Enhancing Transformer-based Recommendations in a Modular Fashion",
RecSys 2025: SASRec's task on the gated pre-norm blocks (LiGR)."""

from __future__ import annotations

import torch
from torch import nn

from segue.layers.blocks import GatedBlock
from segue.layers.positions import LearnedPositions
from segue.models.items import IdTable
from segue.models.sequence import SequenceModel
from segue.models.settings import ModelSettings
from segue.models.similarity import Dot
from segue.models.start import xavier_start


def esasrec(settings: ModelSettings, n_items: int, generator: torch.Generator) -> SequenceModel:
    """Gated pre-norm blocks with SwiGLU, item vectors as they are, no norm at the end."""
    width, hidden = settings.width, settings.feed_forward * settings.width
    model = SequenceModel(
        IdTable(n_items, width, tied=settings.tied),
        LearnedPositions(settings.length, width, settings.positions),
        [GatedBlock(width, settings.heads, hidden, settings.dropout) for _ in range(settings.depth)],
        norm=nn.Identity(),
        scale=1.0,
        dropout=settings.dropout,
        similarity=Dot(normal=settings.similarity == "cosine"),
    )
    xavier_start(model, generator)
    return model
