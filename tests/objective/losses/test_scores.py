"""Scores for sampled losses: temperature, log q, and negatives that are answers."""

from __future__ import annotations

import math

import pytest
import torch
from fixed_samples import LargestMade, scores_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from segue.models.similarity.dot import Dot

DOT = Dot()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@st.composite
def samples(draw: st.DrawFn) -> tuple[list[int], list[list[int]], list[int] | None]:
    """Targets, each row's items, and groups in any order with any numbers."""
    rows, columns = draw(st.integers(1, 8)), draw(st.integers(1, 6))
    item = st.integers(1, 9)
    targets = draw(st.lists(item, min_size=rows, max_size=rows))
    items = draw(st.lists(st.lists(item, min_size=columns, max_size=columns), min_size=rows, max_size=rows))
    groups = draw(st.none() | st.lists(st.sampled_from([0, 1, 7, 100]), min_size=rows, max_size=rows))
    return targets, items, groups


def collisions(targets: list[int], items: list[list[int]], groups: list[int] | None) -> list[list[bool]]:
    """Row by row, from the definition."""
    numbers = list(range(len(targets))) if groups is None else groups
    answers = [
        {target for target, other in zip(targets, numbers, strict=True) if other == number} for number in numbers
    ]
    return [[item in answers[row] for item in items[row]] for row in range(len(targets))]


@settings(max_examples=60, deadline=None)
@given(samples())
def test_an_answer_of_the_state_is_never_its_negative(
    sample: tuple[list[int], list[list[int]], list[int] | None],
) -> None:
    targets, items, groups = sample
    matrix, hidden = normal(10, 3), normal(len(targets), 3, seed=1)
    grouped = None if groups is None else torch.tensor(groups)
    answers, others = torch.tensor(targets), torch.tensor(items)
    plain = torch.einsum("md,mkd->mk", hidden, matrix[others])

    positive, negatives = scores_of(DOT, hidden, matrix[answers], matrix[others], answers, others, groups=grouped)
    expected = plain.masked_fill(torch.tensor(collisions(targets, items, groups)), -math.inf)
    torch.testing.assert_close(negatives, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(positive, (hidden * matrix[answers]).sum(1), rtol=0, atol=1e-12)

    first = items[0]
    shared, one = torch.tensor(first), [first] * len(targets)
    positive, negatives = scores_of(DOT, hidden, matrix[answers], matrix[shared], answers, shared, groups=grouped)
    expected = (hidden @ matrix[shared].T).masked_fill(torch.tensor(collisions(targets, one, groups)), -math.inf)
    torch.testing.assert_close(negatives, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(positive, (hidden * matrix[answers]).sum(1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("grouped", [False, True], ids=["alone", "grouped"])
def test_shared_negatives_equal_own_negatives(grouped: bool) -> None:
    """Law 29.3, scores and gradients: one set for all rows, or the same set written out for each."""
    targets, items = torch.tensor([1, 2, 3, 2, 5]), torch.tensor([3, 9, 3, 7, 1, 8])
    groups = torch.tensor([4, 4, 0, 9, 0]) if grouped else None
    log_q = normal(10, seed=3)
    results = []
    for own in (False, True):
        hidden, matrix = normal(5, 4).requires_grad_(), normal(10, 4, seed=1).requires_grad_()
        sampled_items = items.expand(5, 6) if own else items
        positive, negatives = scores_of(
            DOT,
            hidden,
            matrix[targets],
            matrix[sampled_items],
            targets,
            sampled_items,
            temperature=0.3,
            log_q=(log_q[targets], log_q[sampled_items]),
            groups=groups,
        )
        torch.autograd.backward(positive.sum() + negatives.sigmoid().sum())
        results.append([positive, negatives, hidden.grad, matrix.grad])
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_scores_are_divided_by_the_temperature_and_then_corrected(own: bool) -> None:
    hidden, answers = torch.tensor([[3.0]]), torch.tensor([[2.0]])
    others, items = torch.tensor([[1.0], [-2.0]]), torch.tensor([6, 7])
    log_q = torch.tensor([0.25]), torch.tensor([-1.0, 0.5])
    if own:
        others, items, log_q = others[None], items[None], (log_q[0], log_q[1][None])
    positive, negatives = scores_of(
        DOT, hidden, answers, others, torch.tensor([5]), items, temperature=0.5, log_q=log_q
    )
    assert positive.tolist() == pytest.approx([6 / 0.5 - 0.25])
    assert negatives.tolist() == [pytest.approx([3 / 0.5 + 1, -6 / 0.5 - 0.5])]


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_gradient_check(own: bool) -> None:
    """With a collision; its incoming gradient is dropped, NaN or not."""
    targets = torch.tensor([1, 2, 3])
    items = torch.tensor([[4, 2], [5, 2], [3, 6]]) if own else torch.tensor([4, 2])
    collides = items == targets[:, None]

    def finite(hidden: Tensor, answers: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
        positive, negatives = scores_of(DOT, hidden, answers, vectors, targets, items, temperature=0.7)
        return positive, negatives[~collides]

    inputs = [normal(3, 2), normal(3, 2, seed=1), normal(*items.shape, 2, seed=2)]
    assert torch.autograd.gradcheck(finite, [part.requires_grad_() for part in inputs])


def test_the_callers_tensors_are_not_changed() -> None:
    hidden, answers, vectors = normal(2, 3), normal(2, 3, seed=1), normal(4, 3, seed=2)
    log_q = normal(2), normal(4)
    before = [part.clone() for part in (hidden, answers, vectors, *log_q)]
    scores_of(DOT, hidden, answers, vectors, torch.tensor([1, 2]), torch.arange(1, 5), temperature=2.0, log_q=log_q)
    assert all(torch.equal(*both) for both in zip((hidden, answers, vectors, *log_q), before, strict=True))


def test_collisions_of_shared_negatives_need_no_mask_of_all_scores() -> None:
    """200 states of two answers each, 1000 negatives: 400 × 1000 scores, 800 pairs of row and answer."""
    targets, items = torch.arange(1, 401), torch.arange(301, 1301)
    with LargestMade() as largest:
        _, negatives = scores_of(
            DOT, normal(400, 2), normal(400, 2), normal(1000, 2), targets, items, groups=torch.arange(400) // 2
        )
    assert largest.numbers < 4000
    assert int((negatives == -math.inf).sum()) == 200, "the last hundred targets, each for both rows of its group"
