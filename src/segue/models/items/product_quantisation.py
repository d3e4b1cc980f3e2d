"""Vectors → a turn of them, and clusters of each of their parts: product quantisation that loses little.

Ge, He, Ke and Sun, "Optimized Product Quantization", CVPR 2013.
"""

from __future__ import annotations

import torch
from torch import Tensor

from segue.models.items.clusters import Clusters

ROUNDS, MEMBERS = 50, 64  # of learning, and vectors a cluster that it learns from


def turned_parts(
    vectors: Tensor, weights: Tensor, *, parts: int, values: int, generator: torch.Generator
) -> tuple[list[Tensor], list[Clusters]]:
    """The parts [n, X / parts] of vectors [n, X], and the clusters of each, at most `values`.

    The vectors are turned first, so that their parts are near the clusters: a turn and clusters for it are found by
    turns, from some of the vectors, which count by their `weights` [n].
    """
    mean = weights @ vectors / weights.sum()
    chosen = torch.randperm(len(vectors), generator=generator)[: MEMBERS * values]
    points, heavy = vectors[chosen] - mean, weights[chosen]
    turn = torch.linalg.qr(torch.randn(2 * points.shape[1:], generator=generator))[0]
    first = torch.multinomial(heavy, min(values, len(points)), generator=generator)
    found = [Clusters(part[first]) for part in (points @ turn).chunk(parts, dim=1)]
    for _ in range(ROUNDS):
        pieces = (points @ turn).chunk(parts, dim=1)
        found = [each.moved(piece, heavy) for each, piece in zip(found, pieces, strict=True)]
        near = torch.cat([each.centres[each.nearest(piece)] for each, piece in zip(found, pieces, strict=True)], dim=1)
        left, _, right = torch.linalg.svd((points * heavy[:, None]).T @ near)
        turn = left @ right
    return list(torch.addmm(-mean @ turn, vectors, turn).chunk(parts, dim=1)), found
