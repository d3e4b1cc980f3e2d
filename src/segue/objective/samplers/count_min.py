"""How often each item has come by, counted in memory that does not grow with the catalogue."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

PRIME = (1 << 31) - 1  # item numbers lie below it, and a product of two numbers below it fits into 64 bits
HASHES = 20140514  # where the rows' hashes come from: the same in every process, so that counts can be taken up again


class CountMin:
    """A count-min sketch (Cormode and Muthukrishnan 2005): rows of counters, in each of which an item has one.

    An item shares its counters with others, and the smallest of them is the estimate: never below the true count, and
    above it by more than `epsilon` of all that was counted with a probability of at most `delta`.
    """

    def __init__(self, *, epsilon: float, delta: float) -> None:
        width, depth = math.ceil(math.e / epsilon), max(1, math.ceil(math.log(1 / delta)))
        rng = np.random.default_rng(HASHES)
        self._factors = torch.from_numpy(rng.integers(1, PRIME, (depth, 1)))
        self._shifts = torch.from_numpy(rng.integers(0, PRIME, (depth, 1)))
        self.counts = torch.zeros(depth, width, dtype=torch.int64)
        """All there is to keep."""

    @property
    def total(self) -> int:
        """Items counted, with repeats: each is in every row once."""
        return int(self.counts[0].sum())

    def add(self, items: Tensor) -> None:
        """Count item numbers [N], each as often as it is there."""
        cells = self._cells(items)
        self.counts.scatter_add_(1, cells, torch.ones_like(cells))

    def estimate(self, items: Tensor) -> Tensor:
        """How often these item numbers [N] have been counted, at least [N] int64."""
        return self.counts.gather(1, self._cells(items)).amin(0)

    def _cells(self, items: Tensor) -> Tensor:
        """Each item's counter in each row [depth, N]."""
        return (self._factors * items + self._shifts) % PRIME % self.counts.shape[1]
