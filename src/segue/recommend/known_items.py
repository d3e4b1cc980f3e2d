"""The items of a run: ids, training counts, and which of them the model can read and recommend. Without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from segue.data.vocabulary import Kinds, Names


@dataclass(frozen=True, eq=False)
class KnownItems:
    """What both `Recommender` and `SlimRecommender` need to know of a run's items and events. Number 0 is padding."""

    names: Names
    counts: np.ndarray  # [V + 1] int64: events of each item in training
    answerable: np.ndarray  # [V + 1] bool: items with a count, and items whose content the model knows
    kinds: Kinds = field(default_factory=lambda: Kinds(()))  # the event kinds that the model distinguishes
    timed: bool = False  # whether the model uses the times of events

    @cached_property
    def by_count(self) -> np.ndarray:
        """All item numbers, the most frequent in training first; equal counts, the lower number first."""
        return np.argsort(-self.counts, kind="stable")
