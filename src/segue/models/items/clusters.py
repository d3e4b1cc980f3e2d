"""Points → clusters, and which of them a point is nearest to: k-means (Lloyd, 1982)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

TILE_PRODUCTS = 250_000  # of points and centres, in memory at a time, so that they stay in the cache


@dataclass(frozen=True, slots=True, eq=False)
class Clusters:
    """Where the centres of clusters lie."""

    centres: Tensor  # [clusters, X]

    @staticmethod
    def of(points: Tensor, count: int, *, rounds: int, members: int, generator: torch.Generator) -> Clusters:
        """At most `count` clusters of points [n, X], learned in so many rounds from as many points as give each so many
        `members`, and begun with some of them."""
        sample = points[torch.randperm(len(points), generator=generator)[: members * count]]
        found = Clusters(sample[:count])
        for _ in range(rounds):
            found = found.moved(sample)
        return found

    def moved(self, points: Tensor, weights: Tensor | None = None) -> Clusters:
        """Each to the mean of the points [n, X] that are nearest to it, by their `weights` [n] where these are given;
        where there are none it stays."""
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
        """The cluster next to a point's own [n]; its own where there is no other."""
        n = min(2, len(self.centres))
        return torch.cat([products.topk(n, dim=1).indices[:, -1] for products in self._closeness(points)])

    def _closeness(self, points: Tensor) -> Iterator[Tensor]:
        """Of some points at a time, how close they are to each centre [some, clusters]: half of what the squares of
        their distances differ by, less being further."""
        lengths = self.centres.square().sum(1) / 2
        for some in torch.split(points, max(1, TILE_PRODUCTS // len(self.centres))):
            yield torch.addmm(-lengths, some, self.centres.T)
