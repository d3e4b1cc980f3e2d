"""A padded batch made of tensor operations only, for tracing a model to a graph.

A packed batch computes its indices in numpy, which tracing would turn into constants. Here every user has `capacity`
rows, rows after its own tokens are meaningless, and each index is a tensor computed from the lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from segue.layers.packed import PackedBatch
from segue.layers.positions.time_buckets import time_buckets_by_edges


@dataclass(frozen=True, eq=False)
class PaddedBatch(PackedBatch):
    """A batch of users with `capacity` rows each. Sizes may be symbolic; lengths are in 1 … capacity."""

    capacity: int = field(kw_only=True)
    """Rows of each user."""

    @staticmethod
    def of(
        items: Tensor,  # [B, N] int64, oldest first; after a user's tokens any item number or 0
        lengths: Tensor,  # [B] int64
        times: Tensor,  # [B, N] int64, seconds
        query_times: Tensor,  # [B] int64, seconds
        values: Tensor,  # [B, N] float32, nan: no value
        kinds: Tensor | None = None,  # [B, N] int64
    ) -> PaddedBatch:
        return PaddedBatch(
            items=items.flatten(),
            times=times.flatten(),
            lengths=lengths,
            query_times=query_times,
            kinds=None if kinds is None else kinds.flatten(),
            values=values.flatten(),
            padded=True,
            capacity=items.shape[1],
        )

    @cached_property
    def longest(self) -> int:
        return self.capacity

    @cached_property
    def position(self) -> Tensor:
        return self._positions_in_row.expand(self.size, self.capacity).flatten()

    @cached_property
    def position_from_newest(self) -> Tensor:
        return (self.lengths[:, None] - 1 - self._positions_in_row).clamp(min=0).flatten()

    @cached_property
    def slot(self) -> Tensor:
        return torch.arange(self.size * self.capacity, device=self.lengths.device)

    @cached_property
    def rectangular(self) -> bool:
        return True

    @cached_property
    def may_attend(self) -> Tensor:
        return (self._positions_in_row < self.lengths[:, None])[:, None, None]

    @cached_property
    def last(self) -> Tensor:
        return torch.arange(self.size, device=self.lengths.device) * self.capacity + self.lengths - 1

    @cached_property
    def next_times(self) -> Tensor:
        times, newest = self._padded(self.times), self._positions_in_row == self.lengths[:, None] - 1
        assert self.query_times is not None
        return torch.where(newest, self.query_times[:, None], times.roll(-1, dims=1)).flatten()

    def with_padding(self) -> Self:
        return self

    def with_query_token(self, item: int) -> Self:
        assert self.query_times is not None
        is_query = torch.arange(self.capacity + 1, device=self.lengths.device) == self.lengths[:, None]  # [B, N + 1]

        def append(tokens: Tensor, value: Any) -> Tensor:
            padded = self._padded(tokens)
            return torch.where(is_query, value, torch.cat((padded, padded[:, :1]), dim=1)).flatten()

        return replace(self._appended(append, item, self.query_times[:, None]), capacity=self.capacity + 1)

    def with_tokens_twice(self) -> Self:
        return replace(super().with_tokens_twice(), capacity=self.capacity * 2)

    def _buckets(self, until: Tensor) -> Tensor:
        times = self._padded(self.times)
        return time_buckets_by_edges(until - (times if until.dim() == 2 else times[:, None]))

    def _padded(self, tokens: Tensor) -> Tensor:
        return tokens.view(self.size, self.capacity)

    @cached_property
    def _positions_in_row(self) -> Tensor:
        return torch.arange(self.capacity, device=self.lengths.device)


def tracing() -> bool:
    """Whether torch traces the computation to a graph: then it has no loops over users or tiles, and no gradients."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined,no-untyped-call]
