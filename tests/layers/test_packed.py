from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packed_users import batch_of, normal

from segue.data.batch import Batch
from segue.errors import SegueError
from segue.layers.packed import PackedBatch, pack, pad, tensors

some_lengths = st.lists(st.integers(1, 6), min_size=1, max_size=6)


def test_index_arithmetic_of_g32() -> None:
    """Users of two and three events in rows of four, which a fourth user makes that long.

    The second user has none in G32 and is refused here (below), so it has one.
    """
    batch = batch_of(2, 1, 3, 4)
    assert batch.longest == 4
    assert batch.position.tolist() == [0, 1, 0, 0, 1, 2, 0, 1, 2, 3]
    assert batch.slot.tolist() == [0, 1, 4, 8, 9, 10, 12, 13, 14, 15]
    assert not batch.rectangular


def test_may_attend_is_true_at_tokens_of_the_padded_view() -> None:
    """True = may attend."""
    mask = batch_of(2, 1, 3).may_attend
    assert mask is not None and mask.shape == (3, 1, 1, 3)
    assert mask[:, 0, 0].tolist() == [[True, True, False], [True, False, False], [True, True, True]]
    assert batch_of(2, 2).may_attend is None


def test_newest_token_of_each_user() -> None:
    assert batch_of(2, 1, 3).last.tolist() == [1, 2, 5]


def test_a_user_without_events_has_no_newest_token() -> None:
    """The second user of G32 must not get the first one's."""
    with pytest.raises((AssertionError, ValueError, SegueError)):
        _ = batch_of(2, 0, 3).last


def test_padded_by_hand() -> None:
    batch = batch_of(2, 1, 3)
    padded = pad(torch.arange(1.0, 7.0)[:, None], batch)
    assert padded[:, :, 0].tolist() == [[1, 2, 0], [3, 0, 0], [4, 5, 6]]
    assert pack(padded, batch)[:, 0].tolist() == [1, 2, 3, 4, 5, 6]


@given(some_lengths)
def test_pack_undoes_pad_and_padding_is_zero(lengths: list[int]) -> None:
    batch, packed = batch_of(*lengths), normal(sum(lengths), 3)
    padded = pad(packed, batch)
    assert padded.shape == (len(lengths), max(lengths), 3)
    assert torch.equal(pack(padded, batch), packed)
    for user, length in enumerate(lengths):
        assert (padded[user, :length] != 0).all()
        assert (padded[user, length:] == 0).all()


@given(some_lengths)
def test_pack_ignores_the_values_of_padding(lengths: list[int]) -> None:
    batch, packed = batch_of(*lengths), normal(sum(lengths), 2)
    inside = pad(torch.ones_like(packed), batch)
    assert torch.equal(pack(pad(packed, batch) + (1 - inside) * 1e9, batch), packed)


@pytest.mark.parametrize("lengths", [(2, 1, 3), (3, 3), (1,), (4, 1, 1, 2)])
def test_gradients(lengths: tuple[int, ...]) -> None:
    batch = batch_of(*lengths)
    packed = normal(sum(lengths), 2).requires_grad_()
    padded = normal(len(lengths), max(lengths), 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: pad(x, batch), (packed,))
    assert torch.autograd.gradcheck(lambda x: pack(x, batch), (padded,))


def test_gradients_by_hand() -> None:
    """Each gradient goes back to the position of its number; padding gets none and gives none."""
    batch = batch_of(2, 1, 3)
    packed = torch.zeros(6, 1, requires_grad=True)
    torch.autograd.backward((pad(packed, batch)[:, :, 0] * torch.arange(9.0).view(3, 3)).sum())
    assert packed.grad is not None and packed.grad[:, 0].tolist() == [0, 1, 3, 6, 7, 8]
    padded = torch.zeros(3, 3, 1, requires_grad=True)
    torch.autograd.backward((pack(padded, batch)[:, 0] * torch.arange(1.0, 7.0)).sum())
    assert padded.grad is not None and padded.grad[:, :, 0].tolist() == [[1, 2, 0], [3, 0, 0], [4, 5, 6]]


@given(st.integers(1, 4), st.integers(2, 5))
def test_users_of_equal_length_take_a_shortcut_to_the_same_numbers(users: int, length: int) -> None:
    """A further, shorter user needs the general code; the results of the others must not depend on it."""
    rectangle, general = batch_of(*[length] * users), batch_of(*[length] * users, 1)
    assert rectangle.rectangular and not general.rectangular
    packed = normal(users * length + 1, 2)
    short, long = packed[:-1].clone().requires_grad_(), packed.clone().requires_grad_()
    from_shortcut, from_general = pad(short, rectangle), pad(long, general)
    assert torch.equal(from_shortcut, from_general[:users])
    assert torch.equal(pack(from_shortcut, rectangle), pack(from_general, general)[:-1])
    weight = normal(users, length, 2, seed=1)
    torch.autograd.backward((from_shortcut * weight).sum())
    torch.autograd.backward((from_general[:users] * weight).sum())
    assert short.grad is not None and long.grad is not None
    assert torch.equal(short.grad, long.grad[:-1])


def test_tensors_share_the_memory_of_a_batch() -> None:
    batch = Batch(
        items=np.array([5, 6, 7]),
        times=np.array([10, 20, 30]),
        lengths=np.array([2, 1]),
        query_times=np.array([25, 31]),
        kinds=np.array([0, 1, 1]),
        values=np.array([1.0, 2.0, np.nan], dtype=np.float32),
    )
    packed = tensors(batch)
    batch.items[0] = 9
    assert packed.items.tolist() == [9, 6, 7] and packed.items.dtype == torch.int64
    assert packed.times.tolist() == [10, 20, 30] and packed.lengths.tolist() == [2, 1]
    assert packed.query_times is not None and packed.query_times.tolist() == [25, 31]
    assert packed.kinds is not None and packed.kinds.tolist() == [0, 1, 1]
    assert packed.values is not None and packed.values.dtype == torch.float32
    assert packed.values[:2].tolist() == [1, 2]


def test_columns_that_the_data_lacks_are_none() -> None:
    packed: PackedBatch = batch_of(2, 1)
    assert packed.query_times is None and packed.kinds is None and packed.values is None


def test_a_query_token_follows_the_newest_event_of_each_user() -> None:
    batch = Batch(
        items=np.array([5, 6, 7]),
        times=np.array([10, 20, 30]),
        lengths=np.array([2, 1]),
        kinds=np.array([4, 1, 1]),
        values=np.array([1.0, 2.0, 3.0], dtype=np.float32),
    )
    packed = tensors(batch).with_query_token(99)
    assert packed.items.tolist() == [5, 6, 99, 7, 99] and packed.lengths.tolist() == [3, 2]
    assert packed.times.tolist() == [10, 20, 20, 30, 30] and packed.query_times is None
    assert packed.kinds is not None and packed.kinds.tolist() == [4, 1, 0, 1, 0]
    assert packed.values is not None and packed.values.dtype == torch.float32
    assert packed.values.nan_to_num(-1).tolist() == [1, 2, -1, 3, -1]
    assert packed.last.tolist() == [2, 4]
    timed = tensors(replace(batch, query_times=np.array([25, 31]), kinds=None, values=None)).with_query_token(99)
    assert timed.times.tolist() == [10, 20, 25, 30, 31]
    assert timed.query_times is not None and timed.query_times.tolist() == [25, 31]
    assert timed.kinds is None and timed.values is None
    assert batch.items.tolist() == [5, 6, 7]


def test_a_user_without_events_gets_no_query_token() -> None:
    with pytest.raises(AssertionError):
        batch_of(2, 0, 3).with_query_token(99)


def test_with_padding_by_hand() -> None:
    """Zeros after each user's tokens; the newest tokens and `may_attend` stay the same."""
    batch = replace(batch_of(2, 1, 3), items=torch.arange(1, 7))
    padded = batch.with_padding()
    assert padded.items.tolist() == [1, 2, 0, 3, 0, 0, 4, 5, 6]
    assert padded.rectangular and padded.longest == 3 and padded.size == 3
    assert padded.last.tolist() == [1, 3, 8]
    assert padded.position.tolist() == [0, 1, 2] * 3
    assert padded.position_from_newest.tolist() == [1, 0, 0, 0, 0, 0, 2, 1, 0]
    assert padded.may_attend is not None and batch.may_attend is not None
    assert padded.may_attend.tolist() == batch.may_attend.tolist()


def test_padding_that_costs_more_than_it_saves_is_not_added() -> None:
    long, equal = batch_of(1, 1, 1, 9), batch_of(3, 3)
    assert long.with_padding() is long
    assert equal.with_padding() is equal
