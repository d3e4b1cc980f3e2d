"""Similarity: a question's vector against items' vectors → scores."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

LEAST_LENGTH = 1e-6  # a vector shorter than this is not made longer than one: gradients stay finite


class Dot(nn.Module):
    """The inner product; of vectors made `normal`, that is of length one, it is the cosine."""

    def __init__(self, *, normal: bool = False) -> None:
        super().__init__()
        self.normal = normal

    def side(self, vectors: Tensor) -> Tensor:
        """Questions' or items' vectors [X, D] as they go into the product."""
        return functional.normalize(vectors, dim=-1, eps=LEAST_LENGTH) if self.normal else vectors

    def score(self, queries: Tensor, items: Tensor) -> Tensor:
        """[B, D] and [X, D] → [B, X]."""
        return queries @ items.T
