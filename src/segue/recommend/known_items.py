"""The items of a run: ids, training counts, and which of them the model can read and recommend. Without torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from segue.data.kinds import Kinds
from segue.data.vocabulary import Names


class KnownItems:
    """What both `Recommender` and `SlimRecommender` need to know of a run's items and events."""

    def __init__(
        self,
        names: Names,
        counts: np.ndarray,
        answerable: np.ndarray,
        *,
        kinds: Sequence[str] = (),
        timed: bool = False,
    ) -> None:
        """Number 0 is padding.

        counts [V + 1] int64: events of each item in training.
        answerable [V + 1] bool: items with a count, and items whose content the model knows.
        kinds: names of the event kinds that the model distinguishes, by number.
        timed: whether the model uses the times of events.
        """
        self.names = names
        self.counts = counts
        self.answerable = answerable
        self.kinds = Kinds(kinds)
        self.timed = timed

    @cached_property
    def by_count(self) -> np.ndarray:
        """All item numbers, the most frequent in training first; equal counts, the lower number first."""
        return np.argsort(-self.counts, kind="stable")
