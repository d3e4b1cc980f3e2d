"""LambdaRank's gradient against the formulas written out pair by pair."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from segue.objective.losses import lambdarank as room
from segue.objective.losses.lambdarank import lambdarank


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients_of(
    scores: Tensor, rows: Tensor, items: Tensor, depth: int = 4000, top: int = 50, sigma: float = 1.0
) -> Tensor:
    """The gradient in the scores, of each state's own loss."""
    leaf = scores.clone().requires_grad_()
    torch.autograd.backward(lambdarank(leaf, rows, items, depth=depth, top=top, sigma=sigma))
    assert leaf.grad is not None
    return leaf.grad * len(scores)


def ndcg(scores: list[float], answers: set[int], top: int) -> float:
    order = sorted(range(len(scores)), key=lambda item: -scores[item])
    gain = sum(1 / math.log2(rank + 2) for rank, item in enumerate(order[:top]) if item in answers)
    return gain / sum(1 / math.log2(rank + 2) for rank in range(min(len(answers), top)))


def by_hand(scores: list[float], answers: set[int], depth: int, top: int, sigma: float) -> list[float]:
    """One state: every pair of ranks of which one is in the top."""
    order = sorted(range(len(scores)), key=lambda item: -scores[item])[:depth]
    ideal = sum((2**1 - 1) / math.log2(rank + 2) for rank in range(min(len(answers), top)))
    gradient = [0.0] * len(scores)
    for high in range(min(top, len(order))):
        for low in range(high + 1, len(order)):
            gains = [2 ** int(order[place] in answers) - 1 for place in (high, low)]
            if gains[0] == gains[1]:
                continue
            better, worse = (order[high], order[low]) if gains[0] else (order[low], order[high])
            delta = abs((gains[0] - gains[1]) * (1 / math.log2(high + 2) - 1 / math.log2(low + 2))) / ideal
            ahead = scores[better] - scores[worse]
            change = -sigma / (1 + math.exp(sigma * ahead)) * delta / (abs(ahead) + 0.01)
            gradient[better] += change
            gradient[worse] -= change
    total = sum(abs(value) for value in gradient)
    return [value * math.log2(1 + total) / total if total else 0.0 for value in gradient]


@st.composite
def queries(draw: st.DrawFn) -> tuple[Tensor, list[tuple[int, int]]]:
    """Scores without ties and pairs of state and answer, some repeated, some states with none or with all."""
    states, n_items = draw(st.integers(1, 3)), draw(st.integers(2, 8))
    pair = st.tuples(st.integers(0, states - 1), st.integers(0, n_items - 1))
    return normal(states, n_items, seed=draw(st.integers(0, 99))) * 3, draw(st.lists(pair, min_size=1, max_size=9))


@settings(max_examples=60, deadline=None)
@given(
    queries(),
    st.sampled_from([(4000, 50), (5, 3), (4, 1), (3, 3)]),
    st.sampled_from([1.0, 0.5]),
    st.sampled_from([1 << 20, 4]),
)
def test_lambdarank_gradients_are_those_of_the_formulas(
    query: tuple[Tensor, list[tuple[int, int]]], cuts: tuple[int, int], sigma: float, tile: int
) -> None:
    scores, pairs = query
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "TILE_PAIRS", tile)
        rows, items = torch.tensor(pairs).unbind(1)
        gradients = gradients_of(scores, rows, items, *cuts, sigma)
    for state, row in enumerate(scores.tolist()):
        answers = {item for other, item in pairs if other == state}
        assert gradients[state].tolist() == pytest.approx(by_hand(row, answers, *cuts, sigma), abs=1e-12)


def test_two_items_on_paper() -> None:
    """The answer at rank two: |Δ| = 1 - 1/log2 3, over 1.01, times σ(1); then both together scaled by the logarithm."""
    push = (1 - 0.630930) / 1.01 * 0.731059
    scaled = push * math.log2(1 + 2 * push) / (2 * push)
    gradients = gradients_of(torch.tensor([[1.0, 0.0]]), torch.tensor([0]), torch.tensor([1]))
    assert gradients[0].tolist() == pytest.approx([scaled, -scaled], abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(queries())
def test_gradients_raise_answers_lower_others_and_sum_to_zero(query: tuple[Tensor, list[tuple[int, int]]]) -> None:
    scores, pairs = query
    rows, items = torch.tensor(pairs).unbind(1)
    gradients = gradients_of(scores, rows, items)
    relevant = torch.zeros_like(scores, dtype=torch.bool)
    relevant[rows, items] = True
    mixed = relevant.any(1) & ~relevant.all(1)
    assert (gradients[relevant & mixed[:, None]] < 0).all() and (gradients[~relevant & mixed[:, None]] > 0).all()
    assert (gradients[~mixed] == 0).all(), "no pair to order"
    assert gradients.sum(1).tolist() == pytest.approx([0] * len(scores), abs=1e-12)


def test_the_loss_is_one_minus_ndcg() -> None:
    scores, pairs = normal(4, 30), [(0, 3), (0, 4), (1, 9), (2, 0), (2, 7), (2, 7), (2, 29), (3, 1)]
    losses = [
        1 - ndcg(row, {item for other, item in pairs if other == state}, 10)
        for state, row in enumerate(scores.tolist())
    ]
    loss = lambdarank(scores, *torch.tensor(pairs).unbind(1), top=10).item()
    assert loss == pytest.approx(sum(losses) / 4, abs=1e-12)


def test_an_answer_below_the_depth_counts_and_has_no_gradient() -> None:
    """NDCG's ideal has both answers: one of them is below the depth."""
    scores = torch.tensor([[5.0, 4, 3, 2, 1]])
    rows, items = torch.tensor([0, 0]), torch.tensor([0, 4])
    assert lambdarank(scores, rows, items, depth=3, top=3).item() == pytest.approx(1 - 1 / 1.630930, abs=1e-6)
    gradient = gradients_of(scores, rows, items, 3, 3)[0]
    assert (gradient[3:] == 0).all() and gradient[0] < 0


def test_a_few_steps_improve_ndcg() -> None:
    """From a random order, by the gradient alone; the loss falls with it."""
    scores = normal(6, 200).requires_grad_()
    rows, items = torch.arange(6).repeat_interleave(3), torch.arange(18) * 11
    losses = []
    for _ in range(60):
        loss = lambdarank(scores, rows, items)
        (gradient,) = torch.autograd.grad(loss, scores)
        losses.append(loss.item())
        scores = (scores - 6 * gradient).detach().requires_grad_()
    assert losses[0] > 0.8 and losses[-1] < 0.2


def test_a_factor_of_the_loss_scales_the_gradient() -> None:
    """The loss may be multiplied like any other; its own derivative is not used."""
    scores, rows, items = normal(2, 9).requires_grad_(), torch.tensor([0, 1]), torch.tensor([3, 4])
    (once,) = torch.autograd.grad(lambdarank(scores, rows, items), scores)
    (thrice,) = torch.autograd.grad(3 * lambdarank(scores, rows, items), scores)
    torch.testing.assert_close(thrice, 3 * once)
    assert not lambdarank(scores.detach(), rows, items).requires_grad


@pytest.mark.parametrize("scale", [0.0, 1e4])
def test_extreme_scores_stay_finite(scale: float) -> None:
    gradients = gradients_of((normal(3, 60) * scale).float(), torch.arange(3), torch.arange(3))
    assert torch.isfinite(gradients).all() and (gradients[torch.arange(3), torch.arange(3)] <= 0).all()
