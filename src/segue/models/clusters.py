"""Points → clusters, and which of them a point is nearest to.

k-means (Lloyd, 1982), begun with points far apart (k-means++: Arthur and Vassilvitskii, SODA 2007).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

TURNS = 25
POINTS_A_CLUSTER = 64  # that centres are fitted to, at most: more do not move them
AT_A_TIME = 1 << 16  # points whose distances to all centres are in memory


@dataclass(frozen=True, slots=True, eq=False)
class Clusters:
    """Where the centres of clusters lie."""

    centres: Tensor  # [clusters, X]

    @classmethod
    def of(cls, points: Tensor, clusters: int, *, generator: torch.Generator) -> Clusters:
        """At most so many clusters of points [n, X], at least one point each."""
        some = torch.randperm(len(points), generator=generator)[: POINTS_A_CLUSTER * clusters]
        points = points[some]
        found = cls(_far_apart(points, clusters, generator))
        for _ in range(TURNS):
            found = cls(_means(points, torch.from_numpy(found.nearest(points)[:, 0]), found.centres))
        return found

    def nearest(self, points: Tensor, *, n: int = 1) -> np.ndarray:
        """The nearest clusters of points [n, X], the nearest first [n, n] int64; all of them where there are fewer."""
        n = min(n, len(self.centres))
        found = [
            torch.topk(torch.cdist(some, self.centres), n, dim=1, largest=False).indices
            for some in torch.split(points.contiguous(), AT_A_TIME)
        ]
        return torch.cat(found).numpy()


def _far_apart(points: Tensor, clusters: int, generator: torch.Generator) -> Tensor:
    """Points to begin with, each drawn by its squared distance to those before it; fewer where no others are left."""
    chosen = [int(torch.randint(len(points), (1,), generator=generator))]
    apart = (points - points[chosen[0]]).square().sum(1)
    while len(chosen) < clusters and apart.max() > 0:
        chosen.append(int(torch.multinomial(apart, 1, generator=generator)))
        apart = torch.minimum(apart, (points - points[chosen[-1]]).square().sum(1))
    return points[chosen]


def _means(points: Tensor, clusters: Tensor, centres: Tensor) -> Tensor:
    """The mean of each cluster's points; the old centre where it has none."""
    sums = torch.zeros_like(centres).index_add_(0, clusters, points)
    sizes = torch.bincount(clusters, minlength=len(centres))[:, None]
    return torch.where(sizes > 0, sums / sizes.clamp(min=1), centres)
