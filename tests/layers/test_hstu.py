"""HSTU's layer and its pointwise attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from segue.layers.attention import pointwise as kernel
from segue.layers.attention.pointwise import position_bias, silu_attention
from segue.layers.blocks.hstu import HSTUBlock
from segue.layers.packed import PackedBatch
from segue.layers.positions.time_buckets import BUCKETS, time_buckets

GOLDEN_TIMES, GOLDEN_QUERY_TIME = [100, 160, 3760], 90160


def batch_at(times: list[list[int]], query_times: list[int] | None = None) -> PackedBatch:
    lengths = [len(user) for user in times]
    return PackedBatch(
        items=torch.ones(sum(lengths), dtype=torch.int64),
        times=torch.tensor([time for user in times for time in user]),
        lengths=torch.tensor(lengths),
        query_times=None if query_times is None else torch.tensor(query_times),
    )


def random_block(*, heads: int = 2, length: int = 12, target_time: bool = True, seed: int = 0) -> HSTUBlock:
    block = HSTUBlock(4, heads, 0.0, length=length, target_time=target_time)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return block.eval().double()


def random_tokens(count: int, width: int = 4, seed: int = 3) -> Tensor:
    return torch.randn(count, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_seconds_fall_into_the_published_buckets() -> None:
    expected = {0: 0, 1: 0, 2: 2, 3: 3, 4: 4, 10: 7, 60: 13, 3600: 27, 86400: 37, 604800: 44, 2592000: 49}
    expected |= {31536000: 57, 10**9: 68, 2**31: 71}
    seconds = torch.tensor(list(expected))
    assert time_buckets(seconds).tolist() == list(expected.values())
    assert time_buckets(-seconds).tolist() == list(expected.values())


def test_there_is_a_bucket_for_every_gap() -> None:
    assert int(time_buckets(torch.tensor([2**62])).max()) < BUCKETS


def test_a_bias_by_distance_fills_the_diagonals() -> None:
    assert position_bias(torch.tensor([0.0, 1.0, 2.0]), 3).tril().tolist() == [[0, 0, 0], [1, 0, 0], [2, 1, 0]]


def golden_block() -> HSTUBlock:
    """The worked layer of two features; its matrix is given as gate, values, queries, keys."""
    block = HSTUBlock(2, 1, 0.0, length=4, target_time=True)
    matrix = torch.tensor([[0.5, -0.2, 0.3, 0.1, 0.4, 0, 0.2, -0.1], [0.1, 0.6, -0.3, 0.2, 0, 0.5, -0.2, 0.3]])
    gate, values, queries, keys = matrix.T.chunk(4)
    with torch.no_grad():
        block.inner.weight.copy_(torch.cat((gate, queries, values, keys)))
        block.outer.weight.copy_(torch.tensor([[0.7, -0.3], [0.2, 0.9]]))
        block.outer.bias.copy_(torch.tensor([0.05, -0.05]))
        block.bias.positions.copy_(torch.tensor([0, -0.1, -0.2, -0.3]))  # 0, 1, 2, 3 tokens back
        block.bias.times.copy_(0.01 * torch.arange(BUCKETS))
    return block.eval()


def test_the_layer_computes_the_worked_example() -> None:
    block, batch = golden_block(), batch_at([GOLDEN_TIMES], [GOLDEN_QUERY_TIME])
    x = torch.tensor([[1.0, 0], [0, 2], [-1, 1]])
    assert batch.buckets_at_next[0].tolist() == [[13, 0, 27], [27, 27, 0], [37, 37, 37]]
    weights = block.attention_weights(x, batch)[0, 0]
    expected = [[0.0301554, 0, 0], [0.0106157, 0.0547610, 0], [0.0106157, 0.0547610, 0.0723621]]
    torch.testing.assert_close(weights, torch.tensor(expected), rtol=0, atol=1e-6)
    y = block(x, batch)
    outputs = torch.tensor([[1.142161, 0.218014], [-0.002173, 2.468415], [-1.003101, 1.477640]])
    torch.testing.assert_close(y, outputs, rtol=0, atol=5e-6)
    directions = torch.tensor([[0.982266, 0.187494], [-0.000880, 1.0], [-0.561661, 0.827367]])
    torch.testing.assert_close(functional.normalize(y, dim=1), directions, rtol=0, atol=5e-6)
    torch.testing.assert_close(block.newest(x, batch), y[-1:])


def test_without_its_first_matrix_the_layer_adds_its_last_bias() -> None:
    block, batch = golden_block(), batch_at([GOLDEN_TIMES], [GOLDEN_QUERY_TIME])
    with torch.no_grad():
        block.inner.weight.zero_()
    x = torch.randn(3, 2)
    torch.testing.assert_close(block(x, batch), x + torch.tensor([0.05, -0.05]))


@pytest.mark.parametrize("most", [1, 1 << 18], ids=["a user at a time", "all together"])
def test_the_attention_and_its_gradients_are_the_plain_formula(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "MAX_WEIGHTS", most)
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(3, 2, 5, 4, dtype=torch.float64, generator=generator, requires_grad=True) for _ in range(3))
    positions = torch.randn(9, dtype=torch.float64, generator=generator, requires_grad=True)
    times = torch.randn(BUCKETS, dtype=torch.float64, generator=generator, requires_grad=True)
    buckets = torch.randint(0, BUCKETS, (3, 5, 5), dtype=torch.int32, generator=generator)

    def plain() -> Tensor:
        rows = []
        for i in range(5):
            bias = torch.stack([positions[i - j] + times[buckets[:, i, j].long()] for j in range(i + 1)], dim=-1)
            weights = functional.silu((q[:, :, i, None] * k[:, :, : i + 1]).sum(-1) + bias[:, None]) / 9
            rows.append((weights[..., None] * v[:, :, : i + 1]).sum(2))
        return torch.stack(rows, dim=2)

    output = silu_attention(q, k, v, positions=positions, times=times, buckets=buckets, length=9)
    torch.testing.assert_close(output, plain())
    outgoing = torch.randn(output.shape, dtype=torch.float64, generator=generator)
    inputs = (q, k, v, positions, times)
    gradients = torch.autograd.grad(plain(), inputs, outgoing)
    for ours, theirs in zip(torch.autograd.grad(output, inputs, outgoing), gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_gradients_equal_finite_differences() -> None:
    block, batch = random_block(), batch_at([[5, 9, 4000], [0, 70]], [9000, 80])
    x = random_tokens(5).requires_grad_()
    assert torch.autograd.gradcheck(lambda tokens: block(tokens, batch), (x,))

    def of_biases(positions: Tensor, times: Tensor) -> Tensor:
        parameters = {"bias.positions": positions, "bias.times": times}
        result: Tensor = torch.func.functional_call(block, parameters, (x.detach(), batch))
        return result

    assert torch.autograd.gradcheck(of_biases, (block.bias.positions, block.bias.times))


users_times = st.lists(st.lists(st.integers(0, 10**9), min_size=1, max_size=9).map(sorted), min_size=1, max_size=4)


@settings(max_examples=30)
@given(times=users_times, target_time=st.booleans())
def test_users_are_independent_and_packing_changes_nothing(times: list[list[int]], target_time: bool) -> None:
    block = random_block(target_time=target_time)
    query_times = [user[-1] + 100 for user in times]
    batch = batch_at(times, query_times)
    x = random_tokens(sum(map(len, times)))
    together, newest = block(x, batch), block.newest(x, batch)
    begin = 0
    for index, user in enumerate(times):
        rows = slice(begin, begin + len(user))
        alone = block(x[rows], batch_at([user], [query_times[index]]))
        torch.testing.assert_close(together[rows], alone)
        torch.testing.assert_close(newest[index], alone[-1])
        begin += len(user)


@pytest.mark.parametrize("target_time", [True, False])
def test_a_time_changes_only_the_rows_that_may_use_it(target_time: bool) -> None:
    block, x = random_block(target_time=target_time), random_tokens(5)
    times, query_times = [1_000, 5_000, 90_000, 1_000_000, 40_000_000], 80_000_000
    before = block(x, batch_at([times], [query_times]))
    for index in range(5):
        later = [*times]
        later[index] = [*times, query_times][index + 1] - 10
        after = block(x, batch_at([later], [query_times]))
        # A row's query time is the time of the next event, or its own, whose gap to itself is zero.
        first = max(0, index - 1) if target_time else max(1, index)
        same = [torch.equal(after[row], before[row]) for row in range(5)]
        assert all(same[:first]) and not same[first]
    other_query = block(x, batch_at([times], [10**9]))
    assert torch.equal(other_query[:4], before[:4])
    assert torch.equal(other_query[4], before[4]) is not target_time


def test_a_shift_of_all_times_changes_nothing() -> None:
    block, x = random_block(), random_tokens(4)
    times = np.array([0, 50, 7_000, 100_000])
    before = block(x, batch_at([times.tolist()], [200_000]))
    assert torch.equal(block(x, batch_at([(times + 10**9).tolist()], [200_000 + 10**9])), before)


def test_weights_are_divided_by_the_configured_length() -> None:
    """A batch cut to its longest user must not change what a user gets."""
    short, long = random_block(length=12), random_block(length=24)
    with torch.no_grad():
        for name, parameter in short.state_dict().items():
            if name != "bias.positions":
                long.state_dict()[name].copy_(parameter)
        long.bias.positions[:12] = short.bias.positions
    batch, x = batch_at([[0, 10, 20]], [30]), random_tokens(3)
    weights = short.attention_weights(x, batch)
    assert bool((weights[0, :, 2] != 0).all())
    torch.testing.assert_close(long.attention_weights(x, batch) * 2, weights)
