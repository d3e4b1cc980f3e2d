"""The decoder block equals torch's, and one step at a time equals all at once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_users import assert_close, normal
from torch import Tensor
from torch_twins import torch_decoder

from segue.layers.decoders.transformer import DecoderBlock, DecoderKV
from segue.layers.dropout import set_generator


def block_of(heads: int = 2, seed: int = 0) -> DecoderBlock:
    block = DecoderBlock(4, heads, 6, 0.0).double()
    with torch.no_grad():
        for index, parameter in enumerate(block.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=seed + index))
    return block


def padding(*lengths: int) -> Tensor:
    """True at tokens, [B, 1, 1, N]."""
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None])[:, None, None]


def step_by_step(block: DecoderBlock, x: Tensor, kv: DecoderKV) -> Tensor:
    states = []
    for position in range(x.shape[1]):
        state, kv = block.step(x[:, position], kv)
        states.append(state)
    return torch.stack(states, dim=1)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("padded", [True, False], ids=["padding", "no padding"])
def test_the_block_equals_torchs(heads: int, padded: bool) -> None:
    """torch.nn.TransformerDecoderLayer with the same weights; its masks are True where a token may not attend."""
    block, x, memory = block_of(heads), normal(3, 5, 4, seed=60), normal(3, 4, 4, seed=61)
    may_attend = padding(4, 1, 2) if padded else None
    expected = torch_decoder(block)(
        x,
        memory,
        tgt_mask=torch.ones(5, 5, dtype=torch.bool).triu(1),
        memory_key_padding_mask=None if may_attend is None else ~may_attend[:, 0, 0],
    )
    assert_close(block(x, memory, may_attend), expected, 1e-12)


@settings(max_examples=15)
@given(rows=st.integers(1, 4), tokens=st.integers(1, 7), seed=st.integers(0, 99), data=st.data())
def test_one_step_at_a_time_equals_all_at_once(rows: int, tokens: int, seed: int, data: st.DataObject) -> None:
    block, x = block_of(seed=seed), normal(rows, tokens, 4, seed=seed)
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=rows, max_size=rows))
    memory, may_attend = normal(rows, max(lengths), 4, seed=seed + 1), padding(*lengths)
    assert_close(step_by_step(block, x, block.begin(memory, may_attend)), block(x, memory, may_attend), 1e-12)


def test_a_beam_resumes_from_some_of_its_rows() -> None:
    """Two rows become four: the second three times, each with another token, and the first once."""
    block, x, memory, may_attend = block_of(), normal(2, 3, 4, seed=62), normal(2, 4, 4, seed=63), padding(4, 2)
    kv = block.begin(memory, may_attend)
    for position in range(3):
        _, kv = block.step(x[:, position], kv)
    rows, more = torch.tensor([1, 1, 0, 1]), normal(4, 4, seed=64)
    output, _ = block.step(more, kv.rows(rows))
    whole = block(torch.cat((x[rows], more[:, None]), dim=1), memory[rows], may_attend[rows])
    assert_close(output, whole[:, -1], 1e-12)
    first, _ = block.step(more, block.begin(memory).rows(rows))
    assert_close(first, block(more[:, None], memory[rows])[:, 0], 1e-12)


def test_no_token_sees_a_later_one_or_padding_of_the_memory() -> None:
    block, x, memory, may_attend = block_of(), normal(2, 5, 4, seed=65), normal(2, 4, 4, seed=66), padding(4, 2)
    before = block(x, memory, may_attend)
    for position in range(5):
        changed = x.clone()
        changed[0, position, 0] += 1  # a norm would cancel the same change of all features
        after = block(changed, memory, may_attend)
        assert torch.equal(after[0, :position], before[0, :position]) and torch.equal(after[1], before[1])
        assert (after[0, position:] != before[0, position:]).any(-1).all()
    changed = memory.clone()
    changed[1, 2:] += 1
    assert torch.equal(block(x, changed, may_attend), before)
    changed[1, 1] += 1
    after = block(x, changed, may_attend)
    assert torch.equal(after[0], before[0]) and (after[1] != before[1]).any(-1).all()


def test_attention_weights_equal_torchs() -> None:
    """Of self-attention and cross-attention, on the streams that reach them."""
    block, x, memory, may_attend = block_of(), normal(2, 5, 4, seed=67), normal(2, 4, 4, seed=68), padding(4, 2)
    theirs = torch_decoder(block)
    back, across = block.attention_weights(x, memory, may_attend)
    blocked = torch.ones(5, 5, dtype=torch.bool).triu(1)
    update, expected = theirs.self_attn(x, x, x, attn_mask=blocked, average_attn_weights=False)
    assert_close(back, expected, 1e-12)
    middle = theirs.norm1(x + update)
    _, expected = theirs.multihead_attn(
        middle, memory, memory, key_padding_mask=~may_attend[:, 0, 0], average_attn_weights=False
    )
    assert_close(across, expected, 1e-12)


def test_gradients_of_the_decoder_block() -> None:
    block, may_attend = block_of(), padding(3, 2)
    x, memory = normal(2, 3, 4, seed=69).requires_grad_(), normal(2, 3, 4, seed=70).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, memory: block(x, memory, may_attend), (x, memory))
    assert sum(1 for _ in block.parameters()) == 22
    torch.autograd.backward(block(x, memory, may_attend).square().sum())
    assert all(parameter.grad is not None and (parameter.grad != 0).any() for parameter in block.parameters())


def test_dropout_is_applied_to_all_three_updates_and_not_to_the_stream() -> None:
    """All updates are one: a norm gets the stream plus zero or two."""
    block, x = DecoderBlock(8, 2, 8, 0.5).double().train(), normal(4, 30, 8, seed=71)
    set_generator(block, torch.Generator().manual_seed(0))
    for last in (block.own.output, block.across.output, block.feed_forward.outer):
        assert isinstance(last, torch.nn.Linear)
        torch.nn.init.zeros_(last.weight)
        torch.nn.init.ones_(last.bias)
    sums: list[tuple[Tensor, Tensor]] = []
    for norm in (block.norm_own, block.norm_across, block.norm_forward):
        norm.register_forward_hook(lambda _, inputs, output: sums.append((inputs[0], output)))
    block(x, normal(4, 2, 8, seed=72))
    streams = [x, *(output for _, output in sums[:2])]
    for stream, (before_norm, _) in zip(streams, sums, strict=True):
        update = before_norm - stream
        shares = [((update - amount).abs() < 1e-9).double().mean().item() for amount in (0, 2)]
        assert shares == pytest.approx([1 / 2, 1 / 2], abs=0.06) and sum(shares) == pytest.approx(1)
