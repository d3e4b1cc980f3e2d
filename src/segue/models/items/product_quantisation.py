"""Optimised product quantisation: Ge, He, Ke and Sun, "Optimized Product Quantization", CVPR 2013."""

from __future__ import annotations

import torch
from torch import Tensor

from segue.models.items.clusters import Clusters

ROUNDS, MEMBERS = 50, 64  # rounds, and sampled vectors a cluster


def rotated_parts(
    vectors: Tensor, weights: Tensor, *, parts: int, values: int, generator: torch.Generator
) -> tuple[list[Tensor], list[Clusters]]:
    """Rotate vectors [n, X] and split them into parts [n, X / parts]; these, and at most `values` clusters of each.

    Rotation and clusters are fitted alternately, to a random sample of the vectors weighted by `weights` [n], so that
    parts are near their clusters.
    """
    mean = weights @ vectors / weights.sum()
    sample = torch.randperm(len(vectors), generator=generator)[: MEMBERS * values]
    points, point_weights = vectors[sample] - mean, weights[sample]
    rotation = torch.linalg.qr(torch.randn(2 * points.shape[1:], generator=generator))[0]
    first = torch.multinomial(point_weights, min(values, len(points)), generator=generator)
    clusters = [Clusters(part[first]) for part in (points @ rotation).chunk(parts, dim=1)]
    for _ in range(ROUNDS):
        pieces = (points @ rotation).chunk(parts, dim=1)
        clusters = [each.moved(piece, point_weights) for each, piece in zip(clusters, pieces, strict=True)]
        nearest = [each.centres[each.nearest(piece)] for each, piece in zip(clusters, pieces, strict=True)]
        left, _, right = torch.linalg.svd((points * point_weights[:, None]).T @ torch.cat(nearest, dim=1))
        rotation = left @ right
    return list(torch.addmm(-mean @ rotation, vectors, rotation).chunk(parts, dim=1)), clusters
