from __future__ import annotations

import math

import pytest
import torch

from segue.objective.losses.binary import bce, gbce, gbce_beta

# G5b: eleven items, five negatives, t = .75.
POSITIVE = torch.tensor([1.2], dtype=torch.float64)
NEGATIVES = torch.tensor([[-0.5, 0.3, 0, -1, 0.8]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("n_items", "negatives", "t", "beta"),
    [
        (3416, 256, 0.75, 0.3062225),
        (3416, 1, 0.0, 1.0),
        (3416, 256, 1.0, 0.0749634),
        (1000, 10, 0.75, 0.2575075),
        (11, 5, 0.75, 0.625),
    ],
)
def test_calibration_of_g5(n_items: int, negatives: int, t: float, beta: float) -> None:
    assert gbce_beta(n_items, negatives, t) == pytest.approx(beta, abs=1e-7)


def test_calibration_is_one_if_every_other_item_is_sampled() -> None:
    assert gbce_beta(11, 10, 0.75) == gbce_beta(11, 40, 0.75) == 1


def test_loss_of_g5b() -> None:
    assert gbce(POSITIVE, NEGATIVES, gbce_beta(11, 5, 0.75)).item() == pytest.approx(0.611749, abs=1e-6)
    assert bce(POSITIVE, NEGATIVES).item() == pytest.approx(0.628204, abs=1e-6)


def test_gamma_of_g5b() -> None:
    """The paper's own form: plain cross-entropy of an answer whose score is 1.721128 instead."""
    expected = bce(torch.tensor([1.721128], dtype=torch.float64), NEGATIVES)
    assert gbce(POSITIVE, NEGATIVES, 0.625).item() == pytest.approx(expected.item(), abs=1e-6)


def test_gradients_of_g5b() -> None:
    positive, negatives = POSITIVE.clone().requires_grad_(), NEGATIVES.clone().requires_grad_()
    torch.autograd.backward(gbce(positive, negatives, 0.625))
    assert positive.grad is not None and negatives.grad is not None
    assert positive.grad.tolist() == pytest.approx([-0.024112], abs=1e-6)
    assert negatives.grad[0].tolist() == pytest.approx([0.062923, 0.095740, 0.083333, 0.044824, 0.114996], abs=1e-6)


def test_pair_of_g14() -> None:
    """The golden adds the two terms, the loss is their mean."""
    assert 2 * bce(POSITIVE, NEGATIVES[:, :1]).item() == pytest.approx(0.737359, abs=1e-6)


def test_no_calibration_is_binary_cross_entropy() -> None:
    """By torch, over the K + 1 scores."""
    positive = torch.randn(6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    negatives = torch.randn(6, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    scores = torch.cat((positive[:, None], negatives), 1)
    labels = torch.zeros_like(scores)
    labels[:, 0] = 1
    expected = torch.nn.functional.binary_cross_entropy_with_logits(scores, labels).item()
    assert bce(positive, negatives).item() == pytest.approx(expected, abs=1e-12)
    assert gbce(positive, negatives, gbce_beta(50, 9, 0.0)).item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("negatives", [1, 128])
def test_equal_scores_cost_log_2(negatives: int) -> None:
    assert bce(torch.zeros(3), torch.zeros(3, negatives)).item() == pytest.approx(0.693147, abs=1e-6)


def test_digits_survive_in_float32() -> None:
    """Although σ(s) itself is 1 or 0 in float32."""
    loss = bce(torch.tensor([40.0]), torch.tensor([[-40.0]])).item()
    assert loss == pytest.approx(math.exp(-40), rel=1e-5)
    assert bce(torch.tensor([-200.0]), torch.tensor([[-40.0]])).item() == pytest.approx(100, rel=1e-6)
