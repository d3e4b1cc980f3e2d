"""Assignments of item codes to compare with segue's own: by singular vectors (RecJPQ) and at random."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal
from unittest.mock import patch

import numpy as np

from segue.data.sequences import Sequences
from segue.models.items.occurrences import Occurrences

Method = Literal["svd", "random"]
NOISE = 1e-5  # of features scaled to [0, 1]: equal items are spread over bins at random


@contextmanager
def assigned_by(method: Method | None) -> Iterator[None]:
    """Within the block, trainings with codes assign them by this method; None leaves segue's own."""
    if method is None:
        yield
        return

    def assigned(
        sequences: Sequences, ends: np.ndarray, n_items: int, *, parts: int, values: int, seed: int
    ) -> np.ndarray:
        return codes(sequences, ends, n_items, parts=parts, values=values, seed=seed, method=method)

    with patch("segue.training.item_codes.assigned_codes", assigned):
        yield


def codes(
    sequences: Sequences, ends: np.ndarray, n_items: int, *, parts: int, values: int, seed: int, method: Method
) -> np.ndarray:
    """Codes [V + 1, parts] uint8 from users' events before `ends` [U]; zeros for items without any."""
    occurrences = Occurrences.of(sequences.items, np.asarray(sequences.offsets)[:-1], np.asarray(ends), n_items)
    rng, with_events = np.random.default_rng(seed), occurrences.trained()
    result = np.zeros((n_items + 1, parts), dtype=np.uint8)
    if len(with_events):
        features = FEATURES[method](occurrences, with_events, parts, rng)
        result[with_events] = np.stack([even_bins(feature, min(values, n_items)) for feature in features], axis=1)
    return result


def _singular_vectors(
    occurrences: Occurrences, with_events: np.ndarray, parts: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """RecJPQ's own: one singular vector of the matrix of users and items for each part."""
    features = occurrences.directions(parts, rng)[0].numpy()[with_events].T
    noise = NOISE * rng.standard_normal(features.shape)
    return [_scaled(feature) + by for feature, by in zip(features, noise, strict=True)]


def _random_features(_: Occurrences, with_events: np.ndarray, parts: int, rng: np.random.Generator) -> list[np.ndarray]:
    return [rng.random(len(with_events)) for _ in range(parts)]


FEATURES: dict[Method, Callable[[Occurrences, np.ndarray, int, np.random.Generator], list[np.ndarray]]] = {
    "svd": _singular_vectors,
    "random": _random_features,
}


def _scaled(feature: np.ndarray) -> np.ndarray:
    """The feature scaled from 0, its minimum, to 1."""
    feature = feature.astype(np.float64)
    low, high = feature.min(initial=np.inf), feature.max(initial=-np.inf)
    return (feature - low) / (high - low) if high > low else np.zeros_like(feature)


def even_bins(feature: np.ndarray, values: int) -> np.ndarray:
    """Each item's bin [n] uint8 in the order of a feature [n]; the sizes of bins differ by at most one."""
    bins = np.empty(len(feature), dtype=np.uint8)
    bins[np.argsort(feature, kind="stable")] = np.arange(len(feature)) * values // max(len(feature), 1)
    return bins
