from __future__ import annotations

import math

import pytest
import torch
from packed_users import assert_close, batch_of, normal
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from segue.layers.attention import Attention
from segue.layers.packed import PackedBatch, pack

# G1: queries, keys and values of the eight tokens, one head of width two.
G1_ROWS = [[0, 0], [0, 0.6], [0.1, 0.2], [0, 0.3], [-0.1, 0.4], [0, 0.5], [-0.2, 0.6], [0, 0.7]]
G1_LAST = [0.101322, 0.136358, 0.111865, 0.117541, 0.123506, 0.129773, 0.136358, 0.143277]
G1_MIXED = [
    [0, 0.337979],
    [0.033156, 0.275346],
    [0.024579, 0.285014],
    [-0.001412, 0.311589],
    [-0.001162, 0.346910],
    [-0.033669, 0.390169],
    [-0.028436, 0.435848],
]


back_or_both_ways = pytest.mark.parametrize("causal", [True, False], ids=["back", "both ways"])


def attention_of(width: int, heads: int, *, output: bool = True, causal: bool = True, seed: int = 0) -> Attention:
    attention = Attention(width, heads, output=output, causal=causal).double()
    with torch.no_grad():
        for index, parameter in enumerate(attention.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=seed + index))
    return attention


def plain_attention(width: int, heads: int = 1) -> Attention:
    """Queries, keys and values are the stream itself."""
    attention = Attention(width, heads, output=False, causal=True).double()
    with torch.no_grad():
        attention.query.weight.copy_(torch.eye(width))
        attention.key_value.weight.copy_(torch.cat((torch.eye(width), torch.eye(width))))
        attention.query.bias.zero_()
        attention.key_value.bias.zero_()
    return attention


def torch_attention(ours: Attention, width: int) -> nn.MultiheadAttention:
    """torch's own module with our weights."""
    theirs = nn.MultiheadAttention(width, ours.heads, batch_first=True, dtype=torch.float64)
    assert isinstance(ours.output, nn.Linear)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat((ours.query.weight, ours.key_value.weight)))
        theirs.in_proj_bias.copy_(torch.cat((ours.query.bias, ours.key_value.bias)))
        theirs.out_proj.weight.copy_(ours.output.weight)
        theirs.out_proj.bias.copy_(ours.output.bias)
    return theirs


def values_of(attention: Attention, keys: Tensor, width: int) -> Tensor:
    return keys @ attention.key_value.weight[width:].T + attention.key_value.bias[width:]


def test_weights_and_output_of_g1() -> None:
    x, batch, attention = torch.tensor(G1_ROWS, dtype=torch.float64), batch_of(8), plain_attention(2)
    weights = attention.weights(x, x, batch)[0, 0]
    assert_close(weights[7], torch.tensor(G1_LAST, dtype=torch.float64), 1e-6)
    assert_close(weights[2, :3], torch.tensor([0.320047, 0.348389, 0.331564], dtype=torch.float64), 1e-6)
    assert_close(attention(x, x, batch)[1:], G1_MIXED, 1e-6)


@pytest.mark.parametrize(("width", "heads"), [(4, 1), (4, 2), (6, 3), (4, 4)])
def test_weights_are_one_in_each_row_and_reproduce_the_output(width: int, heads: int) -> None:
    attention, batch = attention_of(width, heads), batch_of(3, 1, 5)
    queries, keys = normal(9, width, seed=7), normal(9, width, seed=8)
    weights = attention.weights(queries, keys, batch)
    assert weights.shape == (3, heads, 5, 5)
    mixed = torch.empty(9, width, dtype=torch.float64)
    begin = 0
    for user, length in enumerate((3, 1, 5)):
        own = weights[user, :, :length, :length]
        assert_close(own.sum(-1), torch.ones(heads, length, dtype=torch.float64), 1e-12)
        assert (own.triu(1) == 0).all()
        values = values_of(attention, keys[begin : begin + length], width).view(length, heads, -1).transpose(0, 1)
        mixed[begin : begin + length] = (own @ values).transpose(0, 1).reshape(length, width)
        begin += length
    assert_close(attention(queries, keys, batch), attention.output(mixed), 1e-12)


@back_or_both_ways
@pytest.mark.parametrize("heads", [1, 2, 3])
def test_equal_to_torchs_own_attention(heads: int, causal: bool) -> None:
    """Which wants True where a token may NOT look: the opposite of ours. It sees each user alone, without padding."""
    width, lengths = 6, (4, 1, 6)
    ours, batch = attention_of(width, heads, causal=causal), batch_of(*lengths)
    theirs = torch_attention(ours, width)
    queries, keys = normal(11, width, seed=20), normal(11, width, seed=21)
    found, weights, begin = ours(queries, keys, batch), ours.weights(queries, keys, batch), 0
    for user, length in enumerate(lengths):
        own = slice(begin, begin + length)
        blocked = torch.ones(length, length, dtype=torch.bool).triu(1) if causal else None
        expected, expected_weights = theirs(
            queries[None, own], keys[None, own], keys[None, own], attn_mask=blocked, average_attn_weights=False
        )
        assert_close(found[own], expected[0], 1e-12)
        assert_close(weights[user, :, :length, :length], expected_weights[0], 1e-12)
        assert (weights[user, :, :length, length:] == 0).all(), "at padding nobody looks"
        begin += length


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_comes_later_changes_nothing_at_all(dtype: torch.dtype) -> None:
    attention, batch = attention_of(4, 2).to(dtype), batch_of(6, 3)
    x = normal(9, 4, seed=3, dtype=dtype)
    before, weights = attention(x, x, batch), attention.weights(x, x, batch)
    for position in range(6):
        changed = x.clone()
        changed[position] += 100
        after = attention(changed, changed, batch)
        assert torch.equal(after[:position], before[:position])
        assert not torch.equal(after[position], before[position])
        assert torch.equal(after[6:], before[6:]), "another user's token"
        assert torch.equal(attention.weights(changed, changed, batch)[0, :, :position], weights[0, :, :position])


def test_looking_both_ways_a_token_sees_all_of_its_user_and_nothing_else() -> None:
    attention, batch = attention_of(4, 2, causal=False), batch_of(6, 3)
    x = normal(9, 4, seed=3)
    before, weights = attention(x, x, batch), attention.weights(x, x, batch)
    assert (weights[0] > 0).all() and (weights[1, :, :3, :3] > 0).all()
    for position in range(6):
        changed = x.clone()
        changed[position] += 1
        after = attention(changed, changed, batch)
        assert (after[:6] != before[:6]).any(1).all()
        assert torch.equal(after[6:], before[6:]), "another user's token"


def test_looking_both_ways_order_has_no_say() -> None:
    """Without positions, tokens in another order get the same in that order."""
    attention, batch, x = attention_of(4, 2, causal=False), batch_of(5, 3), normal(8, 4, seed=3)
    order = torch.tensor([3, 0, 4, 2, 1, 7, 6, 5])
    assert_close(attention(x[order], x[order], batch), attention(x, x, batch)[order], 1e-12)


@back_or_both_ways
@pytest.mark.parametrize("batch", [batch_of(2, 1, 3), batch_of(2, 2)], ids=["ragged", "rectangular"])
def test_the_fused_kernel_does_it_forward_and_backward(batch: PackedBatch, causal: bool) -> None:
    """Torch refuses where only its slow kernel could."""
    attention, x = attention_of(4, 2, causal=causal).float(), normal(len(batch.items), 4, dtype=torch.float32)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        torch.autograd.backward(attention(x.requires_grad_(), x, batch).sum())
    assert x.grad is not None and torch.isfinite(x.grad).all()


def test_only_one_key_to_look_at_gives_its_value() -> None:
    """Mask polarity: a user's first token sees itself and nothing else."""
    attention, batch = attention_of(4, 2, output=False), batch_of(5, 1, 3)
    queries, keys = normal(9, 4, seed=4), normal(9, 4, seed=5)
    firsts = [0, 5, 6]
    assert_close(attention(queries, keys, batch)[firsts], values_of(attention, keys[firsts], 4), 1e-12)
    assert (attention.weights(queries, keys, batch)[:, :, 0, 0] == 1).all()


@back_or_both_ways
@pytest.mark.parametrize("lengths", [(3, 1, 5), (4, 4), (1,), (1, 1)], ids=str)
@pytest.mark.parametrize("heads", [1, 2])
def test_the_newest_token_alone_gets_what_it_gets_among_all(lengths: tuple[int, ...], heads: int, causal: bool) -> None:
    attention, batch, tokens = attention_of(4, heads, causal=causal), batch_of(*lengths), sum(lengths)
    queries, keys = normal(tokens, 4, seed=30), normal(tokens, 4, seed=31)
    found = attention.newest(queries[batch.last], keys, batch)
    assert_close(found, attention(queries, keys, batch)[batch.last], 1e-12)


def test_a_large_key_draws_all_attention_only_from_later_tokens() -> None:
    x = torch.tensor([[1.0, 0], [1, 0], [50, 0], [1, 0]], dtype=torch.float64)
    weights = plain_attention(2).weights(x, x, batch_of(4))[0, 0]
    assert weights[1].tolist() == [0.5, 0.5, 0, 0]
    assert weights[3, 2] > 1 - 1e-12


def test_scores_are_divided_by_the_root_of_the_head_width() -> None:
    """Two heads of width two over width four: the root is of two, not of four."""
    attention = plain_attention(4, heads=2)
    x = torch.tensor([[0.0, 0, 0, 0], [1, 1, 3, 0]], dtype=torch.float64)
    weights = attention.weights(x, x, batch_of(2))[0]  # [H, N, N]
    odds = weights[:, 1, 1] / weights[:, 1, 0]
    assert odds.log().tolist() == pytest.approx([2 / math.sqrt(2), 9 / math.sqrt(2)], abs=1e-12)


def test_one_stream_or_two_equal_ones() -> None:
    attention, batch, x = attention_of(4, 2), batch_of(3, 2), normal(5, 4, seed=6)
    assert_close(attention(x, x, batch), attention(x, x.clone(), batch), 1e-12)


def test_without_an_output_projection_there_are_no_weights_for_it() -> None:
    assert len(list(Attention(4, 2, output=False, causal=True).parameters())) == 4
    assert len(list(Attention(4, 2, output=True, causal=True).parameters())) == 6


@back_or_both_ways
@pytest.mark.parametrize("batch", [batch_of(2, 1, 3), batch_of(2, 2)], ids=["ragged", "rectangular"])
def test_gradients(batch: PackedBatch, causal: bool) -> None:
    attention, tokens = attention_of(4, 2, causal=causal), len(batch.items)
    queries, keys = normal(tokens, 4, seed=9).requires_grad_(), normal(tokens, 4, seed=10).requires_grad_()
    assert torch.autograd.gradcheck(lambda q, k: attention(q, k, batch), (queries, keys))
    assert torch.autograd.gradcheck(lambda x: attention(x, x, batch), (queries,))
    weight = attention.key_value.weight
    assert torch.autograd.gradcheck(lambda _: attention(queries.detach(), keys.detach(), batch), (weight,))


def test_width_is_shared_evenly_by_the_heads() -> None:
    with pytest.raises(AssertionError):
        Attention(5, 2, output=True, causal=True)


def test_padding_of_the_weights_packs_away() -> None:
    """A token's row of weights, packed, does not depend on how long the others are."""
    attention, x = attention_of(4, 1), normal(10, 4, seed=11)
    alone, together = batch_of(3), batch_of(3, 7)
    first = attention.weights(x[:3], x[:3], alone)[0, 0]
    both = attention.weights(x, x, together)[:, 0]
    assert_close(pack(both, together)[:3, :3], first, 1e-12)
    assert (pack(both, together)[:3, 3:] == 0).all()
