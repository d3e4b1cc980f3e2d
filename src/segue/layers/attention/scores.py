"""Scores of queries and keys: inner products, bilinear, additive."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
from torch import Tensor, nn
from torch.nn import functional

from segue.layers.attention.additive import Activation, additive_scores
from segue.layers.incremental import array, numpy_map

ScoreKind = Literal["dot", "scaled-dot", "bilinear", "additive"]

KeyScores = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Scores of one query [dq] and keys [n, dk] → [n]."""


class Product(nn.Module):
    """The inner product of query and key, optionally divided by the square root of their width."""

    def __init__(self, width: int, *, scaled: bool) -> None:
        super().__init__()
        self.scale = 1 / math.sqrt(width) if scaled else 1.0

    def project(self, queries: Tensor) -> Tensor:
        """Queries whose inner products with keys, times `scale`, are the scores."""
        return queries

    def forward(self, queries: Tensor, keys: Tensor, *, causal: bool = False) -> Tensor:  # noqa: ARG002
        """[..., M, dq] and [..., N, dk] → [..., M, N]; also the scores that `causal` attention does not use."""
        return self.project(queries) @ keys.transpose(-1, -2) * self.scale

    def token_step(self) -> KeyScores:
        scale = np.float32(self.scale)

        def score(query: np.ndarray, keys: np.ndarray) -> np.ndarray:
            scores: np.ndarray = keys.dot(query)
            scores *= scale
            return scores

        return score


class Bilinear(Product):
    """query · U key; their widths may differ."""

    def __init__(self, query_width: int, key_width: int) -> None:
        super().__init__(key_width, scaled=False)
        self.query = nn.Linear(query_width, key_width, bias=False)

    def project(self, queries: Tensor) -> Tensor:
        return _linear_rows(self.query, queries)

    def token_step(self) -> KeyScores:
        project = numpy_map(self.query)
        return lambda query, keys: keys.dot(project(query))


class Additive(nn.Module):
    """v · act(A key + B query)."""

    def __init__(self, query_width: int, key_width: int, hidden: int, activation: Activation) -> None:
        super().__init__()
        self.query = nn.Linear(query_width, hidden, bias=False)
        self.key = nn.Linear(key_width, hidden, bias=False)
        self.vector = nn.Linear(hidden, 1, bias=False)
        self.activation = activation

    def forward(self, queries: Tensor, keys: Tensor, *, causal: bool = False) -> Tensor:
        """[..., M, dq] and [..., N, dk] → [..., M, N]; if `causal`, scores of later keys may be anything."""
        queries, keys = _linear_rows(self.query, queries), _linear_rows(self.key, keys)
        return additive_scores(queries, keys, self.vector.weight[0], self.activation, causal=causal)

    def token_step(self) -> KeyScores:
        assert self.activation == "tanh"
        project, key, vector = numpy_map(self.query), array(self.key.weight), array(self.vector.weight)[0]
        return lambda query, keys: np.tanh(keys.dot(key.T) + project(query)).dot(vector)


def _linear_rows(linear: nn.Linear, x: Tensor) -> Tensor:
    """Apply the map to rows flattened to a matrix: for more dimensions torch picks another kernel, with other
    roundings, if gradients are needed."""
    return functional.linear(x.flatten(0, -2), linear.weight).view(*x.shape[:-1], -1)


Score = Product | Additive


def make_score(
    kind: ScoreKind, query_width: int, key_width: int, hidden: int, *, activation: Activation = "tanh"
) -> Score:
    """Build a score; only additive ones use `hidden` and `activation`."""
    assert kind in ("bilinear", "additive") or query_width == key_width
    match kind:
        case "dot":
            return Product(key_width, scaled=False)
        case "scaled-dot":
            return Product(key_width, scaled=True)
        case "bilinear":
            return Bilinear(query_width, key_width)
        case "additive":
            return Additive(query_width, key_width, hidden, activation)
