from __future__ import annotations

import pytest
import torch
from packed_users import batch_of

from segue.layers.positions import CountedFrom, LearnedPositions


def positions_of(length: int, counted_from: CountedFrom) -> LearnedPositions:
    """Row p of the table holds 10 p and 10 p + 1."""
    positions = LearnedPositions(length, 2, counted_from)
    with torch.no_grad():
        positions.table.copy_(10 * torch.arange(length)[:, None] + torch.tensor([0, 1]))
    return positions


@pytest.mark.parametrize(
    ("counted_from", "rows"), [("oldest", [0, 1, 2, 0, 0, 1]), ("newest", [2, 1, 0, 0, 1, 0])], ids=["oldest", "newest"]
)
def test_places_of_users_of_three_one_and_two_events(counted_from: CountedFrom, rows: list[int]) -> None:
    x = torch.arange(12.0).view(6, 2)
    found = positions_of(4, counted_from)(x, batch_of(3, 1, 2)) - x
    assert found.tolist() == [[10 * row, 10 * row + 1] for row in rows]


def test_the_newest_event_has_the_same_place_however_long_the_history() -> None:
    positions, batch = positions_of(9, "newest"), batch_of(9, 1, 4)
    found = positions(torch.zeros(14, 2), batch)
    assert found[batch.last].tolist() == [[0, 1]] * 3


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
