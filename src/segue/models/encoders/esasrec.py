"""eSASRec: Tikhonovich et al., "eSASRec: Enhancing Transformer-based Recommendations in a Modular Fashion",
RecSys 2025: SASRec's task on the gated pre-norm blocks (LiGR)."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import nn

from segue.layers.blocks.transformer import GatedBlock
from segue.layers.positions.embeddings import Positions
from segue.models.encoders.sasrec import SASRecSettings
from segue.models.sequence import Parts, SequenceModel
from segue.models.weight_init import xavier_init


def esasrec(
    parts: Parts,
    positions: Positions,
    *,
    depth: int,
    heads: int,
    hidden: int,
    dropout: float,
    generator: torch.Generator,
) -> SequenceModel:
    """Gated pre-norm blocks with SwiGLU, item vectors as they are, no norm at the end."""
    model = SequenceModel(
        parts,
        positions,
        [GatedBlock(parts.width, heads, hidden, dropout) for _ in range(depth)],
        norm=nn.Identity(),
        scale=1.0,
        dropout=dropout,
    )
    xavier_init(model, generator)
    return model


class ESASRecSettings(SASRecSettings, frozen=True, tag="esasrec"):
    """eSASRec: gated pre-norm blocks."""

    builder: ClassVar[Callable[..., SequenceModel]] = esasrec
