"""The Transformer as a causal encoder: Vaswani et al., "Attention Is All You Need", NeurIPS 2017. Pre- or post-norm,
positions and attention scores are choices."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import nn

from segue.errors import SettingsError
from segue.kinds import Count
from segue.layers.blocks.transformer import PostNormBlock, PreNormBlock
from segue.models.positions import AnyPositionSettings, NewestPositionSettings, RotaryPositionSettings
from segue.models.sequence import Parts, SequenceModel
from segue.models.settings import AttentionSettings
from segue.models.weight_init import transformer_init

Scores = Literal["dot", "scaled-dot", "bilinear", "additive"]


class TransformerSettings(AttentionSettings, frozen=True, tag="transformer"):
    """A Transformer whose parts are chosen."""

    feed_forward: Count = 4
    """Hidden width of a block's feed-forward part, in multiples of the token's width."""
    norm: Literal["pre", "post"] = "pre"
    """Whether norms are before each part of a block, or after each residual sum as in the original."""
    scores: Scores = "scaled-dot"
    """The score of a query and a key: their product, the product divided by the root of their width, a product with a
    matrix between them, or a small network, which is slow."""
    positions: AnyPositionSettings = NewestPositionSettings()
    """How the model knows positions."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.positions, RotaryPositionSettings):
            return
        if self.scores not in ("dot", "scaled-dot"):
            raise SettingsError(
                f"model.positions = 'rotary' needs scores that are products, got model.scores = {self.scores!r}: "
                "choose 'dot' or 'scaled-dot', or other positions."
            )
        if self.token_width // self.heads % 2:
            raise SettingsError(
                f"model.positions = 'rotary' rotates pairs of features, and each of {self.heads} heads has "
                f"{self.token_width // self.heads}: change model.width or model.heads so that it is even."
            )

    def build(self, parts: Parts, generator: torch.Generator) -> SequenceModel:
        """Item vectors are scaled by sqrt(width). Post-norm blocks need no norm after the last of them."""
        length, width = parts.tokens(self.length), parts.width
        block = PreNormBlock if self.norm == "pre" else PostNormBlock
        blocks = [
            block(
                width,
                self.heads,
                self.feed_forward * width,
                self.dropout,
                scores=self.scores,
                relative=self.positions.relative(self.heads, length, width),
            )
            for _ in range(self.depth)
        ]
        model = SequenceModel(
            parts,
            self.positions.build(length, width),
            blocks,
            norm=nn.LayerNorm(width) if self.norm == "pre" else None,
            scale=math.sqrt(width),
            dropout=self.dropout,
        )
        return transformer_init(model, generator)
