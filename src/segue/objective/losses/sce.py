"""Scalable cross-entropy: the softmax over buckets of states and items that lie near each other."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from segue.objective.losses.mean import shares

ITEMS = 256  # items of a bucket, the authors' usual choice
TILE_ITEMS = 1 << 16  # items of a tile in the search for a bucket's items: all scores are never in memory at once


def sce(
    hidden: Tensor,
    matrix: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
    *,
    generator: torch.Generator,
    buckets: int | None = None,
    states: int | None = None,
    items: int = ITEMS,
    mix: bool = False,
) -> Tensor:
    """Cross-entropy of the softmax over the target and the items of a bucket; a state in several has its largest loss.

    Mezentsev and others 2024. A bucket holds the states and the items with the largest products with a random
    direction. It is likely to hold the highest-scoring items of its states, the largest terms of the full softmax.
    States in no bucket are left out of the weighted mean.

    Needs: scores that are inner products; no sampler.
    Inputs: states [M, D], item vectors [V, D], each state's item [M] in 0..V-1, weights [M]; the number of
    `buckets`, and of `states` (both 2√M by default) and `items` in each; `mix`: directions are random combinations of
    the states.
    When to choose it: catalogues too large for `full_softmax`, if hard negatives matter more than many.
    Relations: buckets that hold every state and every item are `full_softmax`.
    """
    default = int(2 * math.sqrt(len(hidden)))
    rows, columns = _buckets(
        hidden,
        matrix,
        generator,
        buckets=default if buckets is None else buckets,
        states=min(default if states is None else states, len(hidden)),
        items=min(items, len(matrix)),
        mix=mix,
    )
    losses = _bucket_losses(hidden, matrix, targets, rows, columns)
    rows = rows.flatten()
    largest = losses.new_zeros(len(hidden)).scatter_reduce(0, rows, losses.flatten(), "amax", include_self=False)
    # Covered states are those of the buckets, not those with a loss above 0: a loss may be exactly 0.
    covered = torch.zeros_like(largest).index_fill(0, rows, 1) * shares(weights, hidden)
    return (largest * covered).sum() / covered.sum().clamp(min=torch.finfo(covered.dtype).tiny)


@torch.no_grad()
def _buckets(
    hidden: Tensor, matrix: Tensor, generator: torch.Generator, *, buckets: int, states: int, items: int, mix: bool
) -> tuple[Tensor, Tensor]:
    """The rows of each bucket's states [N, X] and items [N, Y]. The scale of a direction does not matter."""
    normal = torch.randn(buckets, len(hidden) if mix else hidden.shape[1], generator=generator, dtype=hidden.dtype)
    centres = normal.to(hidden.device)
    if mix:
        centres = centres @ hidden
    return (centres @ hidden.T).topk(states).indices, _furthest(centres, matrix, items)


def _furthest(centres: Tensor, matrix: Tensor, count: int) -> Tensor:
    """The `count` items with the largest products [N, count]: the best of the best of each tile."""
    values, numbers = [], []
    for begin in range(0, len(matrix), TILE_ITEMS):
        products = centres @ matrix[begin : begin + TILE_ITEMS].T
        best = products.topk(min(count, products.shape[1]))
        values.append(best.values)
        numbers.append(best.indices + begin)
    return torch.cat(numbers, 1).gather(1, torch.cat(values, 1).topk(count).indices)


def _bucket_losses(hidden: Tensor, matrix: Tensor, targets: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """-log p of each bucket's states [N, X] among the bucket's items and the state's target."""
    scores = torch.bmm(hidden[rows], matrix[columns].transpose(1, 2))  # [N, X, Y]
    target_scores = (hidden * matrix[targets]).sum(1)[rows]  # [N, X]
    included = (targets[rows][:, :, None] == columns[:, None]).any(2)  # the target is one of the bucket's items
    sums = scores.logsumexp(2)
    return torch.where(included, sums, torch.logaddexp(sums, target_scores)) - target_scores
