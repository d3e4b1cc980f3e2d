"""Rows' losses and weights → one number."""

from __future__ import annotations

from torch import Tensor


def shares(weights: Tensor | None, like: Tensor) -> Tensor:
    """Each row's part of the mean over the rows of `like`; they add up to one. None: all alike."""
    if weights is None:
        return like.new_full((len(like),), 1 / len(like))
    return weights / weights.sum()


def user_weights(weights: Tensor, users: Tensor) -> Tensor:
    """The weights [M] of the users' rows [M], made so that each user's add up to one: all users count the same."""
    return weights / weights.new_zeros(int(users.max()) + 1).index_add(0, users, weights)[users]


def weighted_mean(losses: Tensor, weights: Tensor | None) -> Tensor:
    return (losses * shares(weights, losses)).sum()
