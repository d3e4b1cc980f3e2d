"""What a model is built from besides its settings: facts of the log and of its catalogue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from segue.data.vocabulary import Vocabulary
from segue.models.settings import ModelSettings


@dataclass(frozen=True, eq=False)
class Facts:
    """Only what the settings ask for is there."""

    categories: np.ndarray | None = None  # [V + 1] int64: the number 1 … C of each item's category
    content: np.ndarray | None = None  # [V + 1, F] float32: what the catalogue says of each item; row 0 is zero
    kinds: tuple[str, ...] = ()
    """Names of the kinds of events, by number."""


NO_FACTS = Facts()
"""For models that are built from their settings alone."""


def facts_of(settings: ModelSettings, vocabulary: Vocabulary, kinds: Sequence[str] = ()) -> Facts:
    """The facts that a model of these settings needs; `kinds` as the data has them."""
    return Facts(categories=vocabulary.categories(settings.category), kinds=tuple(kinds))
