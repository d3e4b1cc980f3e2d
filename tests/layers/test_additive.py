"""Additive scores in tiles equal plain additive scores."""

from __future__ import annotations

import pytest
import torch
from packed_users import assert_close, normal
from torch import Tensor
from torch.autograd import gradcheck

from segue.layers.attention import additive
from segue.layers.attention.additive import Activation, additive_scores

ACTIVATIONS: tuple[Activation, ...] = ("tanh", "hard-sigmoid")
every_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


def plain(queries: Tensor, keys: Tensor, vector: Tensor, activation: Activation) -> Tensor:
    together = queries[..., :, None, :] + keys[..., None, :, :]
    activated = together.tanh() if activation == "tanh" else (0.2 * together + 0.5).clamp(0, 1)
    return (activated * vector).sum(-1)


@every_activation
@pytest.mark.parametrize("tile", [1, 60, 1 << 20])
@pytest.mark.parametrize("shape", [(2, 5, 7), (2, 3, 4, 6), (1, 1, 1)], ids=str)
def test_tiles_of_any_size_equal_the_plain_scores(
    activation: Activation, tile: int, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of the hard sigmoids are saturated."""
    monkeypatch.setattr(additive, "TILE", tile)
    *before, m, n = shape
    inputs = [(normal(*before, rows, 3, seed=rows) * 2).requires_grad_() for rows in (m, n)]
    vector, grad_output = normal(3, seed=9).requires_grad_(), normal(*shape, seed=10)
    actual, expected = (scores(inputs[0], inputs[1], vector, activation) for scores in (additive_scores, plain))
    assert_close(actual, expected, 1e-12)
    gradients = [torch.autograd.grad(one, [*inputs, vector], grad_output) for one in (actual, expected)]
    for mine, autograds in zip(*gradients, strict=True):
        assert_close(mine, autograds, 1e-12)


@every_activation
@pytest.mark.parametrize("tile", [1, 60, 1 << 20])
def test_causal_scores_equal_the_plain_scores(
    activation: Activation, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores of later keys are arbitrary; masked, they affect no gradient."""
    monkeypatch.setattr(additive, "TILE", tile)
    queries, keys, vector = (normal(*shape, seed=1).requires_grad_() for shape in ((2, 8, 3), (2, 8, 3), (3,)))
    back = torch.ones(8, 8, dtype=torch.bool).tril()
    grad_output = normal(2, 8, 8, seed=4) * back
    actual = additive_scores(queries, keys, vector, activation, causal=True)
    expected = plain(queries, keys, vector, activation)
    assert_close(actual[:, back], expected[:, back], 1e-12)
    gradients = [torch.autograd.grad(one, (queries, keys, vector), grad_output) for one in (actual, expected)]
    for mine, autograds in zip(*gradients, strict=True):
        assert_close(mine, autograds, 1e-12)


def test_the_gradient_equals_finite_differences() -> None:
    inputs = [normal(*shape, seed=2).requires_grad_() for shape in ((2, 3, 2), (2, 4, 2), (2,))]
    assert gradcheck(lambda q, k, v: additive_scores(q, k, v, "tanh"), inputs)
