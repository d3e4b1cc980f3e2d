"""Packed tokens [T, D] and the right-padded view [B, N, D] that attention needs.

Everything but attention runs on packed tokens, one user's after another. N is the longest user's number of tokens. With
a causal mask, padding on the right is never attended to; without one, `may_attend` masks it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from segue.data.batch import Batch
from segue.layers.positions.time_buckets import time_buckets

MAX_PADDING = 1.5  # a batch of queries is padded if it then has at most so many times its tokens


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """A `Batch` as tensors. Indices are computed once per batch, at first use."""

    items: Tensor  # [T] int64
    times: Tensor  # [T] int64, seconds
    lengths: Tensor  # [B] int64, each at least 1
    query_times: Tensor | None = None  # [B] int64, seconds
    kinds: Tensor | None = None  # [T] int64
    values: Tensor | None = None  # [T] float32
    histories: Tensor | None = None  # [B] int64, each at least 1: events of the history; later ones continue it
    padded: bool = False  # T is B * N: every user has N rows, zeros after its own tokens

    @cached_property
    def size(self) -> int:
        return self.lengths.shape[0]

    @cached_property
    def longest(self) -> int:
        return int(self._counts.max())

    @cached_property
    def position(self) -> Tensor:
        """Position of each token, counted from the user's oldest token (0)."""
        return self._tensor(self._positions)  # [T]

    @cached_property
    def position_from_newest(self) -> Tensor:
        """Position of each token, counted from the user's newest token (0)."""
        rows = self.longest if self.padded else self._counts
        from_newest = np.repeat(self._counts - 1, rows) - self._positions
        return self._tensor(np.maximum(from_newest, 0) if self.padded else from_newest)  # [T]

    @cached_property
    def slot(self) -> Tensor:
        """Row of each token in the padded view flattened to [B * N]."""
        rows = np.arange(self.size) * self.longest
        return self._tensor(np.repeat(rows, self._counts) + self._positions)  # [T]

    @cached_property
    def rectangular(self) -> bool:
        """Whether the padded view is the packed one: users have equally many tokens, or the batch is padded."""
        return self.items.shape[0] == self.size * self.longest

    @cached_property
    def may_attend(self) -> Tensor | None:
        """True at tokens, False at padding [B, 1, 1, N]; None without padding."""
        if self._counts.min() == self.longest:
            return None
        return self._tensor(np.arange(self.longest) < self._counts[:, None])[:, None, None]

    @cached_property
    def last(self) -> Tensor:
        """Row of each user's newest token."""
        assert self._counts.min() > 0, "a user without events has no newest token"
        if self.padded:
            return self._tensor(np.arange(self.size) * self.longest + self._counts - 1)
        return self._tensor(np.cumsum(self._counts) - 1)  # [B]

    @cached_property
    def next_times(self) -> Tensor:
        """Time of the event after each token [T]. After the newest it is the query time, or the token's own time if no
        query time is known."""
        after = self.times.roll(-1)
        after[self.last] = self.times[self.last] if self.query_times is None else self.query_times
        return after

    @cached_property
    def buckets_at_next(self) -> Tensor:
        """Buckets of the time from token j to the event after token i, at row i and column j [B, N, N] int32;
        meaningless for j > i."""
        return self._buckets(self._padded(self.next_times)[:, :, None])

    @cached_property
    def buckets_at_own(self) -> Tensor:
        """Buckets of the time from token j to token i, at row i and column j [B, N, N] int32."""
        return self._buckets(self._padded(self.times)[:, :, None])

    def newest_buckets(self, *, at_next: bool) -> Tensor:
        """The row of each user's newest token in `buckets_at_next` or `buckets_at_own` [B, N]."""
        return self._buckets((self.next_times if at_next else self.times)[self.last][:, None])

    @cached_property
    def has_times(self) -> Tensor:
        """Whether each user's events have times [B]. All times of a history without any are 0."""
        return (self.times[self.last] != 0) | (self.times[self.last - self.lengths + 1] != 0)

    def per_token(self, values: Tensor) -> Tensor:
        """Repeat a value of each user [B] for each of its tokens [T]."""
        if self.padded:
            return values[:, None].expand(self.size, self.longest).flatten()
        return values.repeat_interleave(self.lengths)

    def with_padding(self) -> Self:
        """Pad the batch, so that no block moves tokens to the padded view and back, unless that adds too many rows.
        Then only each user's newest state is meaningful."""
        if self.rectangular or self.size * self.longest > MAX_PADDING * self.items.shape[0]:
            return self
        return self._with_tokens(self._spread, self.lengths, padded=True)

    def with_query_token(self, item: int) -> Self:
        """Append the token `item` to each user's tokens, at the query time if it is known. It is no event: it has no
        value, and its kind is 0, like that of a masked event."""
        newest = self.last  # asserts that every user has events
        times = self.times[newest] if self.query_times is None else self.query_times
        ends = self.lengths.cumsum(0).cpu().numpy()

        def append(tokens: Tensor, value: Any) -> Tensor:
            return torch.from_numpy(np.insert(tokens.cpu().numpy(), ends, value)).to(tokens.device)

        return self._appended(append, item, times.cpu().numpy())

    def _appended(self, append: Callable[[Tensor, Any], Tensor], item: int, times: Any) -> Self:
        """The batch with `append` applied to every tensor of tokens [T] and the query token's value of it."""
        return replace(
            self,
            items=append(self.items, item),
            times=append(self.times, times),
            lengths=self.lengths + 1,
            kinds=None if self.kinds is None else append(self.kinds, 0),
            values=None if self.values is None else append(self.values, np.nan),
            histories=None,
        )

    def with_tokens_twice(self) -> Self:
        """Repeat every token, right after itself."""
        return self._with_tokens(lambda tokens: tokens[:, None].expand(-1, 2).flatten(), self.lengths * 2)

    def _with_tokens(self, change: Callable[[Tensor], Tensor], lengths: Tensor, *, padded: bool = False) -> Self:
        """The batch with every tensor of tokens [T] changed in the same way; `padded`: it is padded now."""
        return replace(
            self,
            items=change(self.items),
            times=change(self.times),
            lengths=lengths,
            kinds=None if self.kinds is None else change(self.kinds),
            values=None if self.values is None else change(self.values),
            histories=None,
            padded=self.padded or padded,
        )

    def _buckets(self, until: Tensor) -> Tensor:
        """Buckets of the time from each token until the times [B, 1] or [B, N, 1] of its user."""
        times = self._padded(self.times)
        return time_buckets(until - (times if until.dim() == 2 else times[:, None]))

    def _padded(self, tokens: Tensor) -> Tensor:
        """[T] → [B, N], zeros after each user's last token."""
        return (tokens if self.rectangular else self._spread(tokens)).view(self.size, self.longest)

    def _spread(self, tokens: Tensor) -> Tensor:
        """[T] → [B * N]."""
        return tokens.new_zeros(self.size * self.longest).index_copy_(0, self.slot, tokens)

    # Indices are computed in numpy: for the few numbers of a batch of queries, a call of torch costs several times as
    # much as the work of numpy.
    @cached_property
    def _counts(self) -> np.ndarray:
        counts: np.ndarray = self.lengths.cpu().numpy()
        return counts

    @cached_property
    def _positions(self) -> np.ndarray:
        if self.padded:
            return np.tile(np.arange(self.longest), self.size)
        begins = np.cumsum(self._counts) - self._counts
        return np.asarray(np.arange(self.items.shape[0]) - np.repeat(begins, self._counts))

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.lengths.device)


def tensors(batch: Batch, device: torch.device | None = None) -> PackedBatch:
    """Convert a batch to tensors; on the CPU they share its memory."""

    def tensor(array: Any) -> Any:
        if array is None:
            return None
        return torch.from_numpy(array) if device is None else torch.from_numpy(array).to(device)

    return PackedBatch(
        items=tensor(batch.items),
        times=tensor(batch.times),
        lengths=tensor(batch.lengths),
        query_times=tensor(batch.query_times),
        kinds=tensor(batch.kinds),
        values=tensor(batch.values),
        histories=tensor(batch.histories),
    )


class _Pad(torch.autograd.Function):
    """Copy rows to their slots. Slots are distinct, so the gradient is a gather (index_add is far slower)."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, slot: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(slot)
        return packed.new_zeros(rows, packed.shape[1]).index_copy_(0, slot, packed)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (slot,) = ctx.saved_tensors
        return gradients[0].index_select(0, slot), None, None


class _Pack(torch.autograd.Function):
    """The inverse of `_Pad`; its gradient is `_Pad`'s forward."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, slot: Tensor) -> Tensor:
        ctx.save_for_backward(slot)
        ctx.rows = len(padded)
        return padded.index_select(0, slot)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (slot,) = ctx.saved_tensors
        gradient = gradients[0]
        return gradient.new_zeros(ctx.rows, gradient.shape[1]).index_copy_(0, slot, gradient), None


def pad(packed: Tensor, batch: PackedBatch) -> Tensor:
    """[T, D] → [B, N, D], zeros after each user's last token."""
    rows = batch.size * batch.longest
    padded = packed if batch.rectangular else _Pad.apply(packed, batch.slot, rows)  # type: ignore[no-untyped-call]
    return padded.view(batch.size, batch.longest, -1)


def pack(padded: Tensor, batch: PackedBatch) -> Tensor:
    """[B, N, D] → [T, D]."""
    flat = padded.reshape(batch.size * batch.longest, -1)
    if batch.rectangular:
        return flat
    packed: Tensor = _Pack.apply(flat, batch.slot)  # type: ignore[no-untyped-call]
    return packed
