"""LambdaRank: a gradient that moves the ranks NDCG looks at."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

DEPTH = 4000  # items of a state that are looked at, best first
TOP = 50  # one of a pair is among so many: below, a swap changes no list that is shown
LEAST_GAP = 0.01  # added to the scores' distance where it divides, as LightGBM does
TILE_PAIRS = 1 << 20  # pairs at a time: 4 MB of float32


class _GradientOnly(torch.autograd.Function):
    """A number with a gradient that is not its own."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, gradient: Tensor, value: Tensor) -> Tensor:  # noqa: ARG004
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0], None, None


def lambdarank(
    scores: Tensor, rows: Tensor, items: Tensor, *, depth: int = DEPTH, top: int = TOP, sigma: float = 1.0
) -> Tensor:
    """LambdaRank: each answer is pushed up, and what is no answer down, by what swapping both would change in NDCG.

    Burges and others 2006; with recency sampling, Petrov and Macdonald 2022. A pair's push is σ(-sigma · Δs) · sigma ·
    |ΔNDCG| / (|Δs| + 0.01); all pushes of a state are scaled so that their sum grows like a logarithm.

    **The number is not what the gradient belongs to.** It is 1 - NDCG@top, the mean over states, to be looked at; its
    gradient in `scores` are the pushes, divided by the number of states. A gradient check fails, as it should.

    Needs: the scores of all items; no sampler.
    Inputs: scores [S, V]; the answers as pairs: the state rows[m] in 0..S-1 has the answer items[m] in 0..V-1 (a pair
    said twice counts once, a state may have any number). An item below `depth` in a state's order is not moved.
    When to choose it: several answers a state, as recency sampling has them, and a catalogue of some thousand items.
    Relations: without NDCG and scaling it would be `bpr` of all answers against all other items.
    """
    with torch.no_grad():
        relevant = torch.zeros_like(scores, dtype=torch.bool)
        relevant[rows, items] = True
        ranked = scores.topk(min(depth, scores.shape[1]), dim=1)
        hits = relevant.gather(1, ranked.indices)  # [S, N], best first
        discounts = 1 / torch.arange(2, hits.shape[1] + 2, dtype=scores.dtype, device=scores.device).log2()
        ideal = discounts[:top].cumsum(0)  # of one answer, of two, …
        ideal = ideal[relevant.sum(1).clamp(1, len(ideal)) - 1]  # [S], of all answers and not only of those in sight
        lost = 1 - (hits[:, :top] * discounts[:top]).sum(1) / ideal
        pushes = _pushes(ranked.values, hits, discounts / ideal[:, None], top=top, sigma=sigma) / len(scores)
        gradient = torch.zeros_like(scores).scatter_(1, ranked.indices, pushes)
    loss: Tensor = _GradientOnly.apply(scores, gradient, lost.mean())  # type: ignore[no-untyped-call]
    return loss


def _pushes(scores: Tensor, hits: Tensor, discounts: Tensor, *, top: int, sigma: float) -> Tensor:
    """The gradient [S, N] for scores in order; `discounts` [S, N] are what a rank is worth to the state's NDCG."""
    pushes = torch.zeros_like(scores)
    rows, ranks = hits.nonzero(as_tuple=True)
    # An answer in the top is compared with everything, any other with the top alone.
    for chosen, reach in ((ranks < top, scores.shape[1]), (ranks >= top, top)):
        for pairs in torch.split(chosen.nonzero()[:, 0], max(1, TILE_PAIRS // reach)):
            row, rank = rows[pairs], ranks[pairs]
            ahead = scores[row, rank, None] - scores[row, :reach]  # [P, reach]
            swap = (discounts[row, rank, None] - discounts[row, :reach]).abs()
            push = sigma * (-sigma * ahead).sigmoid() * swap / (ahead.abs() + LEAST_GAP)
            push.masked_fill_(hits[row, :reach], 0)  # two answers have no order
            pushes[:, :reach].index_add_(0, row, push)
            pushes.index_put_((row, rank), -push.sum(1), accumulate=True)
    total = pushes.abs().sum(1, keepdim=True)
    return pushes * (1 + total).log2() / total.clamp(min=torch.finfo(total.dtype).tiny)
