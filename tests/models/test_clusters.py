"""Clusters of points: planted ones are found, and the nearest are the nearest."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from segue.models import clusters
from segue.models.clusters import Clusters


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(st.integers(0, 2**32))
def test_planted_clusters_are_found(seed: int) -> None:
    """Nine heaps far apart: each is a cluster, and its centre the mean of its points."""
    heaps = torch.cartesian_prod(torch.arange(3.0), torch.arange(3.0)) * 100
    points = heaps.repeat_interleave(12, dim=0) + torch.randn(108, 2, generator=seeded(seed))
    found = Clusters.of(points, 9, generator=seeded(seed + 1))
    names = found.nearest(points)[:, 0].reshape(9, 12)
    assert (names == names[:, :1]).all() and sorted(names[:, 0].tolist()) == list(range(9))
    torch.testing.assert_close(found.centres[names[:, 0]], points.view(9, 12, 2).mean(1))


def test_means_by_hand() -> None:
    """0, 1 and 10, 12, 14: from whichever two points it begins, the means are .5 and 12."""
    points = torch.tensor([[0.0], [1.0], [10.0], [12.0], [14.0]])
    for seed in range(20):
        centres = Clusters.of(points, 2, generator=seeded(seed)).centres[:, 0]
        assert sorted(centres.tolist()) == [0.5, 12.0]


def test_the_nearest_are_those_of_all_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "AT_A_TIME", 7)
    points, centres = torch.randn(50, 3, generator=seeded(1)), torch.randn(11, 3, generator=seeded(2))
    distances = np.linalg.norm(points.numpy()[:, None] - centres.numpy()[None], axis=2)
    assert np.array_equal(Clusters(centres).nearest(points, n=4), np.argsort(distances, axis=1)[:, :4])


def test_fewer_different_points_than_clusters() -> None:
    points = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).repeat(5, 1)
    found = Clusters.of(points, 8, generator=seeded(1))
    assert sorted(found.centres.tolist()) == [[1.0, 2.0], [3.0, 4.0]]
    assert found.nearest(points, n=5).shape == (10, 2)


def test_many_points_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "POINTS_A_CLUSTER", 5)
    points = torch.tensor([[0.0], [100.0]]).repeat(200, 1) + torch.rand(400, 1, generator=seeded(1))
    found = Clusters.of(points, 2, generator=seeded(2))
    assert (found.nearest(points)[0::2] != found.nearest(points)[1::2]).all()
