"""Gaps in time → the bucket that each falls into: fine for seconds, coarse for years."""

from __future__ import annotations

import torch
from torch import Tensor

BUCKETS = 129
STEP = 0.301  # of the natural logarithm: a bucket begins 1.351 times as late as the one before it


def time_buckets(seconds: Tensor) -> Tensor:
    """The bucket 0 … 128 of each gap, int32; the direction of the gap does not matter."""
    logarithm = seconds.abs().clamp_(min=1).to(torch.float32).log_()
    return logarithm.div_(STEP).to(torch.int32).clamp_(max=BUCKETS - 1)


def _edges() -> list[int]:
    """The least whole seconds of each bucket, found by halving what lies between."""
    buckets = torch.arange(BUCKETS, dtype=torch.int32)
    low, high = torch.zeros(BUCKETS, dtype=torch.int64), torch.full((BUCKETS,), 1 << 61)
    while bool((low < high).any()):
        middle = (low + high) // 2
        reached = time_buckets(middle) >= buckets
        low, high = torch.where(reached, low, middle + 1), torch.where(reached, middle, high)
    return low.tolist()


EDGES = _edges()


def time_buckets_by_edges(seconds: Tensor) -> Tensor:
    """The same, wherever the logarithm is computed: that of another runtime may differ in its last bit, which at the
    edge of a bucket is another bucket. So the seconds at which buckets begin have the last word."""
    gaps = seconds.abs()
    edges = torch.tensor([*EDGES, torch.iinfo(torch.int64).max])
    guess = (gaps.clamp(min=1).to(torch.float32).log() / STEP).to(torch.int64).clamp(max=BUCKETS - 1)
    exact = guess - (gaps < edges[guess]).to(torch.int64) + (gaps >= edges[guess + 1]).to(torch.int64)
    return exact.to(torch.int32)
