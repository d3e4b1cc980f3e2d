"""BERT4Rec: Sun et al., "BERT4Rec: Sequential Recommendation with Bidirectional Encoder Representations from
Transformer", CIKM 2019."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from segue.layers.blocks.transformer import PostNormBlock
from segue.layers.positions.embeddings import LearnedPositions
from segue.models.inputs import make_inputs
from segue.models.items.tables import ItemTable
from segue.models.sequence import SequenceModel
from segue.models.settings import ModelSettings
from segue.models.similarity.mol import make_similarity
from segue.models.similarity.outputs import make_output
from segue.models.weight_init import truncated_normal_init


class MaskedHead(nn.Module):
    """What is done to the states that are questioned, and to no others, before they meet the items."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)

    def forward(self, states: Tensor) -> Tensor:
        result: Tensor = self.norm(functional.gelu(self.dense(states)))
        return result


def _block(width: int, settings: ModelSettings) -> PostNormBlock:
    """As BERT has it."""
    return PostNormBlock(
        width,
        settings.heads,
        settings.feed_forward * width,
        settings.dropout,
        causal=False,
        activation=functional.gelu,
        eps=1e-12,
    )


def bert4rec(settings: ModelSettings, items: ItemTable, generator: torch.Generator) -> SequenceModel:
    """Post-norm blocks that look both ways; the answer is read from a mask that stands after the history.

    The original's vector for the type of a token is left out: there is one type, and the places' vectors can hold it.
    """
    inputs = make_inputs(settings, items)
    width = inputs.width
    model = SequenceModel(
        items,
        inputs,
        LearnedPositions(settings.length * inputs.tokens_an_event, width, settings.counted_from),
        [_block(width, settings) for _ in range(settings.depth)],
        norm_tokens=nn.LayerNorm(width, eps=1e-12),
        norm=nn.Identity(),
        query_transform=MaskedHead(width),
        scale=1.0,
        dropout=settings.dropout,
        similarity=make_similarity(settings),
        output=make_output(settings),
    )
    truncated_normal_init(model, generator)
    return model
