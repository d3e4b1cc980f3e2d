"""Elapsed seconds → logarithmic time buckets."""

from __future__ import annotations

import torch
from torch import Tensor

BUCKETS = 129
STEP = 0.301  # of the natural logarithm: the lower edge of a bucket is 1.351 times that of the bucket before it


def time_buckets(seconds: Tensor) -> Tensor:
    """The bucket 0 … 128 of each time difference, whatever its sign; int32."""
    logarithm = seconds.abs().clamp_(min=1).to(torch.float32).log_()
    return logarithm.div_(STEP).to(torch.int32).clamp_(max=BUCKETS - 1)


def _edges() -> list[int]:
    """The least whole seconds of each bucket, by bisection."""
    buckets = torch.arange(BUCKETS, dtype=torch.int32)
    low, high = torch.zeros(BUCKETS, dtype=torch.int64), torch.full((BUCKETS,), 1 << 61)
    while bool((low < high).any()):
        middle = (low + high) // 2
        reached = time_buckets(middle) >= buckets
        low, high = torch.where(reached, low, middle + 1), torch.where(reached, middle, high)
    return low.tolist()


EDGES = _edges()


def time_buckets_by_edges(seconds: Tensor) -> Tensor:
    """`time_buckets`, exactly, in any runtime. Another runtime's logarithm may differ in the last bit, which changes
    the bucket at an edge, so the guess is corrected by comparing with `EDGES`."""
    gaps = seconds.abs()
    edges = torch.tensor([*EDGES, torch.iinfo(torch.int64).max])
    guess = (gaps.clamp(min=1).to(torch.float32).log() / STEP).to(torch.int64).clamp(max=BUCKETS - 1)
    exact = guess - (gaps < edges[guess]).to(torch.int64) + (gaps >= edges[guess + 1]).to(torch.int64)
    return exact.to(torch.int32)
