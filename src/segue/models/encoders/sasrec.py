"""SASRec: Kang and McAuley, "Self-Attentive Sequential Recommendation", ICDM 2018."""

from __future__ import annotations

import math

import torch
from torch import nn

from segue.errors import SettingsError
from segue.kinds import Count
from segue.layers.blocks.members import MemberBlocks, MemberNorms
from segue.layers.blocks.transformer import SASRecBlock
from segue.models.inputs import ItemInputSettings
from segue.models.items.tables import IdSettings
from segue.models.sequence import Parts, SequenceModel
from segue.models.settings import TransformerBlockSettings
from segue.models.similarity.dot import DotSettings
from segue.models.similarity.outputs import NoOutputSettings
from segue.models.weight_init import xavier_init


class SASRecSettings(TransformerBlockSettings, frozen=True, tag="sasrec"):
    """SASRec as published: post-norm blocks with causal attention."""

    members: Count = 1
    """Encoders side by side, which share the width evenly. Each is trained by a loss of its own, and their scores are
    added: an ensemble in one model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        plain = isinstance(self.inputs, ItemInputSettings) and isinstance(self.items, IdSettings)
        alone = isinstance(self.output, NoOutputSettings) and isinstance(self.similarity, DotSettings)
        if self.members > 1 and not (plain and alone):
            raise SettingsError(
                "model.members above 1 needs model.inputs = 'items', model.items = 'ids', model.output = 'none' and "
                "model.similarity = 'dot': choose these, or model.members = 1."
            )
        if self.token_width % (self.members * self.heads):
            raise SettingsError(
                f"model.members times model.heads must divide model.width, got {self.members} members of {self.heads} "
                f"heads and a width of {self.width}; change one of them."
            )

    def build(self, parts: Parts, generator: torch.Generator) -> SequenceModel:
        """The original blocks, item vectors scaled by sqrt(width), a layer norm at the end."""
        several = self.members > 1
        model = SequenceModel(
            parts,
            *self.stack(parts, self._block if several else SASRecBlock),
            norm=MemberNorms(parts.width, self.members, eps=1e-8) if several else nn.LayerNorm(parts.width, eps=1e-8),
            scale=math.sqrt(parts.width / self.members),
            dropout=self.dropout,
        )
        model.members = self.members
        return xavier_init(model, generator)

    def _block(self, width: int, heads: int, hidden: int, dropout: float) -> MemberBlocks:
        """A block of each member."""
        share = width // self.members, heads, hidden // self.members, dropout
        return MemberBlocks([SASRecBlock(*share) for _ in range(self.members)])
