"""Convolutions over packed tokens equal torch's over each user alone, and read no further than their window."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packed_users import assert_close, batch_of, normal
from torch import Tensor
from torch.nn import functional

from segue.layers.blocks.convolution import CaserBlock, CausalConvolution, DilatedBlock, earlier, windows
from segue.layers.packed import PackedBatch


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4), by=st.integers(0, 30))
def test_earlier_tokens_are_a_users_own(lengths: list[int], by: int) -> None:
    x = normal(sum(lengths), 2)
    outputs = torch.split(earlier(x, batch_of(*lengths), by), lengths)
    for own, output in zip(torch.split(x, lengths), outputs, strict=True):
        assert torch.equal(output[by:], own[: len(own) - by] if by < len(own) else own[:0])
        assert (output[:by] == 0).all()


@pytest.mark.parametrize(("kernel", "dilation"), [(1, 1), (2, 3), (3, 1), (3, 4), (5, 2)])
def test_a_causal_convolution_equals_torchs_with_zeros_before_the_first_token(kernel: int, dilation: int) -> None:
    convolution = CausalConvolution(4, kernel, dilation).double()
    weight = convolution.weights.weight.view(4, kernel, 4).transpose(1, 2)  # out, in, position
    lengths, x = [9, 1, 5], normal(15, 4)
    outputs = torch.split(convolution(x, batch_of(*lengths)), lengths)
    for user, own in zip(torch.split(x, lengths), outputs, strict=True):
        padded = functional.pad(user.T[None], ((kernel - 1) * dilation, 0))
        expected = functional.conv1d(padded, weight, convolution.weights.bias, dilation=dilation)[0].T
        assert_close(own, expected, 1e-12)


def test_a_residual_block_is_two_convolutions_each_with_norm_and_relu() -> None:
    block, batch, x = DilatedBlock(4, 3, 2, dropout=0.0).double(), batch_of(8, 3), normal(11, 4)
    assert (block.near.dilation, block.far.dilation) == (2, 4)
    middle = functional.layer_norm(block.near(x, batch), (4,), eps=1e-8).relu()
    expected = x + functional.layer_norm(block.far(middle, batch), (4,), eps=1e-8).relu()
    assert_close(block(x, batch), expected, 1e-12)
    assert_close(block.newest(x, batch), expected[[7, 10]], 1e-12)


# --- Caser ----------------------------------------------------------------------------------------------------------


def caser_of(width: int = 3, events: int = 4) -> CaserBlock:
    return CaserBlock(width, events, horizontal=5, vertical=2, dropout=0.0).double()


def original(block: CaserBlock, image: Tensor, oldest: int) -> Tensor:
    """The published network for one image [L, D] by torch's convolutions, with its final relu. The maximum of a filter
    leaves out positions with nothing but padding, before the oldest event in row `oldest`."""
    events, width = image.shape
    maxima = []
    for height, filters in enumerate(block.horizontal, start=1):
        assert isinstance(filters, torch.nn.Linear)
        kernels = filters.weight.view(-1, 1, height, width)
        # [filters, positions]
        responses = functional.conv2d(image[None, None], kernels, filters.bias)[0, :, :, 0].relu()
        maxima.append(responses[:, max(0, oldest - height + 1) :].max(1).values)
    columns = functional.conv2d(image[None, None], block.vertical.weight.view(-1, 1, events, 1), block.vertical.bias)
    features = torch.cat((*maxima, columns[0, :, 0].T.flatten()))
    return functional.linear(features, block.joined.weight, block.joined.bias).relu()


def test_caser_at_every_event_equals_the_original_over_the_last_events() -> None:
    block, lengths, x = caser_of(), [9, 1, 3], normal(13, 3)
    outputs = torch.split(block(x, batch_of(*lengths)), lengths)
    for user, own in zip(torch.split(x, lengths), outputs, strict=True):
        for position in range(len(user)):
            image = functional.pad(user[: position + 1], (0, 0, 4, 0))[-4:]
            assert_close(own[position], original(block, image, oldest=max(0, 3 - position)), 1e-12)


def test_the_maximum_does_not_depend_on_the_position_in_the_image() -> None:
    """A filter of height one finds an event at any position; one of height two finds a whole pair."""
    block, mark = caser_of(width=2), torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    with torch.no_grad():
        for filters in block.horizontal:
            assert isinstance(filters, torch.nn.Linear)
            filters.weight.fill_(1.0)
            filters.bias.zero_()

    def responses(*positions: int) -> Tensor:
        x = torch.zeros(6, 2, dtype=torch.float64)
        x[list(positions)] = mark
        batch = batch_of(6)
        return block.highest(windows(x, batch, 4), batch)[-1].view(4, 5)[:, 0]  # of each height, one filter

    for position in (2, 3, 4, 5):
        assert_close(responses(position), torch.full((4,), 7.0, dtype=torch.float64), 1e-12)
    assert_close(responses(2, 3), responses(4, 5), 1e-12)
    assert responses(2, 3).tolist() == [7, 14, 14, 14] and responses(2, 4).tolist() == [7, 7, 14, 14]
    assert responses(1).tolist() == [0, 0, 0, 0], "older than the image"


def test_neither_other_users_nor_padding_change_a_user() -> None:
    x, batch = normal(8, 3), batch_of(5, 3)
    padded = PackedBatch(items=torch.zeros(10), times=torch.zeros(10), lengths=batch.lengths, padded=True)
    spread = torch.cat((x, x.new_zeros(2, 3)))
    for block in (caser_of(), DilatedBlock(3, 2, 1, dropout=0.0).double()):
        assert_close(block.newest(spread, padded), block.newest(x, batch), 1e-12)
        assert_close(block(x, batch)[5:], block(x[5:], batch_of(3)), 1e-12)
