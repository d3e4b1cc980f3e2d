"""Windows as a rectangle, in tensors alone: what a model is traced with, so that a graph can be made of it.

A packed batch computes its indexes outside torch, where a graph would take them for constants. Here every user has
room for `room` tokens, those after its own mean nothing, and each index is a tensor made from the lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from segue.layers.packed import PackedBatch
from segue.layers.positions.time_buckets import time_buckets_by_edges


@dataclass(frozen=True, eq=False)
class PaddedBatch(PackedBatch):
    """A batch with room for the longest user. Sizes may be symbols; lengths may be anything in 1 … room."""

    room: int = field(kw_only=True)
    """Tokens that each user has room for."""

    @staticmethod
    def of(
        items: Tensor,  # [B, N] int64, oldest first, anything that is an item's number or 0 after a user's tokens
        lengths: Tensor,  # [B] int64
        times: Tensor,  # [B, N] int64, seconds
        query_times: Tensor,  # [B] int64, seconds
        values: Tensor,  # [B, N] float32, nan where there is none
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
            room=items.shape[1],
        )

    @cached_property
    def longest(self) -> int:
        return self.room

    @cached_property
    def position(self) -> Tensor:
        return self._place.expand(self.size, self.room).flatten()

    @cached_property
    def position_from_newest(self) -> Tensor:
        return (self.lengths[:, None] - 1 - self._place).clamp(min=0).flatten()

    @cached_property
    def slot(self) -> Tensor:
        return torch.arange(self.size * self.room, device=self.lengths.device)

    @cached_property
    def rectangular(self) -> bool:
        return True

    @cached_property
    def may_attend(self) -> Tensor:
        return (self._place < self.lengths[:, None])[:, None, None]

    @cached_property
    def last(self) -> Tensor:
        return torch.arange(self.size, device=self.lengths.device) * self.room + self.lengths - 1

    @cached_property
    def next_times(self) -> Tensor:
        times, newest = self._padded(self.times), self._place == self.lengths[:, None] - 1
        assert self.query_times is not None
        return torch.where(newest, self.query_times[:, None], times.roll(-1, dims=1)).flatten()

    def with_padding(self) -> PaddedBatch:
        return self

    def with_query_token(self, item: int) -> PaddedBatch:
        assert self.query_times is not None
        place = torch.arange(self.room + 1, device=self.lengths.device)
        here = place == self.lengths[:, None]  # [B, N + 1]

        def joined(tokens: Tensor, question: Any) -> Tensor:
            padded = self._padded(tokens)
            return torch.where(here, question, torch.cat((padded, padded[:, :1]), dim=1)).flatten()

        return replace(
            self,
            items=joined(self.items, item),
            times=joined(self.times, self.query_times[:, None]),
            lengths=self.lengths + 1,
            kinds=None if self.kinds is None else joined(self.kinds, 0),
            values=None if self.values is None else joined(self.values, torch.nan),
            room=self.room + 1,
        )

    def with_tokens_twice(self) -> PaddedBatch:
        return replace(
            self,
            items=_twice(self.items),
            times=_twice(self.times),
            lengths=self.lengths * 2,
            kinds=None if self.kinds is None else _twice(self.kinds),
            values=None if self.values is None else _twice(self.values),
            room=self.room * 2,
        )

    def _buckets(self, moments: Tensor) -> Tensor:
        times = self._padded(self.times)
        return time_buckets_by_edges(moments - (times if moments.dim() == 2 else times[:, None]))

    def _padded(self, tokens: Tensor) -> Tensor:
        return tokens.view(self.size, self.room)

    @cached_property
    def _place(self) -> Tensor:
        return torch.arange(self.room, device=self.lengths.device)


def tracing() -> bool:
    """Whether a graph is made of what is computed: then there are no loops over users or tiles, and no gradients."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined,no-untyped-call]


def _twice(tokens: Tensor) -> Tensor:
    """Every token twice, one right after the other."""
    return tokens[:, None].expand(-1, 2).flatten()
