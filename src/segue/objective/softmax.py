"""Softmax losses: full over the catalogue, in tiles; sampled, over a few drawn items."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from segue.objective.mean import shares, weighted_mean

TILE_SCORES = 1 << 20  # scores of a tile: 4 MB of float32, so that a tile stays in the cache between its passes
LEAST_SURE = 80.0  # -log p beyond which a probability is read no longer: float32 ends near 87
LEAST_TILE = 64  # below this many rows matrix products lose their speed


class _FullSoftmax(torch.autograd.Function):
    """Each tile's share of both gradients is computed while its probabilities are in the cache."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, matrix: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        rows = max(LEAST_TILE, TILE_SCORES // len(matrix))
        with_gradient = any(ctx.needs_input_grad)
        d_hidden = torch.empty_like(hidden) if with_gradient else None
        d_matrix = torch.zeros_like(matrix) if with_gradient else None
        scores = hidden.new_empty(min(rows, len(hidden)), len(matrix))
        total = hidden.new_zeros(())
        losses = torch.empty_like(weights)
        for begin in range(0, len(hidden), rows):
            states, answers = hidden[begin : begin + rows], targets[begin : begin + rows, None]
            weight = weights[begin : begin + rows, None]
            tile = scores[: len(states)]
            torch.mm(states, matrix.T, out=tile)
            lost = losses[begin : begin + rows]
            lost.copy_(_surprise(tile, answers, states, matrix))  # leaves probabilities in the tile
            total += (lost * weight[:, 0]).sum()
            if d_hidden is not None and d_matrix is not None:
                tile.scatter_add_(1, answers, -torch.ones_like(weight))
                # The weights scale the narrow sides of the products: a pass over the tile is what costs.
                torch.mm(tile, matrix, out=d_hidden[begin : begin + rows])
                d_hidden[begin : begin + rows] *= weight
                d_matrix.addmm_(tile.T, states * weight)
        ctx.save_for_backward(d_hidden, d_matrix, losses)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, Tensor]:
        d_hidden, d_matrix, losses = ctx.saved_tensors
        return d_hidden * gradients[0], d_matrix * gradients[0], None, losses * gradients[0]


def _surprise(tile: Tensor, answers: Tensor, states: Tensor, matrix: Tensor) -> Tensor:
    """-log p of each row's answer; the scores in `tile` are replaced by probabilities."""
    torch.softmax(tile, 1, out=tile)
    surprise = -tile.gather(1, answers)[:, 0].log()
    lost = torch.nonzero(surprise > LEAST_SURE)[:, 0]  # so unlikely that float32 has no digits left: rare, so exactly
    if len(lost):
        exact = (states[lost] @ matrix.T).log_softmax(1)
        surprise[lost] = -exact.gather(1, answers[lost])[:, 0]
    return surprise


def full_softmax(hidden: Tensor, matrix: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Cross-entropy of the softmax over every item: -s_target + log Σ exp s, weighted mean over the rows.

    Needs: scores that are inner products; no sampler.
    Inputs: states [M, D], item vectors [V, D], each state's item [M] in 0..V-1, weights [M]. The logits exist one tile
    at a time, forward and backward together.
    When to choose it: up to some ten thousand items.
    Relations: `sampled_softmax` with every item as a negative; `sce` with buckets that hold everything.
    """
    weights = shares(weights, hidden)
    loss: Tensor = _FullSoftmax.apply(hidden, matrix, targets, weights)  # type: ignore[no-untyped-call]
    return loss


def sampled_softmax(positive: Tensor, negatives: Tensor, weights: Tensor | None = None) -> Tensor:
    """Cross-entropy of the positive among itself and drawn negatives, weighted mean over the rows.

    Needs: a sampler; scores already corrected by log q, collisions already at -inf (see `scores.py`).
    Inputs: the answers' scores [M], the negatives' [M, K], weights [M].
    When to choose it: large catalogues, with hundreds to thousands of negatives that the batch shares.
    Relations: with every item drawn once and the collision masked it is `full_softmax`; with one negative, `bpr`.
    """
    lead = torch.cat((torch.zeros_like(positive)[:, None], negatives - positive[:, None]), dim=1)
    return weighted_mean(lead.logsumexp(1), weights)  # finite even if all negatives collide
