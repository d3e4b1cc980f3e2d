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
