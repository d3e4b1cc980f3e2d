from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from fixed_samples import of_targets, scores_of
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from segue.models.similarity.dot import Dot
from segue.objective.losses import softmax
from segue.objective.losses.softmax import full_softmax, sampled_softmax, shared_softmax
from segue.objective.samplers.collisions import shared_collisions

DOT = Dot()

# G6: the query (.6, .8), τ = .05, the item 3 as the answer, negatives 7, 3, 9, 5.
QUERY = torch.tensor([[0.6, 0.8]], dtype=torch.float64)
TAU = 0.05
ANSWER = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
SAMPLES = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.8, -0.6], [-0.6, 0.8]], dtype=torch.float64)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_scores_and_loss_of_g6() -> None:
    positive, negatives = scores_of(
        DOT, QUERY, ANSWER, SAMPLES, torch.tensor([3]), torch.tensor([7, 3, 9, 5]), temperature=TAU
    )
    assert positive.tolist() == pytest.approx([16])
    assert negatives[0, [0, 2, 3]].tolist() == pytest.approx([12, 0, 5.6], abs=1e-12)
    assert sampled_softmax(positive, negatives).item() == pytest.approx(0.018180, abs=1e-6)


def test_a_collision_has_no_probability() -> None:
    """The masked negative has probability zero, and the loss is as if it had not been sampled."""
    targets, columns = torch.tensor([3]), [0, 2, 3]
    positive, negatives = scores_of(DOT, QUERY, ANSWER, SAMPLES, targets, torch.tensor([7, 3, 9, 5]), temperature=TAU)
    assert torch.cat((positive[:, None], negatives), 1).softmax(1)[0, 2] == 0
    without = scores_of(DOT, QUERY, ANSWER, SAMPLES[columns], targets, torch.tensor([7, 9, 5]), temperature=TAU)
    assert sampled_softmax(positive, negatives).item() == pytest.approx(sampled_softmax(*without).item(), abs=1e-15)
    unmasked = scores_of(DOT, QUERY, ANSWER, SAMPLES, targets, torch.tensor([7, 4, 9, 5]), temperature=TAU)
    assert sampled_softmax(*unmasked).item() == pytest.approx(0.702278, abs=1e-6), "the loss without the mask"


def test_gradients_of_g6() -> None:
    """With respect to the cosines, so divided by τ; the collision's is exactly zero."""
    positive = torch.tensor([16.0], dtype=torch.float64, requires_grad=True)
    negatives = torch.tensor([[12.0, -math.inf, 0, 5.6]], dtype=torch.float64, requires_grad=True)
    torch.autograd.backward(sampled_softmax(positive, negatives))
    assert positive.grad is not None and negatives.grad is not None
    assert positive.grad.tolist() == pytest.approx([-0.360313 * TAU], abs=1e-7)
    assert (negatives.grad[0] / TAU).tolist() == pytest.approx([0.359713, 0, 0.000002, 0.000598], abs=1e-6)
    assert negatives.grad[0, 1] == 0


def test_a_collision_has_no_gradient_in_its_vector() -> None:
    """As a negative; as the answer it has one."""
    samples = SAMPLES.clone().requires_grad_()
    scores = scores_of(DOT, QUERY, ANSWER, samples, torch.tensor([3]), torch.tensor([7, 3, 9, 5]), temperature=TAU)
    torch.autograd.backward(sampled_softmax(*scores))
    assert samples.grad is not None
    assert (samples.grad[1] == 0).all() and (samples.grad[0] != 0).all()


def test_corrected_loss_of_g7() -> None:
    """Scores (2, 1, .5), q = (.5, .1, .4)."""
    hidden = torch.ones(1, 1, dtype=torch.float64)
    answers, samples = torch.tensor([[2.0]], dtype=torch.float64), torch.tensor([[1.0], [0.5]], dtype=torch.float64)
    items = (torch.tensor([1]), torch.tensor([2, 3]))
    raw = scores_of(DOT, hidden, answers, samples, *items)
    assert sampled_softmax(*raw).item() == pytest.approx(0.464369, abs=1e-6)
    q = torch.tensor([0.5, 0.1, 0.4], dtype=torch.float64)
    positive, negatives = scores_of(DOT, hidden, answers, samples, *items, log_q=(q[:1].log(), q[1:].log()))
    assert positive.tolist() == pytest.approx([2.693147], abs=1e-6)
    assert negatives[0].tolist() == pytest.approx([3.302585, 1.416291], abs=1e-6)
    assert sampled_softmax(positive, negatives).item() == pytest.approx(1.137291, abs=1e-6)


def test_uniform_correction_has_no_effect() -> None:
    hidden, answers, samples = normal(5, 3), normal(5, 3, seed=1), normal(8, 3, seed=2)
    targets, items = torch.tensor([1, 2, 3, 4, 5]), torch.arange(4, 12)
    raw = scores_of(DOT, hidden, answers, samples, targets, items)
    log_q = torch.full((13,), -math.log(50), dtype=torch.float64)
    corrected = scores_of(DOT, hidden, answers, samples, targets, items, log_q=(log_q[:5], log_q[5:]))
    assert sampled_softmax(*corrected).item() == pytest.approx(sampled_softmax(*raw).item(), abs=1e-12)


def test_every_item_once_is_the_full_softmax() -> None:
    """Value and gradients: the answer among the negatives is masked, so every item counts once."""
    hidden, matrix, targets = normal(6, 4), normal(9, 4, seed=1), torch.tensor([0, 8, 3, 3, 5, 1])
    ours = [hidden.clone().requires_grad_(), matrix.clone().requires_grad_()]
    theirs = [hidden.clone().requires_grad_(), matrix.clone().requires_grad_()]
    order = torch.randperm(9, generator=torch.Generator().manual_seed(3))
    scores = scores_of(DOT, ours[0], ours[1][targets], ours[1][order], targets, order)
    result, expected = sampled_softmax(*scores), full_softmax(theirs[0], theirs[1], targets)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)
    torch.autograd.backward(result)
    torch.autograd.backward(expected)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-12)


def test_shared_negatives_equal_own_negatives() -> None:
    """One set for all rows equals the same set written out for every row, by torch's cross-entropy."""
    hidden, answers, samples = normal(5, 3), normal(5, 3, seed=1), normal(4, 3, seed=2)
    scores = scores_of(DOT, hidden, answers, samples, torch.arange(5), torch.arange(10, 14))
    rows = [torch.stack([h @ v for v in (a, *samples)]) for h, a in zip(hidden, answers, strict=True)]
    expected = functional.cross_entropy(torch.stack(rows), torch.zeros(5, dtype=torch.int64))
    assert sampled_softmax(*scores).item() == pytest.approx(expected.item(), abs=1e-12)


@given(st.permutations(range(8)))
def test_the_order_of_negatives_has_no_effect(order: list[int]) -> None:
    hidden, answers, samples, log_q = normal(5, 3), normal(5, 3, seed=1), normal(8, 3, seed=2), normal(13, seed=3)
    targets, items = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([3, 9, 3, 7, 1, 8, 8, 6])
    plain = scores_of(DOT, hidden, answers, samples, targets, items, log_q=(log_q[:5], log_q[5:]))
    shuffled_q = (log_q[:5], log_q[5:][order])
    shuffled = scores_of(DOT, hidden, answers, samples[order], targets, items[order], log_q=shuffled_q)
    assert sampled_softmax(*shuffled).item() == pytest.approx(sampled_softmax(*plain).item(), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_where_every_negative_collides_the_loss_is_zero(dtype: torch.dtype) -> None:
    hidden, answers = normal(1, 3).to(dtype).requires_grad_(), normal(1, 3, seed=1).to(dtype).requires_grad_()
    samples = answers.detach().expand(4, 3).clone().requires_grad_()
    scores = scores_of(DOT, hidden, answers, samples, torch.tensor([5]), torch.tensor([5, 5, 5, 5]))
    loss = sampled_softmax(*scores)
    assert loss.item() == 0
    torch.autograd.backward(loss)
    for part in (hidden, answers, samples):
        assert part.grad is not None and (part.grad == 0).all()


def test_equal_logits_cost_the_log_of_their_number() -> None:
    assert sampled_softmax(torch.zeros(7), torch.zeros(7, 128)).item() == pytest.approx(4.859812, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("positive", "negative", "loss"),
    [(1e4, -1e4, 0), (-1e4, 1e4, 2e4), (1e4, 1e4, math.log(2)), (-1e4, -1e4, math.log(2))],
)
def test_extreme_scores(positive: float, negative: float, loss: float, dtype: torch.dtype) -> None:
    scores = torch.tensor([positive], dtype=dtype), torch.tensor([[negative]], dtype=dtype)
    result = sampled_softmax(scores[0].requires_grad_(), scores[1].requires_grad_())
    assert result.item() == pytest.approx(loss, rel=1e-6, abs=1e-5)
    torch.autograd.backward(result)
    assert scores[0].grad is not None and scores[1].grad is not None
    assert scores[0].grad.item() == pytest.approx(math.exp(-min(loss, 700)) - 1, abs=1e-5)
    assert scores[1].grad.item() == pytest.approx(1 - math.exp(-min(loss, 700)), abs=1e-5)


# --- in tiles, without holding all scores ---------------------------------------------------------------------------


@pytest.mark.parametrize("tile", [1, 64, 1 << 20], ids=["least tiles", "small tiles", "one tile"])
@pytest.mark.parametrize("corrected", [True, False], ids=["log q", "plain"])
@pytest.mark.parametrize("grouped", [True, False], ids=["groups", "rows"])
def test_shared_softmax_is_the_sampled_one_of_all_scores(
    monkeypatch: pytest.MonkeyPatch, tile: int, corrected: bool, grouped: bool
) -> None:
    """The value and every gradient, that of the weights included."""
    monkeypatch.setattr(softmax, "TILE_SCORES", tile)
    monkeypatch.setattr(softmax, "LEAST_TILE", 7)
    rng = torch.Generator().manual_seed(3)
    targets, items = torch.randint(0, 12, (50,), generator=rng), torch.randint(0, 12, (9,), generator=rng)
    groups = torch.arange(50) // 3 if grouped else None
    log_q = (torch.rand(50, generator=rng).double(), torch.rand(9, generator=rng).double()) if corrected else None
    parts = [torch.randn(count, 5, generator=rng).double() for count in (50, 50, 9)]
    weights = torch.rand(50, generator=rng).double()

    def with_gradients(loss: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> list[Tensor]:
        leaves = [part.clone().requires_grad_() for part in (*parts, weights)]
        value = loss(*leaves)
        return [value.detach(), *torch.autograd.grad(value, leaves)]

    collisions = shared_collisions(targets, items, of_targets(groups, targets))
    assert len(collisions.pairs(slice(0, 50))[0]) > 20
    result = with_gradients(lambda q, a, d, w: shared_softmax(q, a, d, collisions, w, log_q=log_q))
    expected = with_gradients(
        lambda q, a, d, w: sampled_softmax(*scores_of(DOT, q, a, d, targets, items, log_q=log_q, groups=groups), w)
    )
    for one, other in zip(result, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_shared_softmax_of_answers_whose_probability_underflows() -> None:
    """A probability of e^-300 is 0 in float32; the loss is 300 all the same."""
    queries, answers = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[-300.0, 0.0], [0.0, 2.0]])
    collisions = shared_collisions(torch.tensor([1, 2]), torch.tensor([3]), None)
    result = shared_softmax(queries, answers, torch.zeros(1, 2), collisions)
    assert result.item() == pytest.approx((300 + math.log1p(math.exp(-2))) / 2, abs=1e-4)
