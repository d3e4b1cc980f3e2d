"""Clusters of points, as k-means defines them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.models.items import clusters
from segue.models.items.clusters import Clusters


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_means_by_hand() -> None:
    """0, 1 and 10, 12, 14: from any two initial points, the means are .5 and 12."""
    points = torch.tensor([[0.0], [1.0], [10.0], [12.0], [14.0]])
    for seed in range(20):
        result = Clusters.of(points, 2, rounds=9, members=9, generator=seeded(seed))
        assert sorted(result.centres[:, 0].tolist()) == [0.5, 12.0]


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.integers(1, 9), st.integers(1, 40))
def test_a_centre_is_the_mean_of_its_nearest_points(seed: int, count: int, n: int) -> None:
    points = torch.randn(n, 2, generator=seeded(seed), dtype=torch.float64)
    result = Clusters.of(points, count, rounds=60, members=n, generator=seeded(seed + 1))
    centres, owners = result.centres.numpy(), result.nearest(points).numpy()
    assert len(centres) == min(count, n)
    distances = np.linalg.norm(points.numpy()[:, None] - centres[None], axis=2)
    assert np.allclose(distances[np.arange(n), owners], distances.min(1))
    for one in set(owners.tolist()):
        assert np.allclose(points.numpy()[owners == one].mean(0), centres[one])


def test_heavy_points_attract_a_centre() -> None:
    """(1 · 0 + 3 · 1) / 4 = .75; nothing is near 30, which stays."""
    points, weights = torch.tensor([[0.0], [1.0], [10.0]]), torch.tensor([1.0, 3.0, 5.0])
    moved = Clusters(torch.tensor([[0.0], [9.0], [30.0]])).moved(points, weights)
    assert moved.centres[:, 0].tolist() == [0.75, 10.0, 30.0]


def test_the_nearest_centres_have_the_least_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "TILE_PRODUCTS", 77)
    points, centres = torch.randn(50, 3, generator=seeded(1)), torch.randn(11, 3, generator=seeded(2))
    order = np.argsort(np.linalg.norm(points.numpy()[:, None] - centres.numpy()[None], axis=2), axis=1)
    assert np.array_equal(Clusters(centres).nearest(points), order[:, 0])
    assert np.array_equal(Clusters(centres).second_nearest(points), order[:, 1])
    assert not Clusters(centres[:1]).second_nearest(points).any()


def test_many_points_are_sampled() -> None:
    """A cluster of one sampled point stays there."""
    points = torch.randn(400, 2, generator=seeded(1))
    result = Clusters.of(points, 5, rounds=3, members=1, generator=seeded(2))
    assert torch.equal(result.centres, points[torch.randperm(400, generator=seeded(2))[:5]])
