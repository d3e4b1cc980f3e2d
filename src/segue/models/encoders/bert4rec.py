"""BERT4Rec: Sun et al., "BERT4Rec: Sequential Recommendation with Bidirectional Encoder Representations from
Transformer", CIKM 2019."""

from __future__ import annotations

from functools import partial
from typing import Annotated, ClassVar

import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.nn import functional

from segue.layers.blocks.transformer import PostNormBlock
from segue.models.inputs import CombinedInputSettings, ItemInputSettings, RatedInputSettings
from segue.models.sequence import Parts, SequenceModel
from segue.models.settings import TransformerBlockSettings
from segue.models.weight_init import truncated_normal_init


class MaskedHead(nn.Module):
    """The transform of query states before they are compared with items: a linear map, GELU and a layer norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)

    def forward(self, states: Tensor) -> Tensor:
        result: Tensor = self.norm(functional.gelu(self.dense(states)))
        return result


class BERT4RecSettings(TransformerBlockSettings, frozen=True, tag="bert4rec"):
    """BERT4Rec: bidirectional post-norm blocks, trained to recover masked items.

    The query is the state of a mask token after the history. The mask has number n + 1 in a batch and is never a
    recommendation. The original's token type embedding is left out: with one type, the position embeddings can contain
    it.
    """

    bidirectional: ClassVar[bool] = True

    length: Annotated[int, Meta(ge=2)] = 200
    """Newest events of a history that the model reads, at most, with the mask that makes the query."""
    inputs: ItemInputSettings | RatedInputSettings | CombinedInputSettings = ItemInputSettings()
    """What a token is made of. 'events' is missing: its tokens would reveal the kind and the time of a masked event."""

    def build(self, parts: Parts, generator: torch.Generator) -> SequenceModel:
        block = partial(PostNormBlock, causal=False, activation=functional.gelu, eps=1e-12)
        model = SequenceModel(
            parts,
            *self.stack(parts, block),
            norm_tokens=nn.LayerNorm(parts.width, eps=1e-12),
            query_transform=MaskedHead(parts.width),
            dropout=self.dropout,
        )
        return truncated_normal_init(model, generator)
