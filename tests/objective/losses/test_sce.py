"""Scalable cross-entropy: complete buckets are the full softmax, others the formula bucket by bucket."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from segue.objective.losses import sce as room
from segue.objective.losses.sce import sce
from segue.objective.losses.softmax import full_softmax


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def case(states: int, n_items: int, width: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    targets = torch.randint(n_items, (states,), generator=torch.Generator().manual_seed(5))
    return normal(states, width), normal(n_items, width, seed=1), targets


def fresh(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def by_hand(hidden: Tensor, matrix: Tensor, targets: Tensor, buckets: int, states: int, items: int) -> list[float]:
    """Each state's loss, in Python from the definition; NaN if no bucket has the state."""
    losses = [math.nan] * len(hidden)
    for centre in torch.randn(buckets, hidden.shape[1], generator=fresh(), dtype=torch.float64):
        bucket_states = (hidden @ centre).argsort(descending=True)[:states].tolist()
        bucket_items = (matrix @ centre).argsort(descending=True)[:items].tolist()
        for state in bucket_states:
            answer = int(targets[state])
            logits = matrix[[answer, *(item for item in bucket_items if item != answer)]] @ hidden[state]
            loss = functional.cross_entropy(logits, torch.tensor(0)).item()
            losses[state] = max(loss, losses[state]) if losses[state] >= 0 else loss
    return losses


@pytest.mark.parametrize("mix", [False, True])
@pytest.mark.parametrize("buckets", [1, 4])
@pytest.mark.parametrize("weighted", [False, True], ids=["alike", "weighted"])
def test_complete_buckets_are_the_full_softmax(buckets: int, mix: bool, weighted: bool) -> None:
    """G51: six states, nine items, value and gradients."""
    hidden, matrix, targets = case(6, 9, 4)
    weights = torch.tensor([1.0, 2, 0, 4, 5, 0.5], dtype=torch.float64) if weighted else None
    ours, theirs = [(hidden.clone().requires_grad_(), matrix.clone().requires_grad_()) for _ in range(2)]
    result = sce(*ours, targets, weights, generator=fresh(), buckets=buckets, states=6, items=9, mix=mix)
    expected = full_softmax(*theirs, targets, weights)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)
    torch.autograd.backward(result)
    torch.autograd.backward(expected)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("tile", [4, 7, 1 << 16])
@pytest.mark.parametrize(("buckets", "states", "items"), [(1, 3, 2), (3, 4, 5), (2, 20, 1), (6, 5, 40)])
def test_equal_to_the_definition(
    buckets: int, states: int, items: int, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "TILE_ITEMS", tile)
    hidden, matrix, targets = case(20, 40)
    weights = torch.rand(20, generator=fresh(3), dtype=torch.float64)
    result = sce(hidden, matrix, targets, weights, generator=fresh(), buckets=buckets, states=states, items=items)
    losses = by_hand(hidden, matrix, targets, buckets, states, items)
    of_covered = [(loss, weight) for loss, weight in zip(losses, weights.tolist(), strict=True) if loss >= 0]
    assert len(of_covered) >= states
    expected = sum(loss * weight for loss, weight in of_covered) / sum(weight for _, weight in of_covered)
    assert result.item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("mix", [False, True])
def test_gradient_check(mix: bool) -> None:
    """Small steps do not change what is in a bucket."""
    hidden, matrix, targets = case(8, 12)
    weights = torch.arange(8, dtype=torch.float64)
    inputs = hidden.requires_grad_(), matrix.requires_grad_()

    def loss(states: Tensor, vectors: Tensor) -> Tensor:
        return sce(states, vectors, targets, weights, generator=fresh(), buckets=3, states=4, items=5, mix=mix)

    assert torch.autograd.gradcheck(loss, inputs)


def test_a_loss_of_exactly_zero_is_counted() -> None:
    """One state's loss is zero to the last digit; the mean is over both states all the same."""
    hidden = torch.tensor([[1.0, 0], [0, 0]], dtype=torch.float64)
    matrix = torch.tensor([[1000.0, 0], [0, 1], [0, -1]], dtype=torch.float64)
    result = sce(hidden, matrix, torch.tensor([0, 1]), generator=fresh(), buckets=1, states=2, items=3)
    assert result.item() == pytest.approx(math.log(3) / 2, abs=1e-12)


def test_a_state_in_no_bucket_has_no_effect() -> None:
    hidden, matrix, targets = case(30, 40)
    hidden.requires_grad_()
    torch.autograd.backward(sce(hidden, matrix, targets, generator=fresh(), buckets=2, states=3, items=5))
    assert hidden.grad is not None
    assert 3 <= int((hidden.grad != 0).any(1).sum()) <= 6


@pytest.mark.parametrize(("states", "sizes"), [(100, (20, 20, 256)), (3, (3, 3, 256)), (1, (2, 1, 256))])
def test_default_sizes(states: int, sizes: tuple[int, int, int]) -> None:
    """2√M buckets of as many states, and 256 items; never more states than there are."""
    hidden, matrix, targets = case(states, 300)
    explicit = sce(
        hidden, matrix, targets, generator=fresh(), buckets=sizes[0], states=sizes[1], items=sizes[2], mix=False
    )
    assert sce(hidden, matrix, targets, generator=fresh()).item() == explicit.item()


def test_buckets_larger_than_the_batch_and_the_catalogue() -> None:
    hidden, matrix, targets = case(4, 5)
    result = sce(hidden, matrix, targets, generator=fresh(), buckets=2, states=100, items=100)
    assert result.item() == pytest.approx(full_softmax(hidden, matrix, targets).item(), abs=1e-12)


def test_an_answer_alone_in_its_bucket_costs_nothing() -> None:
    hidden, matrix = normal(3, 2).requires_grad_(), normal(1, 2, seed=1).requires_grad_()
    loss = sce(hidden, matrix, torch.zeros(3, dtype=torch.int64), generator=fresh(), items=1)
    assert loss.item() == pytest.approx(0, abs=1e-12)
    torch.autograd.backward(loss)
    for part in (hidden, matrix):
        assert part.grad is not None and part.grad.abs().max() < 1e-12


def test_it_is_below_the_full_softmax_and_nearer_with_more_items() -> None:
    """A sum over some items; random directions find those of high score, so half of the items have nearly all of it."""
    hidden, matrix, targets = case(50, 400, 8)
    whole = full_softmax(hidden * 3, matrix, targets).item()
    some = [sce(hidden * 3, matrix, targets, generator=fresh(), states=50, items=n).item() for n in (10, 50, 200, 400)]
    assert some == sorted(some) and some[-1] == pytest.approx(whole, abs=1e-9)
    assert some[-2] > whole - 0.2


def test_covered_states_of_weight_zero_cause_no_division_by_zero() -> None:
    hidden, matrix, targets = case(30, 40)
    first = (hidden @ torch.randn(1, 3, generator=fresh(), dtype=torch.float64)[0]).argmax()
    weights = torch.ones(30, dtype=torch.float64)
    weights[first] = 0
    assert sce(hidden, matrix, targets, weights, generator=fresh(), buckets=1, states=1).item() == 0


def test_directions_depend_on_the_generator_alone() -> None:
    hidden, matrix, targets = case(30, 40)
    before = torch.get_rng_state()
    generator = fresh()
    first, second = (sce(hidden, matrix, targets, generator=generator, buckets=2, states=3).item() for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert first == sce(hidden, matrix, targets, generator=fresh(), buckets=2, states=3).item() != second
