from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packed_users import assert_close, batch_of, normal

from segue.layers.positions.embeddings import CountedFrom, LearnedPositions, NoPositions, SinusoidalPositions, sinusoids
from segue.layers.positions.relative import RelativeBuckets, Rotary, distance_buckets


def positions_of(length: int, counted_from: CountedFrom) -> LearnedPositions:
    """Row p of the table holds 10 p and 10 p + 1."""
    positions = LearnedPositions(length, 2, counted_from)
    with torch.no_grad():
        positions.table.copy_(10 * torch.arange(length)[:, None] + torch.tensor([0, 1]))
    return positions


@pytest.mark.parametrize(
    ("counted_from", "rows"), [("oldest", [0, 1, 2, 0, 0, 1]), ("newest", [2, 1, 0, 0, 1, 0])], ids=["oldest", "newest"]
)
def test_positions_of_users_of_three_one_and_two_events(counted_from: CountedFrom, rows: list[int]) -> None:
    x = torch.arange(12.0).view(6, 2)
    result = positions_of(4, counted_from)(x, batch_of(3, 1, 2)) - x
    assert result.tolist() == [[10 * row, 10 * row + 1] for row in rows]


def test_the_newest_event_has_the_same_position_however_long_the_history() -> None:
    positions, batch = positions_of(9, "newest"), batch_of(9, 1, 4)
    result = positions(torch.zeros(14, 2), batch)
    assert result[batch.last].tolist() == [[0, 1]] * 3


@pytest.mark.parametrize(("counted_from", "times"), [("oldest", [2, 2, 1, 0]), ("newest", [2, 2, 1, 0])])
def test_gradient_reaches_the_rows_in_use(counted_from: CountedFrom, times: list[int]) -> None:
    positions = positions_of(4, counted_from)
    torch.autograd.backward(positions(torch.zeros(5, 2), batch_of(3, 2)).sum())
    assert positions.table.grad is not None
    assert positions.table.grad.tolist() == [[time, time] for time in times]


@pytest.mark.parametrize("counted_from", ["oldest", "newest"])
def test_a_history_as_long_as_the_table_fits_and_a_longer_one_is_refused(counted_from: CountedFrom) -> None:
    positions = positions_of(3, counted_from)
    positions(torch.zeros(3, 2), batch_of(3))
    with pytest.raises(AssertionError, match="cut to the model's length"):
        positions(torch.zeros(5, 2), batch_of(1, 4))


# --- sinusoids ----------------------------------------------------------------------------------------------------


def test_waves_of_g16() -> None:
    """Sines at even features, cosines at odd ones: not at even and odd positions."""
    result = sinusoids(3, 4)
    expected = [[0.0, 1, 0, 1], [0.841471, 0.540302, 0.01, 0.99995], [0.909297, -0.416147, 0.019999, 0.9998]]
    assert_close(result, expected, 1e-6)


@pytest.mark.parametrize("width", [1, 6, 7])
def test_waves_of_any_width(width: int) -> None:
    result = sinusoids(50, width).numpy()
    for position, feature in np.ndindex(50, width):
        angle = position / 10000 ** (2 * (feature // 2) / width)
        assert result[position, feature] == pytest.approx(np.cos(angle) if feature % 2 else np.sin(angle), abs=1e-6)


def test_waves_are_added_at_positions_from_the_oldest_and_not_learned() -> None:
    positions, x = SinusoidalPositions(4, 4), torch.arange(24.0).view(6, 4)
    assert_close(positions(x, batch_of(3, 1, 2)) - x, sinusoids(4, 4)[[0, 1, 2, 0, 0, 1]], 1e-5)
    assert positions.counted_from == "oldest" and positions.length == 4
    assert not list(positions.parameters()) and not positions.state_dict()


@pytest.mark.parametrize("positions", [SinusoidalPositions(3, 2), NoPositions(3)], ids=["waves", "none"])
def test_without_a_learned_table_a_longer_history_is_refused_as_well(
    positions: SinusoidalPositions | NoPositions,
) -> None:
    positions(torch.zeros(3, 2), batch_of(3))
    with pytest.raises(AssertionError, match="cut to the model's length"):
        positions(torch.zeros(5, 2), batch_of(1, 4))


def test_no_positions_add_nothing() -> None:
    x = torch.ones(3, 2)
    assert NoPositions(3)(x, batch_of(2, 1)) is x


# --- rotary -------------------------------------------------------------------------------------------------------


@given(first=st.integers(0, 40), second=st.integers(0, 40), shift=st.integers(0, 59), seed=st.integers(0, 99))
def test_products_of_rotated_features_depend_on_the_distance_only(
    first: int, second: int, shift: int, seed: int
) -> None:
    rotary = Rotary(100, 6).double()
    query, key = normal(2, 1, 1, 1, 6, seed=seed)

    def product(query_position: int, key_position: int) -> torch.Tensor:
        products: torch.Tensor = rotary(query, torch.tensor([query_position])) * rotary(
            key, torch.tensor([key_position])
        )
        return products.sum()

    assert_close(product(first + shift, second + shift), product(first, second), 1e-5)


def test_features_are_rotated_like_complex_numbers() -> None:
    """Features i of the two halves are a number's two parts; it is rotated by position / 10000^(2i/d)."""
    rotary, x = Rotary(50, 6), normal(2, 3, 4, 6, dtype=torch.float32)
    positions = torch.tensor([0, 7, 20, 49])
    angles = positions[:, None] / 10000 ** (torch.arange(3) * 2 / 6)
    expected = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(
        rotary(x, positions), torch.cat((expected.real, expected.imag), -1), rtol=1e-5, atol=1e-5
    )
    assert torch.equal(rotary(x, positions)[:, :, 0], x[:, :, 0]), "unchanged at position zero"
    torch.testing.assert_close(rotary(x, positions).norm(dim=-1), x.norm(dim=-1))


def test_positions_of_each_user_or_of_all() -> None:
    rotary, x = Rotary(10, 4), normal(2, 3, 2, 4, dtype=torch.float32)
    each = rotary(x, torch.tensor([[1, 5], [0, 9]]))
    assert torch.equal(each[0], rotary(x, torch.tensor([1, 5]))[0])
    assert torch.equal(each[1], rotary(x, torch.tensor([0, 9]))[1])
    assert not list(rotary.parameters()) and not rotary.state_dict()


def test_pairs_need_an_even_width() -> None:
    with pytest.raises(AssertionError):
        Rotary(10, 5)


# --- buckets of distances -----------------------------------------------------------------------------------------

DISTANCES = [-200, -128, -64, -20, -10, -8, -7, -1, 0, 1, 7, 8, 20, 128]
BOTH_WAYS = [15, 15, 14, 10, 8, 8, 7, 1, 0, 17, 23, 24, 26, 31]
BACK = [31, 31, 26, 17, 10, 8, 7, 1, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(("causal", "buckets"), [(False, BOTH_WAYS), (True, BACK)], ids=["both ways", "back"])
def test_buckets_of_g48(causal: bool, buckets: list[int]) -> None:
    result = distance_buckets(torch.tensor(DISTANCES), causal=causal, buckets=32, furthest=128)
    assert result.tolist() == buckets


@pytest.mark.parametrize("causal", [True, False])
def test_buckets_grow_with_the_distance_and_all_are_used(causal: bool) -> None:
    result = distance_buckets(torch.arange(0, -300, -1), causal=causal, buckets=32, furthest=128)
    assert (result.diff() >= 0).all() and set(result.tolist()) == set(range(32 if causal else 16))
    ahead = distance_buckets(torch.arange(1, 300), causal=causal, buckets=32, furthest=128)
    assert set(ahead.tolist()) == ({0} if causal else set(range(17, 32)))


@pytest.mark.parametrize("causal", [True, False])
def test_each_head_has_a_number_for_each_bucket(causal: bool) -> None:
    relative = RelativeBuckets(3, 200, causal=causal)
    with torch.no_grad():
        relative.table.copy_(torch.arange(96.0).view(32, 3))
    queries, keys = torch.tensor([0, 70, 199]), torch.arange(200)
    result = relative(queries, keys)
    assert result.shape == (3, 3, 200)
    buckets = distance_buckets(keys - queries[:, None], causal=causal, buckets=32, furthest=128)
    assert torch.equal(result, torch.stack([3 * buckets + head for head in range(3)]).float())
    users = relative(torch.tensor([[199], [70]]), keys)
    assert users.shape == (2, 3, 1, 200)
    assert torch.equal(users[0, :, 0], result[:, 2]) and torch.equal(users[1, :, 0], result[:, 1])
    assert list(relative.state_dict()) == ["table"]
