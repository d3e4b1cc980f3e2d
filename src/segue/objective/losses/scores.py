"""Queries, targets and negatives → the scores of a sampled loss, with temperature, log q and collisions applied.

`groups` and `own` determine which sampled items are no negatives: see `collisions.py`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from segue.models.similarity.dot import Dot, Similarity
from segue.objective.samplers.collisions import Own, own_collisions, shared_collisions


def shared_scores(
    similarity: Similarity,
    queries: Tensor,
    target_vectors: Tensor,
    negative_vectors: Tensor,
    targets: Tensor,
    items: Tensor,
    *,
    temperature: float = 1.0,
    log_q: tuple[Tensor, Tensor] | None = None,
    groups: Tensor | None = None,
    own: Own | None = None,
) -> tuple[Tensor, Tensor]:
    """Scores of the targets [M] and of negatives that the batch shares [M, K].

    `queries` [M, Q]; `target_vectors` [M, I] are those of `targets` [M], `negative_vectors` [K, I] of `items` [K].
    Scores are divided by the temperature; `log_q` of targets [M] and items [K] is subtracted. Collisions are -inf.
    """
    if isinstance(similarity, Dot):
        queries = queries / temperature  # fewer numbers than the scores
        positive = (queries * target_vectors).sum(1)
        columns = negative_vectors.T
        negatives = queries @ columns if log_q is None else torch.addmm(-log_q[1].to(queries.dtype), queries, columns)
    else:
        positive = similarity.own(queries, target_vectors[:, None])[:, 0] / temperature
        negatives = similarity.score(queries, negative_vectors) / temperature
        if log_q is not None:
            negatives = negatives - log_q[1]
    if log_q is not None:
        positive = positive - log_q[0]
    negatives[shared_collisions(targets, items, groups, own).pairs(slice(0, len(targets)))] = -math.inf
    return positive, negatives


def own_scores(
    similarity: Similarity,
    queries: Tensor,
    target_vectors: Tensor,
    negative_vectors: Tensor,
    targets: Tensor,
    items: Tensor,
    *,
    temperature: float = 1.0,
    log_q: tuple[Tensor, Tensor] | None = None,
    groups: Tensor | None = None,
    own: Own | None = None,
) -> tuple[Tensor, Tensor]:
    """As `shared_scores`, with negatives of each row: `negative_vectors` [M, K, I], `items` and `log_q` [M, K]."""
    if isinstance(similarity, Dot):
        queries = queries / temperature
        positive, negatives = (queries * target_vectors).sum(1), similarity.own(queries, negative_vectors)
    else:
        positive = similarity.own(queries, target_vectors[:, None])[:, 0] / temperature
        negatives = similarity.own(queries, negative_vectors) / temperature
    if log_q is not None:
        positive = positive - log_q[0]
        negatives = negatives - log_q[1]
    return positive, negatives.masked_fill(own_collisions(targets, items, groups, own), -math.inf)
