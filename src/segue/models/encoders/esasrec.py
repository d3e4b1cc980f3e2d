"""eSASRec: Tikhonovich et al., "eSASRec: Enhancing Transformer-based Recommendations in a Modular Fashion",
RecSys 2025: SASRec's task on the gated pre-norm blocks (LiGR)."""

from __future__ import annotations

import torch
from torch import nn

from segue.layers.blocks.transformer import GatedBlock
from segue.layers.positions.embeddings import LearnedPositions
from segue.models.inputs import make_inputs
from segue.models.items.tables import ItemTable
from segue.models.sequence import SequenceModel
from segue.models.settings import ModelSettings
from segue.models.similarity.mol import make_similarity
from segue.models.similarity.outputs import make_output
from segue.models.weight_init import xavier_init


def esasrec(settings: ModelSettings, items: ItemTable, generator: torch.Generator) -> SequenceModel:
    """Gated pre-norm blocks with SwiGLU, item vectors as they are, no norm at the end."""
    inputs = make_inputs(settings, items)
    width, hidden = inputs.width, settings.feed_forward * inputs.width
    model = SequenceModel(
        items,
        inputs,
        LearnedPositions(settings.length * inputs.tokens_an_event, width, settings.counted_from),
        [GatedBlock(width, settings.heads, hidden, settings.dropout) for _ in range(settings.depth)],
        norm=nn.Identity(),
        scale=1.0,
        dropout=settings.dropout,
        similarity=make_similarity(settings),
        output=make_output(settings),
    )
    xavier_init(model, generator)
    return model
