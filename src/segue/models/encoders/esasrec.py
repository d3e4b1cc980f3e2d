"""eSASRec: Tikhonovich et al., "eSASRec: Enhancing Transformer-based Recommendations in a Modular Fashion",
RecSys 2025: SASRec's task on the gated pre-norm blocks (LiGR)."""

from __future__ import annotations

import torch

from segue.layers.blocks.transformer import GatedBlock
from segue.models.sequence import Parts, SequenceModel
from segue.models.settings import TransformerBlockSettings
from segue.models.weight_init import xavier_init


class ESASRecSettings(TransformerBlockSettings, frozen=True, tag="esasrec"):
    """eSASRec: gated pre-norm blocks."""

    def build(self, parts: Parts, generator: torch.Generator) -> SequenceModel:
        """Gated pre-norm blocks with SwiGLU, item vectors as they are, no norm at the end."""
        return xavier_init(SequenceModel(parts, *self.stack(parts, GatedBlock), dropout=self.dropout), generator)
