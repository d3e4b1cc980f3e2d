from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from segue.objective.losses.pairwise import bpr, bpr_max, top1, top1_max
from segue.objective.losses.softmax import sampled_softmax

# G13: one answer, three negatives.
POSITIVE = torch.tensor([1.0], dtype=torch.float64)
NEGATIVES = torch.tensor([[0.5, -0.2, 0.8]], dtype=torch.float64)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_losses_of_g13() -> None:
    assert sampled_softmax(POSITIVE, NEGATIVES).item() == pytest.approx(1.003002, abs=1e-6)
    assert bpr_max(POSITIVE, NEGATIVES).item() == pytest.approx(0.488574, abs=1e-6)
    assert bpr_max(POSITIVE, NEGATIVES, 1.0).item() == pytest.approx(0.886886, abs=1e-6)
    assert top1_max(POSITIVE, NEGATIVES).item() == pytest.approx(0.983475, abs=1e-6)
    assert bpr(POSITIVE, NEGATIVES).item() == pytest.approx(0.445166, abs=1e-6)
    assert top1(POSITIVE, NEGATIVES).item() == pytest.approx(0.928704, abs=1e-6)


def test_with_one_negative_the_losses_are_equal() -> None:
    positive, negatives = normal(6), normal(6, 1, seed=1)
    expected = bpr(positive, negatives).item()
    assert bpr_max(positive, negatives).item() == pytest.approx(expected, abs=1e-12)
    assert sampled_softmax(positive, negatives).item() == pytest.approx(expected, abs=1e-12)
    assert top1(positive, negatives).item() == pytest.approx(top1_max(positive, negatives).item(), abs=1e-12)


def test_equal_scores() -> None:
    positive, negatives = torch.zeros(3), torch.zeros(3, 7)
    assert bpr(positive, negatives).item() == pytest.approx(math.log(2), abs=1e-6)
    assert bpr_max(positive, negatives, 5.0).item() == pytest.approx(math.log(2), abs=1e-6)
    assert top1(positive, negatives).item() == pytest.approx(1, abs=1e-6)
    assert top1_max(positive, negatives).item() == pytest.approx(1, abs=1e-6)


def test_the_hardest_negative_dominates() -> None:
    """A hundred easy negatives do not change the softmax-weighted losses, but dominate the means of BPR and TOP1,
    where each of them costs one by its regularisation."""
    positive, hard = torch.tensor([0.0]), torch.tensor([[2.0]])
    many = torch.cat((hard, torch.full((1, 100), -20.0)), 1)
    for loss in (bpr_max, top1_max):
        assert loss(positive, many).item() == pytest.approx(loss(positive, hard).item(), abs=1e-4)
    assert bpr(positive, many).item() < bpr(positive, hard).item() / 50
    assert top1(positive, many).item() == pytest.approx((top1(positive, hard).item() + 100) / 101, abs=1e-4)


def test_an_answer_of_very_low_score_has_a_gradient() -> None:
    """-log of a sum of σ would be -log 0 where σ underflows; the logarithms are added instead."""
    positive = torch.tensor([-500.0], requires_grad=True)
    loss = bpr_max(positive, torch.tensor([[500.0, -600.0]]))
    assert loss.item() == pytest.approx(1000, rel=1e-6)
    torch.autograd.backward(loss)
    assert positive.grad is not None and positive.grad.item() == pytest.approx(-1, abs=1e-6)
