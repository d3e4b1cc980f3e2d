"""Scalable cross-entropy: states and items that lie near each other are found first, then only those are compared."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from segue.objective.losses.mean import shares

ITEMS = 256  # items of a bucket, the authors' usual choice
TILE_ITEMS = 1 << 16  # items at a time when a bucket's are looked for: the scores of all of them are never in memory


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
    """Cross-entropy of the softmax over the answer and the items of a bucket; a state in several has its largest loss.

    Mezentsev and others 2024. A bucket is a random direction with the states and the items furthest along it; there
    the wrong items that score highest are found, and these are what the full softmax mostly consists of. States in no
    bucket are left out of the weighted mean.

    Needs: scores that are inner products; no sampler.
    Inputs: states [M, D], item vectors [V, D], each state's item [M] in 0..V-1, weights [M]; how many `buckets`, each
    of so many `states` (both 2√M unless said) and `items`; `mix` draws directions among combinations of the states.
    When to choose it: catalogues too large for `full_softmax`, where hard negatives are worth more than many.
    Relations: buckets that hold every state and every item are `full_softmax`.
    """
    usual = int(2 * math.sqrt(len(hidden)))
    places, columns = _buckets(
        hidden,
        matrix,
        generator,
        buckets=usual if buckets is None else buckets,
        states=min(usual if states is None else states, len(hidden)),
        items=min(items, len(matrix)),
        mix=mix,
    )
    losses = _bucket_losses(hidden, matrix, targets, places, columns)
    places = places.flatten()
    largest = losses.new_zeros(len(hidden)).scatter_reduce(0, places, losses.flatten(), "amax", include_self=False)
    # Which states are covered is said by the buckets: a loss of exactly 0 is a loss too.
    covered = torch.zeros_like(largest).index_fill(0, places, 1) * shares(weights, hidden)
    return (largest * covered).sum() / covered.sum().clamp(min=torch.finfo(covered.dtype).tiny)


@torch.no_grad()
def _buckets(
    hidden: Tensor, matrix: Tensor, generator: torch.Generator, *, buckets: int, states: int, items: int, mix: bool
) -> tuple[Tensor, Tensor]:
    """Each bucket's states [N, X] and items [N, Y], by number. Only directions matter, so that none has a scale."""
    drawn = torch.randn(buckets, len(hidden) if mix else hidden.shape[1], generator=generator, dtype=hidden.dtype)
    centres = drawn.to(hidden.device)
    if mix:
        centres = centres @ hidden
    return (centres @ hidden.T).topk(states).indices, _furthest(centres, matrix, items)


def _furthest(centres: Tensor, matrix: Tensor, count: int) -> Tensor:
    """The `count` items with the largest products [N, count]: the best of each tile, and of these the best."""
    values, numbers = [], []
    for begin in range(0, len(matrix), TILE_ITEMS):
        products = centres @ matrix[begin : begin + TILE_ITEMS].T
        best = products.topk(min(count, products.shape[1]))
        values.append(best.values)
        numbers.append(best.indices + begin)
    return torch.cat(numbers, 1).gather(1, torch.cat(values, 1).topk(count).indices)


def _bucket_losses(hidden: Tensor, matrix: Tensor, targets: Tensor, places: Tensor, columns: Tensor) -> Tensor:
    """-log p of each bucket's states [N, X] among the bucket's items and the state's own."""
    scores = torch.bmm(hidden[places], matrix[columns].transpose(1, 2))  # [N, X, Y]
    answer = (hidden * matrix[targets]).sum(1)[places]  # [N, X]
    there = (targets[places][:, :, None] == columns[:, None]).any(2)  # where its answer is already in the sum
    sums = scores.logsumexp(2)
    return torch.where(there, sums, torch.logaddexp(sums, answer)) - answer
