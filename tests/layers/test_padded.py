"""The rectangle of tensors against the packed batch of the same users."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from segue.data.batch import Batch
from segue.layers.packed import PackedBatch, tensors
from segue.layers.padded import PaddedBatch
from segue.layers.positions import time_buckets as module
from segue.layers.positions.time_buckets import EDGES, time_buckets, time_buckets_by_edges

NAMES = ("items", "times", "values", "position", "position_from_newest", "next_times")
PAIRS = ("buckets_at_next", "buckets_at_own")

lengths_of_users = st.lists(st.integers(1, 6), min_size=1, max_size=4)


def both(lengths: list[int], seed: int = 0) -> tuple[PackedBatch, PaddedBatch]:
    """The same users packed and as a rectangle, which has arbitrary numbers after a user's own."""
    rng, events = np.random.default_rng(seed), sum(lengths)
    packed = tensors(
        Batch(
            items=rng.integers(1, 50, events),
            times=rng.integers(0, 10**9, events),
            lengths=np.array(lengths),
            query_times=rng.integers(10**9, 2 * 10**9, len(lengths)),
            values=rng.choice([np.nan, 1, 2], events).astype(np.float32),
        )
    )
    inside = torch.arange(max(lengths)) < packed.lengths[:, None]

    def spread(events: Tensor) -> Tensor:
        return torch.full(inside.shape, 7, dtype=events.dtype).masked_scatter(inside, events)

    values, query_times = packed.values, packed.query_times
    assert values is not None and query_times is not None
    return packed, PaddedBatch.of(
        spread(packed.items), packed.lengths, spread(packed.times), query_times, spread(values)
    )


def assert_equal(packed: PackedBatch, padded: PaddedBatch) -> None:
    """At users' own tokens every property is the same."""
    inside = (torch.arange(padded.longest) < packed.lengths[:, None]).flatten()
    assert (padded.size, padded.longest, padded.rectangular) == (packed.size, packed.longest, True)
    assert torch.equal(padded.lengths, packed.lengths)
    for name in NAMES:
        assert_same(getattr(padded, name)[inside], getattr(packed, name))
    assert_same(padded.items[padded.last], packed.items[packed.last])
    mask = torch.ones(packed.size, 1, 1, packed.longest, dtype=torch.bool)
    assert_same(padded.may_attend, mask if packed.may_attend is None else packed.may_attend)
    own = inside.view(packed.size, -1)
    pairs = own[:, :, None] & own[:, None]
    for name in PAIRS:
        assert_same(getattr(padded, name)[pairs], getattr(packed, name)[pairs])
    for at_next in (True, False):
        assert_same(padded.newest_buckets(at_next=at_next)[own], packed.newest_buckets(at_next=at_next)[own])


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=15)
@given(lengths_of_users)
def test_a_rectangle_equals_the_packed_batch(lengths: list[int]) -> None:
    packed, padded = both(lengths)
    assert_equal(packed, padded)
    assert padded.with_padding() is padded


@settings(max_examples=15)
@given(lengths_of_users)
def test_a_rectangle_grows_like_the_packed_batch(lengths: list[int]) -> None:
    packed, padded = both(lengths)
    assert_equal(packed.with_query_token(99), padded.with_query_token(99))
    assert_equal(packed.with_tokens_twice(), padded.with_tokens_twice())
    assert_equal(packed.with_query_token(99).with_tokens_twice(), padded.with_query_token(99).with_tokens_twice())


@given(st.lists(st.integers(-(2**40), 2**40), min_size=1))
def test_buckets_by_their_edges(gaps: list[int]) -> None:
    assert torch.equal(time_buckets_by_edges(torch.tensor(gaps)), time_buckets(torch.tensor(gaps)))


def test_another_logarithm_does_not_move_the_edges(monkeypatch: Any) -> None:
    edges = torch.tensor(EDGES)
    gaps = torch.cat((edges - 1, edges, edges + 1)).clamp(min=0)
    expected = time_buckets(gaps)
    monkeypatch.setattr(module, "STEP", module.STEP * (1 + 1e-5))
    assert not torch.equal(time_buckets(gaps), expected)
    assert torch.equal(time_buckets_by_edges(gaps), expected)
