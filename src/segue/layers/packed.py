"""Packed tokens ↔ the padded view that attention needs.

Everything but attention runs on [T, D], the users' tokens one after another. Attention sees [B, N, D], N the
longest of the batch, padded on the right: with a causal mask no valid query can then see padding, and without one
`may_attend` says where the tokens are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from segue.data.batch import Batch
from segue.layers.positions.time_buckets import time_buckets

MAX_PADDING = 1.5  # times its tokens: a batch of questions is laid out with room for its longest up to this size


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """A `Batch` as tensors. Index arithmetic is done once a batch, when first asked for."""

    items: Tensor  # [T] int64
    times: Tensor  # [T] int64, seconds
    lengths: Tensor  # [B] int64, each at least 1
    query_times: Tensor | None = None  # [B] int64, seconds
    kinds: Tensor | None = None  # [T] int64
    values: Tensor | None = None  # [T] float32
    histories: Tensor | None = None  # [B] int64, each at least 1: events that are history; those after continue it
    padded: bool = False  # T is B * N: each user has room for the longest one's tokens, zeros after its own

    @cached_property
    def size(self) -> int:
        return self.lengths.shape[0]

    @cached_property
    def longest(self) -> int:
        return int(self._counts.max())

    @cached_property
    def position(self) -> Tensor:
        """Counted from the user's oldest token, which is 0."""
        return self._tensor(self._places)  # [T]

    @cached_property
    def position_from_newest(self) -> Tensor:
        """Counted from the user's newest token, which is 0."""
        rows = self.longest if self.padded else self._counts
        from_newest = np.repeat(self._counts - 1, rows) - self._places
        return self._tensor(np.maximum(from_newest, 0) if self.padded else from_newest)  # [T]

    @cached_property
    def slot(self) -> Tensor:
        """Each token's row in the padded view, flattened to [B * N]."""
        rows = np.arange(self.size) * self.longest
        return self._tensor(np.repeat(rows, self._counts) + self._places)  # [T]

    @cached_property
    def rectangular(self) -> bool:
        """The padded view is the packed one: users are equally long, or there is room for the longest already."""
        return self.items.shape[0] == self.size * self.longest

    @cached_property
    def may_attend(self) -> Tensor | None:
        """True at tokens, False at padding [B, 1, 1, N]; None where there is no padding."""
        if self._counts.min() == self.longest:
            return None
        return self._tensor(np.arange(self.longest) < self._counts[:, None])[:, None, None]

    @cached_property
    def last(self) -> Tensor:
        """Each user's newest token."""
        assert self._counts.min() > 0, "a user without events has no newest token: this would be another's"
        if self.padded:
            return self._tensor(np.arange(self.size) * self.longest + self._counts - 1)
        return self._tensor(np.cumsum(self._counts) - 1)  # [B]

    @cached_property
    def next_times(self) -> Tensor:
        """When each user's next event was, of the newest when the question is asked: its own time where that is not
        known [T]."""
        after = self.times.roll(-1)
        after[self.last] = self.times[self.last] if self.query_times is None else self.query_times
        return after

    @cached_property
    def buckets_at_next(self) -> Tensor:
        """How much time lies between a user's tokens and the moment after each [B, N, N] int32: row i, column j is
        from j to the event after i. Of columns later than the row it means nothing."""
        return self._buckets(self._padded(self.next_times)[:, :, None])

    @cached_property
    def buckets_at_own(self) -> Tensor:
        """The same from token j to token i itself."""
        return self._buckets(self._padded(self.times)[:, :, None])

    @cached_property
    def newest_buckets_at_next(self) -> Tensor:
        """The row of each user's newest token in `buckets_at_next` [B, N]."""
        return self._buckets(self.next_times[self.last][:, None])

    @cached_property
    def newest_buckets_at_own(self) -> Tensor:
        """The row of each user's newest token in `buckets_at_own` [B, N]."""
        return self._buckets(self.times[self.last][:, None])

    @cached_property
    def has_times(self) -> Tensor:
        """Whether each user's events have times [B]: a history without any has zeros."""
        return (self.times[self.last] != 0) | (self.times[self.last - self.lengths + 1] != 0)

    def per_token(self, users: Tensor) -> Tensor:
        """What each user has [B] as what each of its tokens has [T]."""
        if self.padded:
            return users[:, None].expand(self.size, self.longest).flatten()
        return users.repeat_interleave(self.lengths)

    def with_padding(self) -> PackedBatch:
        """The same users with zeros after each one's tokens, so that no block moves tokens to the padded view and
        back; as it is where that would be much more to encode. Only each user's newest state is of use then."""
        if self.rectangular or self.size * self.longest > MAX_PADDING * self.items.shape[0]:
            return self
        return PackedBatch(
            items=self._spread(self.items),
            times=self._spread(self.times),
            lengths=self.lengths,
            query_times=self.query_times,
            kinds=None if self.kinds is None else self._spread(self.kinds),
            values=None if self.values is None else self._spread(self.values),
            padded=True,
        )

    def with_query_token(self, item: int) -> PackedBatch:
        """The same users, each with one token more after its newest: `item`, at the moment asked about if it is known.

        It is no event: it has no value, and its kind is 0, as that of an event that is hidden.
        """
        newest = self.last  # refuses users without events
        ends = self.lengths.cumsum(0).cpu().numpy()

        def joined(tokens: Tensor, question: Any) -> Tensor:
            return torch.from_numpy(np.insert(tokens.cpu().numpy(), ends, question)).to(tokens.device)

        return PackedBatch(
            items=joined(self.items, item),
            times=joined(
                self.times, (self.times[newest] if self.query_times is None else self.query_times).cpu().numpy()
            ),
            lengths=self.lengths + 1,
            query_times=self.query_times,
            kinds=None if self.kinds is None else joined(self.kinds, 0),
            values=None if self.values is None else joined(self.values, np.nan),
        )

    def with_tokens_twice(self) -> PackedBatch:
        """The same users with every token twice, one right after the other."""
        return PackedBatch(
            items=self.items.repeat_interleave(2),
            times=self.times.repeat_interleave(2),
            lengths=self.lengths * 2,
            query_times=self.query_times,
            kinds=None if self.kinds is None else self.kinds.repeat_interleave(2),
            values=None if self.values is None else self.values.repeat_interleave(2),
        )

    def _buckets(self, moments: Tensor) -> Tensor:
        """Of the gaps between a user's tokens and its moments [B, 1] or [B, N, 1]."""
        times = self._padded(self.times)
        return time_buckets(moments - (times if moments.dim() == 2 else times[:, None]))

    def _padded(self, tokens: Tensor) -> Tensor:
        """[T] → [B, N], zeros after each user's last token."""
        return (tokens if self.rectangular else self._spread(tokens)).view(self.size, self.longest)

    def _spread(self, tokens: Tensor) -> Tensor:
        return tokens.new_zeros(self.size * self.longest).index_copy_(0, self.slot, tokens)

    # Indexes are computed in numpy: of a batch of questions they are a few numbers each, and torch takes several times
    # as long to begin as numpy takes to finish.
    @cached_property
    def _counts(self) -> np.ndarray:
        counts: np.ndarray = self.lengths.cpu().numpy()
        return counts

    @cached_property
    def _places(self) -> np.ndarray:
        if self.padded:
            return np.tile(np.arange(self.longest), self.size)
        begins = np.cumsum(self._counts) - self._counts
        return np.asarray(np.arange(self.items.shape[0]) - np.repeat(begins, self._counts))

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.lengths.device)


def tensors(batch: Batch, device: torch.device | None = None) -> PackedBatch:
    """A batch as tensors; on the CPU they share its memory."""

    def tensor(array: Any) -> Tensor | None:
        if array is None:
            return None
        return torch.from_numpy(array) if device is None else torch.from_numpy(array).to(device)

    items, times, lengths = tensor(batch.items), tensor(batch.times), tensor(batch.lengths)
    assert items is not None and times is not None and lengths is not None
    return PackedBatch(
        items=items,
        times=times,
        lengths=lengths,
        query_times=tensor(batch.query_times),
        kinds=tensor(batch.kinds),
        values=tensor(batch.values),
        histories=tensor(batch.histories),
    )


class _Pad(torch.autograd.Function):
    """Rows to their slots. The slots are distinct, so the gradient is a plain gather (index_add is far slower)."""

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
