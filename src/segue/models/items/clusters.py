"""k-means clustering (Lloyd, 1982)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

TILE_PRODUCTS = 250_000  # of points and centres at a time, so that they stay in the cache


@dataclass(frozen=True, slots=True, eq=False)
class Clusters:
    """The centres of clusters."""

    centres: Tensor  # [clusters, X]

    @staticmethod
    def of(points: Tensor, count: int, *, rounds: int, members: int, generator: torch.Generator) -> Clusters:
        """At most `count` clusters of points [n, X], fitted in `rounds` to a random sample of `members` points a
        cluster; its first points are the initial centres."""
        sample = points[torch.randperm(len(points), generator=generator)[: members * count]]
        clusters = Clusters(sample[:count])
        for _ in range(rounds):
            clusters = clusters.moved(sample)
        return clusters

    def moved(self, points: Tensor, weights: Tensor | None = None) -> Clusters:
        """Move each centre to the mean of its nearest points [n, X], weighted by `weights` [n]; without points it
        stays."""
        owners = self.nearest(points)
        sizes = torch.bincount(owners, weights, minlength=len(self.centres)).to(points)[:, None]
        sums = torch.zeros_like(self.centres).index_add_(
            0, owners, points if weights is None else points * weights[:, None]
        )
        return Clusters(torch.where(sizes > 0, sums / sizes.where(sizes > 0, 1), self.centres))

    def nearest(self, points: Tensor) -> Tensor:
        """The nearest cluster of each point [n]."""
        return torch.cat([products.max(1).indices for products in self._closeness(points)])

    def second_nearest(self, points: Tensor) -> Tensor:
        """The second nearest cluster of each point [n]; the nearest if there is only one."""
        n = min(2, len(self.centres))
        return torch.cat([products.topk(n, dim=1).indices[:, -1] for products in self._closeness(points)])

    def _closeness(self, points: Tensor) -> Iterator[Tensor]:
        """Closeness of points to each centre [some, clusters], some points at a time: minus half the squared distance,
        up to a constant of the point."""
        lengths = self.centres.square().sum(1) / 2
        for some in torch.split(points, max(1, TILE_PRODUCTS // len(self.centres))):
            yield torch.addmm(-lengths, some, self.centres.T)
