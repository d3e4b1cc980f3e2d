"""Batches small enough to count by hand, and a bound for chi-square tests."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from segue.data.batch import Batch
from segue.layers.packed import PackedBatch, tensors


def batch_of(*lengths: int) -> PackedBatch:
    """Users with histories of these lengths; layers do not use the items."""
    total = sum(lengths)
    return tensors(
        Batch(
            items=np.arange(1, total + 1),
            times=np.arange(total),
            lengths=np.array(lengths, dtype=np.int64),
        )
    )


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def assert_close(actual: Tensor, expected: Tensor | Sequence[Sequence[float]], atol: float) -> None:
    expected_tensor = expected if isinstance(expected, Tensor) else torch.tensor(expected, dtype=actual.dtype)
    torch.testing.assert_close(actual, expected_tensor, rtol=0, atol=atol)


def most_chi_square(cells: int) -> float:
    """The 99.9 % quantile of the chi-square statistic over this many cells (Wilson and Hilferty)."""
    freedom = cells - 1
    return freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
