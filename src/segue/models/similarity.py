"""Similarity: a question's vector against items' vectors → scores."""

from __future__ import annotations

from torch import Tensor, nn


class Dot(nn.Module):
    """The inner product."""

    def score(self, queries: Tensor, items: Tensor) -> Tensor:
        """[B, D] and [X, D] → [B, X]."""
        return queries @ items.T
