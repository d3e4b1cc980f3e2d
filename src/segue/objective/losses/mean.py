"""Weighted means over the losses of rows."""

from __future__ import annotations

from torch import Tensor


def shares(weights: Tensor | None, like: Tensor) -> Tensor:
    """The weights of the rows of `like`, scaled to sum to one. None: equal weights."""
    if weights is None:
        return like.new_full((len(like),), 1 / len(like))
    return weights / weights.sum()


def weighted_mean(losses: Tensor, weights: Tensor | None) -> Tensor:
    return (losses * shares(weights, losses)).sum()
