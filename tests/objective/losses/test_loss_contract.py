"""What holds for every loss of scores: `loss(positive [M], negatives [M, K], weights)`."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from segue.objective.losses import binary, pairwise, softmax
from segue.objective.losses.binary import bce, gbce
from segue.objective.losses.pairwise import bpr, bpr_max, top1, top1_max
from segue.objective.losses.softmax import sampled_softmax

Loss = Callable[[Tensor, Tensor, Tensor | None], Tensor]

# Each with its function, and the loss of a row whose negatives all collide (its answer's score is 1.2).
LOSSES: dict[str, tuple[Callable[..., Tensor], Loss, float]] = {
    "sampled_softmax": (sampled_softmax, sampled_softmax, 0.0),
    "bce": (bce, bce, 0.263282),
    "gbce": (gbce, lambda p, n, w: gbce(p, n, 0.3, w), 0.3 * 0.263282),
    "bpr": (bpr, bpr, 0.0),
    "bpr_max": (bpr_max, lambda p, n, w: bpr_max(p, n, weights=w), 0.0),
    "bpr_max, regularised": (bpr_max, lambda p, n, w: bpr_max(p, n, 1.5, w), 0.0),
    "top1": (top1, top1, 0.0),
    "top1_max": (top1_max, top1_max, 0.0),
}

every_loss = pytest.mark.parametrize("loss", [loss for _, loss, _ in LOSSES.values()], ids=list(LOSSES))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_collisions() -> tuple[Tensor, Tensor]:
    """Four rows of five negatives: no collision, one, three, and only collisions."""
    positive, negatives = normal(4), normal(4, 5, seed=1)
    negatives[1, 2] = negatives[2, 0] = negatives[2, 3] = negatives[2, 4] = negatives[3] = -math.inf
    return positive.requires_grad_(), negatives.requires_grad_()


def gradients(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, inputs))


def test_this_contract_covers_every_loss() -> None:
    functions = {
        function
        for module in (binary, pairwise, softmax)
        for _, function in inspect.getmembers(module, inspect.isfunction)
        if list(inspect.signature(function).parameters)[:2] == ["positive", "negatives"]
    }
    assert functions == {function for function, _, _ in LOSSES.values()}
    assert len(functions) == 7


@every_loss
def test_gradient_check(loss: Loss) -> None:
    inputs = normal(4).requires_grad_(), normal(4, 5, seed=1).requires_grad_()
    weights = torch.tensor([1.0, 0, 2, 3], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda p, n: loss(p, n, None), inputs)
    assert torch.autograd.gradcheck(lambda p, n: loss(p, n, weights), inputs)


@every_loss
def test_loss_falls_when_the_answer_scores_higher(loss: Loss) -> None:
    negatives = normal(1, 6, seed=1)
    losses = [loss(torch.tensor([float(score)]), negatives, None).item() for score in range(-3, 5)]
    assert all(later < earlier for earlier, later in itertools.pairwise(losses))


@every_loss
def test_the_order_of_negatives_has_no_effect(loss: Loss) -> None:
    positive, negatives = normal(5), normal(5, 8, seed=1)
    negatives[2, 3] = negatives[4, 0] = -math.inf
    for seed in range(3):
        order = torch.stack([torch.randperm(8, generator=torch.Generator().manual_seed(seed + at)) for at in range(5)])
        assert loss(positive, negatives.gather(1, order), None).item() == pytest.approx(
            loss(positive, negatives, None).item(), abs=1e-12
        )


@every_loss
def test_a_collision_counts_as_not_sampled(loss: Loss) -> None:
    """In value and in every gradient; its own gradient is exactly zero."""
    positive, negatives = with_collisions()
    for row, columns in ((0, [0, 1, 2, 3, 4]), (1, [0, 1, 3, 4]), (2, [1, 2])):
        answer, others = positive[[row]], negatives[[row]]
        masked, without = loss(answer, others, None), loss(answer, others[:, columns], None)
        assert masked.item() == pytest.approx(without.item(), abs=1e-14)
        ours, theirs = gradients(masked, answer, others), gradients(without, answer, others)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-14)
        assert (ours[1][others == -math.inf] == 0).all() and (ours[1][others != -math.inf] != 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", LOSSES)
def test_where_every_negative_collides(name: str, dtype: torch.dtype) -> None:
    """Without negatives a comparison costs nothing; a loss with a term of the answer alone still has that term."""
    _, loss, expected = LOSSES[name]
    positive = torch.tensor([1.2], dtype=dtype, requires_grad=True)
    negatives = torch.full((1, 3), -math.inf, dtype=dtype, requires_grad=True)
    result = loss(positive, negatives, None)
    assert result.item() == pytest.approx(expected, abs=1e-6)
    of_answer, of_negatives = gradients(result, positive, negatives)
    assert (of_negatives == 0).all() and torch.isfinite(of_answer).all() and (of_answer.item() != 0) == (expected > 0)


@every_loss
def test_a_row_of_collisions_does_not_change_the_others(loss: Loss) -> None:
    positive, negatives = with_collisions()
    each = [loss(positive[[row]], negatives[[row]], None).item() for row in range(4)]
    result = loss(positive, negatives, None)
    assert result.item() == pytest.approx(sum(each) / 4, abs=1e-12)
    assert all(torch.isfinite(part).all() for part in gradients(result, positive, negatives))


@every_loss
def test_the_loss_is_a_weighted_mean(loss: Loss) -> None:
    positive, negatives = normal(3).requires_grad_(), normal(3, 4, seed=1)
    losses = [loss(positive[[row]], negatives[[row]], None).item() for row in range(3)]
    assert loss(positive, negatives, None).item() == pytest.approx(sum(losses) / 3, abs=1e-12)
    for scale in (1.0, 0.01):
        result = loss(positive, negatives, scale * torch.tensor([1.0, 0, 3], dtype=torch.float64))
        assert result.item() == pytest.approx((losses[0] + 3 * losses[2]) / 4, abs=1e-12)
    assert gradients(result, positive)[0][1] == 0


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_scores_stay_finite(loss: Loss, dtype: torch.dtype) -> None:
    scores = torch.tensor([-1e4, 0, 1e4], dtype=dtype)
    positive = scores.repeat_interleave(9).requires_grad_()
    negatives = torch.cartesian_prod(scores, scores).repeat(3, 1).requires_grad_()
    result = loss(positive, negatives, None)
    assert torch.isfinite(result)
    assert all(torch.isfinite(part).all() for part in gradients(result, positive, negatives))


@every_loss
def test_values_that_are_not_finite_reach_the_loss(loss: Loss) -> None:
    positive, negatives = normal(3), normal(3, 4, seed=1)
    positive[1] = math.nan
    assert loss(positive, normal(3, 4, seed=1), None).isnan()
    negatives[2, 2] = math.nan
    assert loss(normal(3), negatives, None).isnan()


@every_loss
def test_inputs_are_not_changed(loss: Loss) -> None:
    positive, negatives = with_collisions()
    before = positive.detach().clone(), negatives.detach().clone()
    torch.autograd.backward(loss(positive, negatives, None))
    assert torch.equal(positive, before[0]) and torch.equal(negatives, before[1])
