"""Similarity: a question against items → scores. What all kinds of it do, and the inner product."""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from segue.kinds import Kind

LEAST_LENGTH = 1e-6  # a vector shorter than this is not made longer than one: gradients stay finite


class Similarity(Protocol):
    """How well an item answers a question. Each side is one flat vector, so that an index can keep the items'."""

    def query(self, states: Tensor) -> Tensor:
        """States [M, D] → questions [M, Q]."""
        ...

    def item(self, vectors: Tensor) -> Tensor:
        """Vectors of items [X, D] → what questions are compared with [X, I]."""
        ...

    def score(self, queries: Tensor, items: Tensor) -> Tensor:
        """Every question [B, Q] against every item [X, I] → [B, X]."""
        ...

    def own(self, queries: Tensor, items: Tensor) -> Tensor:
        """Each question [M, Q] against items of its own [M, K, I] → [M, K]."""
        ...

    def extra_loss(self, queries: Tensor, answers: Tensor) -> Tensor | None:
        """What learning adds to the loss of questions [M, Q] and their answers [M, I]; None: nothing."""
        ...


COLDEST = 0.01  # the lowest temperature that is learned


def first_temperature(width: int) -> float:
    """Where a temperature begins that is learned: what cosines of random vectors of so many features deviate by.

    Scores are then of size one, as products begin. Colder, they are large and mean nothing, and the first epochs go
    into making them small again.
    """
    return max(float(width**-0.5), 2 * COLDEST)


class Dot(nn.Module):
    """The inner product; of vectors made `normal`, that is of length one, it is the cosine.

    A loss wants cosines divided by a temperature, which may be learned. An answer does not: it has no say in which
    item is the best, and a question that is kept for other uses stays of length one, whatever was learned since.
    """

    def __init__(self, *, normal: bool = False, learned_from: float | None = None) -> None:
        """`learned_from`: the temperature that learning begins with; None: none is learned."""
        super().__init__()
        self.normal = normal
        self.heat = None if learned_from is None else nn.Parameter(torch.tensor(learned_from - COLDEST).log())

    @property
    def temperature(self) -> Tensor | None:
        """What is learned: above its floor whatever the parameter is, and with a gradient everywhere."""
        return None if self.heat is None else COLDEST + self.heat.exp()

    def tempered(self, queries: Tensor) -> Tensor:
        """Questions as a loss compares them."""
        return queries if self.temperature is None else queries / self.temperature

    def query(self, states: Tensor) -> Tensor:
        return self._side(states)

    def item(self, vectors: Tensor) -> Tensor:
        return self._side(vectors)

    def score(self, queries: Tensor, items: Tensor) -> Tensor:
        return queries @ items.T

    def own(self, queries: Tensor, items: Tensor) -> Tensor:
        return (items @ queries[:, :, None])[:, :, 0]

    def extra_loss(self, queries: Tensor, answers: Tensor) -> Tensor | None:  # noqa: ARG002  # a product has no parts
        return None

    def _side(self, vectors: Tensor) -> Tensor:
        return functional.normalize(vectors, dim=-1, eps=LEAST_LENGTH) if self.normal else vectors


class DotSettings(Kind, frozen=True, tag="dot"):
    """Score by inner product."""

    def build(self, width: int) -> Similarity:  # noqa: ARG002
        return Dot()


class CosineSettings(Kind, frozen=True, tag="cosine"):
    """Score by cosine, which wants a low temperature."""

    temperature: Literal["fixed", "learned"] = "fixed"
    """Whether the loss divides the cosine by objective.temperature or by a learned number, never below .01."""

    def build(self, width: int) -> Similarity:
        return Dot(normal=True, learned_from=first_temperature(width) if self.temperature == "learned" else None)
