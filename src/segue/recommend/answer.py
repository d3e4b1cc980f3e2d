"""What is answered: items by id, best first, in the shape that Python, the command line and the service share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np


class ScoredItem(msgspec.Struct, frozen=True):
    """An item of an answer."""

    id: str
    title: str | None
    """From the catalogue; null where it has none."""
    score: float
    """Higher is better. Comparable within one answer only; of a popularity answer, the events trained on."""


UNTIMED = "The history has no times, which this model looks at: the answer is made without them."


class Recommendation(msgspec.Struct, frozen=True):
    """An answer: the items, best first, and what has to be said about them."""

    items: list[ScoredItem]
    unknown: list[str] = []
    """Ids of the history that the model does not know, each once; they were left out of the question."""
    fallback: Literal["popularity"] | None = None
    """Set where the history had nothing the model knows, so that the most frequent items are the answer."""
    untimed: Literal[True] | msgspec.UnsetType = msgspec.UNSET
    """There, and true, where the model looks at times and the history has none: the answer is made without them."""

    @property
    def ids(self) -> list[str]:
        """The ids alone, best first."""
        return [item.id for item in self.items]


BEAM = 8
"""Plans that are followed side by side unless asked otherwise."""


class PlannedItem(msgspec.Struct, frozen=True):
    """A step of a plan."""

    id: str
    title: str | None
    """From the catalogue; null where it has none."""
    log_probability: float
    """The natural logarithm of its chance to come here, after the history and the steps before it; in a popularity
    answer, of its share of the events trained on."""


class Plan(msgspec.Struct, frozen=True):
    """The next items as one plan, the first to come first."""

    items: list[PlannedItem]
    score: float
    """The logarithm of the whole plan's chance: the sum of the steps'."""
    unknown: list[str] = []
    """Ids of the history that the model does not know, each once; they were left out of the question."""
    fallback: Literal["popularity"] | None = None
    """Set where the history had nothing the model knows, so that the most frequent items are the plan."""

    @property
    def ids(self) -> list[str]:
        """The ids alone, in their order."""
        return [item.id for item in self.items]


@dataclass(frozen=True, slots=True, eq=False)
class Ranking:
    """Answers in numbers, a row a question: item 0 and score -inf stand after the last answer of a row."""

    items: np.ndarray  # [B, k'] int64
    scores: np.ndarray  # [B, k'] float32
    fallback: np.ndarray  # [B] bool: answered by popularity
