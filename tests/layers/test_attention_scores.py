"""Four kinds of score, each by its own formula."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from packed_users import assert_close, normal
from torch import Tensor

from segue.layers.attention.scores import Additive, Bilinear, ScoreKind, make_score
from segue.layers.attention.weights import select_weights

KINDS: tuple[ScoreKind, ...] = ("dot", "scaled-dot", "bilinear", "additive")
every_kind = pytest.mark.parametrize("kind", KINDS)

# G1: eight tokens as word and position, one matrix for queries, keys and values, and a last one for the verdict.
TOKENS = torch.tensor(
    [[0, 0, 0], [0, -5, 1], [1, 0, 2], [0, 0, 3], [-1, 0, 4], [0, 0, 5], [-2, 0, 6], [0, 0, 7]], dtype=torch.float64
)
PROJECTION = torch.tensor([[0.1, 0], [0, -0.1], [0, 0.1]], dtype=torch.float64)
VERDICTS = torch.tensor([[1, -1], [-1, 1]], dtype=torch.float64)
ROWS = [[0.0, 0], [0, 0.6], [0.1, 0.2], [0, 0.3], [-0.1, 0.4], [0, 0.5], [-0.2, 0.6], [0, 0.7]]
LAST_SCORES = [0, 0.296985, 0.098995, 0.148492, 0.197990, 0.247487, 0.296985, 0.346482]
LAST_WEIGHTS = [0.101322, 0.136358, 0.111865, 0.117541, 0.123506, 0.129773, 0.136358, 0.143277]
UNSCALED_WEIGHTS = [0.092572, 0.140891, 0.106483, 0.114204, 0.122485, 0.131366, 0.140891, 0.151107]
PRINTED_WEIGHTS = [0.101, 0.136, 0.112, 0.118, 0.124, 0.130, 0.136, 0.143]  # in the exercise itself
CAUSAL_MIXED = [
    [0, 0.337979],
    [0.033156, 0.275346],
    [0.024579, 0.285014],
    [-0.001412, 0.311589],
    [-0.001162, 0.346910],
    [-0.033669, 0.390169],
]


def soft(scores: Tensor, may_attend: Tensor | None = None) -> Tensor:
    return select_weights(scores, may_attend, "soft", temperature=1.0, training=False, generator=None).weights


def row(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def test_the_exercise_of_g1_from_tokens_to_verdict() -> None:
    stream = TOKENS @ PROJECTION
    assert_close(stream, ROWS, 1e-12)
    scores = make_score("scaled-dot", 2, 2, 2)(stream, stream)
    assert_close(scores[7], row(*LAST_SCORES), 1e-6)
    weights = soft(scores)[7]
    assert_close(weights, row(*LAST_WEIGHTS), 1e-6)
    assert_close(weights, row(*PRINTED_WEIGHTS), 5e-4)
    assert weights.sum().item() == pytest.approx(1, abs=1e-12)
    mixed = weights @ stream
    assert_close(mixed, row(-0.028436, 0.435848), 1e-6)
    logits = VERDICTS @ mixed
    assert_close(logits, row(-0.464284, 0.464284), 1e-6)
    good, bad = logits.softmax(0).tolist()
    assert (good, bad) == (pytest.approx(0.283216, abs=1e-6), pytest.approx(0.716784, abs=1e-6))


def test_the_exercise_of_g1_with_a_causal_mask() -> None:
    stream, back = TOKENS @ PROJECTION, torch.ones(8, 8, dtype=torch.bool).tril()
    scores = make_score("scaled-dot", 2, 2, 2)(stream, stream)
    weights = soft(scores, back)
    assert torch.equal(weights[7], soft(scores)[7]), "the last one sees everything anyway"
    assert_close(weights[2], row(0.320047, 0.348389, 0.331564, 0, 0, 0, 0, 0), 1e-6)
    assert_close((weights @ stream)[1:7], CAUSAL_MIXED, 1e-6)


def test_the_exercise_of_g1_differs_without_the_root() -> None:
    stream = TOKENS @ PROJECTION
    weights = soft(make_score("dot", 2, 2, 2)(stream, stream))[7]
    assert_close(weights, row(*UNSCALED_WEIGHTS), 1e-6)
    assert (weights - row(*LAST_WEIGHTS)).abs().max() > 5e-3


def test_products() -> None:
    queries, keys = normal(2, 3, 4, seed=1), normal(2, 5, 4, seed=2)
    expected = np.einsum("bmd,bnd->bmn", queries.numpy(), keys.numpy())
    assert_close(make_score("dot", 4, 4, 1)(queries, keys), torch.from_numpy(expected), 1e-12)
    assert_close(make_score("scaled-dot", 4, 4, 1)(queries, keys), torch.from_numpy(expected / math.sqrt(4)), 1e-12)


def test_bilinear_is_the_product_through_a_matrix() -> None:
    queries, keys, score = normal(2, 3, 4, seed=1), normal(2, 5, 6, seed=2), make_score("bilinear", 4, 6, 1).double()
    assert isinstance(score, Bilinear)
    matrix = score.query.weight.detach().numpy()  # key by query
    expected = np.einsum("bmd,ed,bne->bmn", queries.numpy(), matrix, keys.numpy())
    assert_close(score(queries, keys).detach(), torch.from_numpy(expected), 1e-12)


@pytest.mark.parametrize("activation", ["tanh", "hard-sigmoid"])
def test_additive_is_a_small_network(activation: str) -> None:
    queries, keys = normal(2, 3, 4, seed=1), normal(2, 5, 6, seed=2)
    score = make_score("additive", 4, 6, 7, activation="tanh" if activation == "tanh" else "hard-sigmoid").double()
    assert isinstance(score, Additive)
    a, b, v = (part.weight.detach().numpy() for part in (score.key, score.query, score.vector))
    activate = np.tanh if activation == "tanh" else lambda x: np.clip(x / 5 + 0.5, 0, 1)
    expected = np.empty((2, 3, 5))
    for user, query, key in np.ndindex(2, 3, 5):
        expected[user, query, key] = v[0] @ activate(a @ keys[user, key].numpy() + b @ queries[user, query].numpy())
    assert_close(score(queries, keys).detach(), torch.from_numpy(expected), 1e-12)


@every_kind
def test_leading_dimensions_are_kept(kind: ScoreKind) -> None:
    """Users and heads, none of them, or one query for all."""
    score, queries, keys = make_score(kind, 4, 4, 5).double(), normal(2, 3, 1, 4, seed=1), normal(2, 3, 6, 4, seed=2)
    scores = score(queries, keys)
    assert scores.shape == (2, 3, 1, 6)
    assert_close(score(queries[1, 2], keys[1, 2]), scores[1, 2], 1e-12)
    assert_close(score(queries[:1, :1], keys)[1, 1], score(queries[0, 0], keys[1, 1]), 1e-12)


@every_kind
def test_a_token_step_in_numpy_equals_all_scores(kind: ScoreKind) -> None:
    score, queries, keys = make_score(kind, 4, 4, 5), normal(3, 4, seed=1).float(), normal(6, 4, seed=2).float()
    one = score.token_step()
    expected = score(queries, keys).detach()
    for query, scores in zip(queries.numpy(), expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(one(query, keys.numpy())), scores)


@every_kind
def test_gradients_of_scores(kind: ScoreKind) -> None:
    score = make_score(kind, 4, 4, 5).double()
    queries, keys = normal(2, 3, 4, seed=1).requires_grad_(), normal(2, 5, 4, seed=2).requires_grad_()
    assert torch.autograd.gradcheck(score, (queries, keys))
    parameters = list(score.parameters())
    assert len(parameters) == {"dot": 0, "scaled-dot": 0, "bilinear": 1, "additive": 3}[kind]
    for parameter in parameters:
        assert torch.autograd.gradcheck(lambda _: score(queries.detach(), keys.detach()), (parameter,))


@pytest.mark.parametrize("kind", ["dot", "scaled-dot"])
def test_a_product_needs_one_width(kind: ScoreKind) -> None:
    with pytest.raises(AssertionError):
        make_score(kind, 4, 6, 5)
