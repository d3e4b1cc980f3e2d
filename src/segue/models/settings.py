"""What a model is made of, in numbers."""

from __future__ import annotations

from typing import Literal

import msgspec

from segue.errors import SettingsError


class ModelSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The section `model` of the settings."""

    builder: Literal["sasrec", "esasrec"] = "esasrec"
    """Which encoder: the original SASRec or the gated pre-norm one."""
    width: int = 64
    """Features of a token and of an item."""
    depth: int = 2
    """Blocks."""
    heads: int = 1
    """Attention heads; they share the width evenly."""
    length: int = 200
    """Newest events of a history that the model looks at."""
    dropout: float = 0.2
    """Share of features dropped while training, on the input and on each block's updates."""
    feed_forward: int = 4
    """Hidden width of a block's feed-forward part, in multiples of `width`."""
    positions: Literal["newest", "oldest"] = "newest"
    """Where places are counted from. From the oldest, a prefix is encoded as it is inside the whole."""
    tied: bool = True
    """One vector an item, on the way in and on the way out; or one for each."""

    def __post_init__(self) -> None:
        for name in ("width", "depth", "heads", "length", "feed_forward"):
            if getattr(self, name) < 1:
                raise SettingsError(f"model.{name} must be at least 1, got {getattr(self, name)}.")
        if not 0 <= self.dropout < 1:
            raise SettingsError(f"model.dropout must lie in [0, 1), got {self.dropout}.")
        if self.width % self.heads:
            raise SettingsError(
                f"model.width must be a multiple of model.heads, got {self.width} and {self.heads}; change one of them."
            )
