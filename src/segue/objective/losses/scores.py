"""Questions, answers and drawn items → the scores a sampled loss takes, temperature, log q and collisions done.

`groups` and `own` say which drawn items are answers: see `collisions.py`.
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
    answers: Tensor,
    drawn: Tensor,
    targets: Tensor,
    items: Tensor,
    *,
    temperature: float = 1.0,
    log_q: tuple[Tensor, Tensor] | None = None,
    groups: Tensor | None = None,
    own: Own | None = None,
) -> tuple[Tensor, Tensor]:
    """Scores for negatives that are shared by the batch: the answers' [M] and the negatives' [M, K].

    `answers` [M, I] and `drawn` [K, I] are what `queries` [M, Q] are compared with, of `targets` [M] and `items` [K].
    The scores are divided by the temperature; `log_q`, of the targets [M] and of the items [K], is what the sampler's
    preference is worth and is subtracted. A negative that is an answer is no negative: its score is -inf.
    """
    if isinstance(similarity, Dot):
        queries = queries / temperature  # the narrow side: over the scores it would be a pass more
        positive = (queries * answers).sum(1)
        negatives = queries @ drawn.T if log_q is None else torch.addmm(-log_q[1].to(queries.dtype), queries, drawn.T)
    else:
        positive = similarity.own(queries, answers[:, None])[:, 0] / temperature
        negatives = similarity.score(queries, drawn) / temperature
        if log_q is not None:
            negatives = negatives - log_q[1]
    if log_q is not None:
        positive = positive - log_q[0]
    negatives[shared_collisions(targets, items, groups, own).pairs(slice(0, len(targets)))] = -math.inf
    return positive, negatives


def own_scores(
    similarity: Similarity,
    queries: Tensor,
    answers: Tensor,
    drawn: Tensor,
    targets: Tensor,
    items: Tensor,
    *,
    temperature: float = 1.0,
    log_q: tuple[Tensor, Tensor] | None = None,
    groups: Tensor | None = None,
    own: Own | None = None,
) -> tuple[Tensor, Tensor]:
    """Scores for negatives that each row has for itself: as `shared_scores`, with `drawn` [M, K, I], `items` [M, K].

    `log_q` is that of the targets [M] and of the items [M, K].
    """
    if isinstance(similarity, Dot):
        queries = queries / temperature
        positive, negatives = (queries * answers).sum(1), similarity.own(queries, drawn)
    else:
        positive = similarity.own(queries, answers[:, None])[:, 0] / temperature
        negatives = similarity.own(queries, drawn) / temperature
    if log_q is not None:
        positive = positive - log_q[0]
        negatives = negatives - log_q[1]
    return positive, negatives.masked_fill(own_collisions(targets, items, groups, own), -math.inf)
