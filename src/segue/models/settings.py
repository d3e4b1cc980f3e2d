"""What a model is made of, in numbers."""

from __future__ import annotations

from typing import Literal

import msgspec

from segue.errors import SettingsError

BIDIRECTIONAL = frozenset({"bert4rec"})
"""Builders whose tokens look both ways: they are asked what a mask hides. At any other token the answer is in sight."""


class ModelSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The section `model` of the settings."""

    builder: Literal["sasrec", "esasrec", "bert4rec"] = "esasrec"
    """Which encoder: the original SASRec, the gated pre-norm one, or BERT4Rec, which looks both ways."""
    width: int = 64
    """Features of a token and of an item."""
    depth: int = 2
    """Blocks."""
    heads: int = 1
    """Attention heads; they share the width evenly."""
    length: int = 200
    """Newest events of a history that the model looks at; bert4rec one less, as its question takes a place."""
    dropout: float = 0.2
    """Share of features dropped while training, on the input and on each block's updates."""
    feed_forward: int = 4
    """Hidden width of a block's feed-forward part, in multiples of `width`."""
    positions: Literal["newest", "oldest"] = "newest"
    """Where places are counted from. From the oldest, a prefix is encoded as it is inside the whole."""
    tied: bool = True
    """One vector an item, on the way in and on the way out; or one for each."""
    similarity: Literal["dot", "cosine"] = "dot"
    """How a question is compared with an item: by the inner product of their vectors, or by that of their directions,
    which wants a low objective.temperature."""

    def __post_init__(self) -> None:
        for name in ("width", "depth", "heads", "length", "feed_forward"):
            if getattr(self, name) < 1:
                raise SettingsError(f"model.{name} must be at least 1, got {getattr(self, name)}.")
        if self.builder in BIDIRECTIONAL and self.length < 2:
            raise SettingsError(f"model.length must be at least 2 for {self.builder}, whose question takes a place.")
        if not 0 <= self.dropout < 1:
            raise SettingsError(f"model.dropout must lie in [0, 1), got {self.dropout}.")
        if self.width % self.heads:
            raise SettingsError(
                f"model.width must be a multiple of model.heads, got {self.width} and {self.heads}; change one of them."
            )
