"""Training histories, or learned item vectors → codes of items.

Codes are assigned once, before training, stored in the run, and never change. An item unseen in training has zeros
until a warm start assigns codes to it. For learned codes, training/item_codes.py first trains a small model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from segue.data.batch import ragged_rows
from segue.data.sequences import Sequences
from segue.models.items.clusters import Clusters
from segue.models.items.occurrences import Occurrences, torch_generator

NOISE = 1e-3  # of the length of the clustered features: equal items are spread over clusters at random
PIECE = 10  # consecutive events of a history that count as close together
FEATURES_A_PART = 4  # twice as many were no better on MovieLens-1M
POPULARITY_WEIGHT = 2.0  # of the log count of an item against any other feature
ROUNDS, MEMBERS = 25, 64  # rounds of k-means, and sampled items per cluster
ROTATIONS = 50  # rounds that fit a rotation and clusters alternately
PUSHES = 3  # rounds that separate items with equal codes; the rest is counted in the manifest


def assigned_codes(
    sequences: Sequences, ends: np.ndarray, n_items: int, *, parts: int, values: int, seed: int
) -> np.ndarray:
    """Codes [V + 1, parts] uint8 by clusters of items that are close together in histories before `ends` [U].

    The matrix has a row for each piece of a history. A part has several features and its code is the item's cluster
    among them, as in product quantisation: with one feature per part, most of the code would go to a few features.
    """
    begins, ends = np.asarray(sequences.offsets)[:-1], np.asarray(ends)
    counts = -(-(ends - begins) // PIECE)  # the last piece of a history may be shorter
    begins = np.repeat(begins, counts) + PIECE * ragged_rows(np.zeros_like(counts), counts)
    ends = np.minimum(begins + PIECE, np.repeat(ends, counts))
    occurrences = Occurrences.of(sequences.items, begins, ends, n_items)
    rng, trained = np.random.default_rng(seed), occurrences.trained()
    codes = np.zeros((n_items + 1, parts), dtype=np.uint8)
    if len(trained):
        features = _features(occurrences, trained, parts * FEATURES_A_PART, rng)
        generator, count = torch_generator(rng), min(values, n_items)
        of_part = [features[:, part::parts] for part in range(parts)]
        clusters = [Clusters.of(each, count, rounds=ROUNDS, members=MEMBERS, generator=generator) for each in of_part]
        codes[trained] = _nearest(of_part, clusters, rng)
    return codes


def learned_codes(vectors: Tensor, counts: np.ndarray, *, parts: int, values: int, seed: int) -> np.ndarray:
    """Codes [V + 1, parts] uint8 of learned item vectors [V + 1, X]; `counts` [V + 1] are training events. Popular
    items have more weight, because most targets are popular."""
    rng, trained = np.random.default_rng(seed), np.flatnonzero(counts)
    codes, values = np.zeros((len(counts), parts), dtype=np.uint8), min(values, len(counts) - 1)
    if len(trained):
        weights = torch.from_numpy(counts[trained]).to(vectors).sqrt()
        generator = torch_generator(rng)
        rotated = rotated_parts(vectors[trained], weights, parts=parts, values=values, generator=generator)
        codes[trained] = _nearest(*rotated, rng)
    return codes


def rotated_parts(
    vectors: Tensor, weights: Tensor, *, parts: int, values: int, generator: torch.Generator
) -> tuple[list[Tensor], list[Clusters]]:
    """Rotate vectors [n, X] and split them into parts [n, X / parts]; these, and at most `values` clusters of each:
    Ge, He, Ke and Sun, "Optimized Product Quantization", CVPR 2013. Rotation and clusters are fitted alternately, to a
    random sample of the vectors weighted by `weights` [n]."""
    mean = weights @ vectors / weights.sum()
    sample = torch.randperm(len(vectors), generator=generator)[: MEMBERS * values]
    points, point_weights = vectors[sample] - mean, weights[sample]
    rotation = torch.linalg.qr(torch.randn(2 * points.shape[1:], generator=generator))[0]
    first = torch.multinomial(point_weights, min(values, len(points)), generator=generator)
    clusters = [Clusters(part[first]) for part in (points @ rotation).chunk(parts, dim=1)]
    for _ in range(ROTATIONS):
        pieces = (points @ rotation).chunk(parts, dim=1)
        clusters = [each.moved(piece, point_weights) for each, piece in zip(clusters, pieces, strict=True)]
        nearest = [each.centres[each.nearest(piece)] for each, piece in zip(clusters, pieces, strict=True)]
        left, _, right = torch.linalg.svd((points * point_weights[:, None]).T @ torch.cat(nearest, dim=1))
        rotation = left @ right
    return list(torch.addmm(-mean @ rotation, vectors, rotation).chunk(parts, dim=1)), clusters


def _nearest(of_part: Sequence[Tensor], clusters: Sequence[Clusters], rng: np.random.Generator) -> np.ndarray:
    """The nearest cluster of each part [n, X]; of items with equal codes, the second nearest in a random part."""
    parts = len(of_part)
    codes = np.stack([each.nearest(own).numpy() for each, own in zip(clusters, of_part, strict=True)], axis=1)
    codes, first_part = codes.astype(np.uint8), rng.integers(0, parts, len(codes))
    for push in range(PUSHES):
        repeated = np.delete(np.arange(len(codes)), np.unique(_joined(codes), return_index=True)[1])
        part_of = (first_part[repeated] + push) % parts
        for part, each in enumerate(clusters):
            items = repeated[part_of == part]
            codes[items, part] = each.second_nearest(of_part[part][items])
    return codes


def _features(occurrences: Occurrences, trained: np.ndarray, width: int, rng: np.random.Generator) -> Tensor:
    """Features of items [n, width]: normalised directions, and the log count.

    Popular items have less weight in the matrix, or all directions would be theirs; but no item has much more than the
    average, or a few items of one history would have directions of their own (as in regularised spectral clustering).
    """
    counts = occurrences.counts()
    directions, sizes = occurrences.directions(width, rng, weights=(counts + counts[trained].mean()).rsqrt())
    features = directions[trained].mul_(sizes)
    del directions
    features[:, 0] = 0  # the first direction is mostly popularity, which the log count replaces
    features /= features.norm(dim=1, keepdim=True).clamp_(min=1e-12)
    popularity = counts[trained].log()
    popularity = (popularity - popularity.mean()) / (popularity.std(correction=0) + 1e-6)
    features[:, 0] = POPULARITY_WEIGHT * popularity / width**0.5
    generator = torch_generator(rng)
    for feature in features.T:
        feature.add_(torch.randn(feature.shape, generator=generator), alpha=NOISE)
    return features


def shared_codes(codes: np.ndarray, numbers: np.ndarray) -> int:
    """The number of these items that have all codes in common with another of them."""
    _, sizes = np.unique(_joined(codes[numbers]), return_counts=True)
    return int(sizes[sizes > 1].sum())


def _joined(codes: np.ndarray) -> np.ndarray:
    """All codes of an item as one value."""
    rows = np.ascontiguousarray(codes)
    return rows.view(np.dtype((np.void, rows.shape[1])))[:, 0]
