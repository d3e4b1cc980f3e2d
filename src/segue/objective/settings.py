"""What is learned, in names and numbers. Impossible combinations are refused here."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from segue.errors import SettingsError


class ObjectiveSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The section `objective` of the settings."""

    task: Literal["next-item"] = "next-item"
    """What is asked of the encoder: at every token, the item that comes next."""
    loss: Literal["softmax", "sampled-softmax"] = "softmax"
    """Over the whole catalogue, or over drawn negatives (for large catalogues)."""
    sampler: Literal["none", "uniform", "popularity"] = "none"
    """Where a sampled loss draws its negatives: every item alike, or by its training count to a power."""
    negatives: int = 0
    """Negatives of a sampled loss, drawn once a batch and shared by all of it."""
    power: float = 1.0
    """Exponent of the count for the sampler `popularity`; 0 would be `uniform`."""

    def __post_init__(self) -> None:
        if self.loss == "softmax" and (self.sampler != "none" or self.negatives):
            raise SettingsError(
                "objective.loss = 'softmax' looks at every item and draws no negatives: leave objective.sampler and "
                "objective.negatives out, or choose objective.loss = 'sampled-softmax'."
            )
        if self.loss == "sampled-softmax" and (self.sampler == "none" or self.negatives < 1):
            raise SettingsError(
                "objective.loss = 'sampled-softmax' needs objective.sampler ('uniform' or 'popularity') and "
                f"objective.negatives of at least 1, got {self.sampler!r} and {self.negatives}."
            )
        if not math.isfinite(self.power):
            raise SettingsError(f"objective.power must be a finite number, got {self.power}.")
        if self.power != 1.0 and self.sampler != "popularity":
            raise SettingsError(
                "objective.power belongs to objective.sampler = 'popularity': leave it out, or choose that."
            )
