"""Questions, answers and drawn items → the scores a sampled loss takes, temperature, log q and collisions done.

Some losses want several answers of one state. They are rows with the same number in `groups`, and a drawn item that
is any of them is no negative for any of them. Without groups each row has its own answer alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from segue.models.similarity import Dot, Similarity


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
    negatives[shared_collisions(targets, items, groups)] = -math.inf
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
    return positive, negatives.masked_fill(_own_collisions(targets, items, groups), -math.inf)


def shared_collisions(targets: Tensor, items: Tensor, groups: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows, ascending, and columns of [M, K] where the item is an answer of the row. They are few: no mask of that size
    is made."""
    if groups is None:
        return _matches(targets, items)
    rows, others = _matches(groups, groups)
    pairs, columns = _matches(targets[others], items)
    return rows[pairs], columns


def _own_collisions(targets: Tensor, items: Tensor, groups: Tensor | None) -> Tensor:
    """A mask [M, K] of the items that are answers of their row."""
    if groups is None:
        return targets[:, None] == items
    stride = torch.maximum(targets.max(), items.max()) + 1
    answers = (groups * stride + targets).sort().values
    wanted = groups[:, None] * stride + items
    found: Tensor = answers[torch.searchsorted(answers, wanted).clamp_(max=len(answers) - 1)] == wanted
    return found


def _matches(wanted: Tensor, among: Tensor) -> tuple[Tensor, Tensor]:
    """Every pair (i, j) with wanted[i] == among[j]."""
    order = among.argsort()
    ordered = among[order]
    first = torch.searchsorted(ordered, wanted)
    counts = torch.searchsorted(ordered, wanted, right=True) - first
    owners = torch.arange(len(wanted), device=wanted.device).repeat_interleave(counts)
    places = torch.arange(len(owners), device=wanted.device) + (first + counts - counts.cumsum(0))[owners]
    return owners, order[places]
