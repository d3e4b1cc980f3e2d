"""LambdaRank: a gradient that improves NDCG."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from segue.objective.losses.softmax import GradientFunction

DEPTH = 4000  # items of a state that get a gradient, best first
TOP = 50  # one item of each pair is among these: a swap below them changes no list that is shown
LEAST_GAP = 0.01  # added to the score difference before dividing by it, as LightGBM does
TILE_PAIRS = 1 << 20  # pairs at a time: 4 MB of float32


class _GradientOnly(GradientFunction):
    """A value with a given gradient, which is not its derivative."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, gradient: Tensor, value: Tensor) -> Tensor:  # noqa: ARG004
        ctx.save_for_backward(gradient, None, None)
        return value.clone()


def lambdarank(
    scores: Tensor, rows: Tensor, items: Tensor, *, depth: int = DEPTH, top: int = TOP, sigma: float = 1.0
) -> Tensor:
    """LambdaRank: for each pair of a target and another item, a gradient weighted by the change of NDCG if both swap.

    Burges and others 2006; with recency sampling, Petrov and Macdonald 2022. The lambda of a pair is
    σ(-sigma · Δs) · sigma · |ΔNDCG| / (|Δs| + 0.01). Lambdas of a state are scaled: their sum grows like a logarithm.

    **The gradient is not the derivative of the value.** The value, for display, is 1 - NDCG@top, the mean over states.
    The gradient by `scores` is the lambdas divided by the number of states. So a gradient check fails.

    Needs: the scores of all items; no sampler.
    Inputs: scores [S, V]; targets as pairs: the state rows[m] in 0..S-1 has the target items[m] in 0..V-1 (repeated
    pairs count once, a state may have any number). An item ranked below `depth` has no gradient.
    When to choose it: several targets per state, as with recency sampling, and a catalogue of some thousand items.
    Relations: without NDCG and scaling it would be `bpr` of all targets against all other items.
    """
    with torch.no_grad():
        relevant = torch.zeros_like(scores, dtype=torch.bool)
        relevant[rows, items] = True
        best = scores.topk(min(depth, scores.shape[1]), dim=1)
        hits = relevant.gather(1, best.indices)  # [S, N], best first
        discounts = 1 / torch.arange(2, hits.shape[1] + 2, dtype=scores.dtype, device=scores.device).log2()
        ideal = discounts[:top].cumsum(0)  # of one target, of two, …
        ideal = ideal[relevant.sum(1).clamp(1, len(ideal)) - 1]  # [S], of all targets, also those below `depth`
        losses = 1 - (hits[:, :top] * discounts[:top]).sum(1) / ideal
        lambdas = _lambdas(best.values, hits, discounts / ideal[:, None], top=top, sigma=sigma) / len(scores)
        gradient = torch.zeros_like(scores).scatter_(1, best.indices, lambdas)
    loss: Tensor = _GradientOnly.apply(scores, gradient, losses.mean())  # type: ignore[no-untyped-call]
    return loss


def _lambdas(scores: Tensor, hits: Tensor, discounts: Tensor, *, top: int, sigma: float) -> Tensor:
    """The gradient [S, N] of descending scores; `discounts` [S, N]: the gain of each rank in the state's NDCG."""
    lambdas = torch.zeros_like(scores)
    rows, ranks = hits.nonzero(as_tuple=True)
    # A target in the top is paired with all items, any other only with the top.
    for selected, n_others in ((ranks < top, scores.shape[1]), (ranks >= top, top)):
        for pairs in torch.split(selected.nonzero()[:, 0], max(1, TILE_PAIRS // n_others)):
            row, rank = rows[pairs], ranks[pairs]
            lead = scores[row, rank, None] - scores[row, :n_others]  # [P, n_others]
            swap = (discounts[row, rank, None] - discounts[row, :n_others]).abs()
            pair_lambdas = sigma * (-sigma * lead).sigmoid() * swap / (lead.abs() + LEAST_GAP)
            pair_lambdas.masked_fill_(hits[row, :n_others], 0)  # targets are not compared with each other
            lambdas[:, :n_others].index_add_(0, row, pair_lambdas)
            lambdas.index_put_((row, rank), -pair_lambdas.sum(1), accumulate=True)
    total = lambdas.abs().sum(1, keepdim=True)
    return lambdas * (1 + total).log2() / total.clamp(min=torch.finfo(total.dtype).tiny)
