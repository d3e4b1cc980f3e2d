"""Similarity: queries and items → scores. The interface of all kinds, the inner product and the cosine.

A learned temperature belongs to the similarity. It divides scores in losses only.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from segue.kinds import Kind

LEAST_TEMPERATURE = 0.01  # of a learned one
LEAST_LENGTH = 1e-6  # the least divisor of a vector that is normalised: gradients stay finite


class Similarity(Protocol):
    """Scores of queries and items. Each side is one flat vector, so that an index can store the items'."""

    def query(self, states: Tensor) -> Tensor:
        """States [M, D] → queries [M, Q]."""
        ...

    def item(self, vectors: Tensor) -> Tensor:
        """Vectors of items [X, D] → the items' side [X, I]."""
        ...

    def score(self, queries: Tensor, items: Tensor) -> Tensor:
        """Scores of every query [B, Q] and every item [X, I] → [B, X]."""
        ...

    def own(self, queries: Tensor, items: Tensor) -> Tensor:
        """Scores of each query [M, Q] and items of its own [M, K, I] → [M, K]."""
        ...

    def extra_loss(self, queries: Tensor, targets: Tensor) -> Tensor | None:
        """A term of the loss of queries [M, Q] and their targets [M, I]; None: no term."""
        ...


class Dot(nn.Module):
    """The inner product; with `normal`, vectors are scaled to length one and the score is the cosine.

    Losses divide cosines by a temperature, which may be learned. Recommendations do not: it does not change their
    order, and exported queries stay of length one.
    """

    def __init__(self, *, normal: bool = False, learned_from: float | None = None) -> None:
        """`learned_from`: the initial value of a learned temperature; None: none is learned."""
        super().__init__()
        self.normal = normal
        self.heat = None if learned_from is None else nn.Parameter(torch.tensor(learned_from - LEAST_TEMPERATURE).log())

    @property
    def temperature(self) -> Tensor | None:
        """The learned temperature, above its minimum for any value of the parameter; None if it is not learned."""
        return None if self.heat is None else LEAST_TEMPERATURE + self.heat.exp()

    def tempered(self, queries: Tensor) -> Tensor:
        """Queries divided by the learned temperature, for losses."""
        return queries if self.temperature is None else queries / self.temperature

    def query(self, states: Tensor) -> Tensor:
        return self._side(states)

    def item(self, vectors: Tensor) -> Tensor:
        return self._side(vectors)

    def score(self, queries: Tensor, items: Tensor) -> Tensor:
        return queries @ items.T

    def own(self, queries: Tensor, items: Tensor) -> Tensor:
        return (items @ queries[:, :, None])[:, :, 0]

    def extra_loss(self, queries: Tensor, targets: Tensor) -> Tensor | None:  # noqa: ARG002
        return None

    def _side(self, vectors: Tensor) -> Tensor:
        return functional.normalize(vectors, dim=-1, eps=LEAST_LENGTH) if self.normal else vectors


class DotSettings(Kind, frozen=True, tag="dot"):
    """Score by inner product."""

    def build(self, width: int) -> Similarity:  # noqa: ARG002
        return Dot()


class CosineSettings(Kind, frozen=True, tag="cosine"):
    """Score by cosine, which needs a low temperature."""

    temperature: Literal["fixed", "learned"] = "fixed"
    """Whether the loss divides the cosine by objective.temperature or by a learned number, never below .01."""

    def build(self, width: int) -> Similarity:
        if self.temperature == "fixed":
            return Dot(normal=True)
        # A learned temperature begins with the standard deviation of cosines of random vectors: scores are then of size
        # one. At a lower temperature they are large and random, and the first epochs only make them smaller.
        return Dot(normal=True, learned_from=max(float(width**-0.5), 2 * LEAST_TEMPERATURE))
