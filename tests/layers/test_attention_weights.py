"""One item instead of a mean: what is drawn, and which gradients reach the scores."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packed_users import assert_close, most_chi_square, normal
from torch import Tensor

from segue.layers.attention.weights import (
    AttentionWeights,
    Choice,
    entropy,
    gumbel_noise,
    reinforce_loss,
    select_weights,
    straight_through,
)

HARD: tuple[Choice, ...] = ("straight-through", "gumbel", "reinforce")
every_hard_kind = pytest.mark.parametrize("how", HARD)

# G15: scores and values of three places; the loss of a context c is (c - 1)^2.
SCORES, VALUES = [0.2, -0.1, 0.5], [1.5, 0.0, -0.5]
CHANCES, MEAN_LOSS = [0.323554, 0.239694, 0.436752], 1.303274
EXACT = [-0.340791, -0.072693, 0.413484]
WITH_BASELINE = [[-0.712484, 0.252464, 0.460020], [0.098126, -0.230581, 0.132456], [-0.306317, -0.226925, 0.533241]]
WITHOUT_BASELINE = [0.169112, -0.059924, -0.109188]
THROUGH = [[0.398956, -0.063988, -0.334969], [-0.797913, 0.127975, 0.669938], [-1.196869, 0.191963, 1.004907]]
THROUGH_ON_AVERAGE = [-0.584906, 0.093812, 0.491095]


def numbers(values: list[float], *, learned: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=learned)


def loss_of(context: Tensor) -> Tensor:
    return (context - 1) ** 2


def gradient(loss: Tensor, of: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(loss, of)
    return found


def choose(
    scores: Tensor,
    how: Choice,
    *,
    may_attend: Tensor | None = None,
    training: bool = True,
    temperature: float = 1.0,
    seed: int = 0,
) -> AttentionWeights:
    generator = torch.Generator().manual_seed(seed)
    return select_weights(scores, may_attend, how, temperature=temperature, training=training, generator=generator)


def reinforced(place: int, baseline: float) -> Tensor:
    """The gradient of one draw [3]."""
    scores, drawn = numbers(SCORES, learned=True), torch.tensor(place)
    log_probabilities = scores.log_softmax(0)
    loss = reinforce_loss(
        loss_of(numbers(VALUES)[place])[None],
        log_probabilities.gather(-1, drawn[..., None]).squeeze(-1)[None],
        baseline,
        entropy=entropy(log_probabilities)[None],
        bonus=0.0,
    )
    return gradient(loss, scores)


# --- the gradients of G15 -----------------------------------------------------------------------------------------


def test_reinforce_with_a_baseline_of_g15() -> None:
    found = torch.stack([reinforced(place, MEAN_LOSS) for place in range(3)])
    assert_close(found, WITH_BASELINE, 2e-6)
    assert_close(reinforced(0, 0.0), numbers(WITHOUT_BASELINE), 1e-6)


@given(baseline=st.floats(-5, 5))
def test_reinforce_averaged_over_all_draws_is_the_exact_gradient_whatever_the_baseline(baseline: float) -> None:
    scores = numbers(SCORES, learned=True)
    chances = scores.softmax(0)
    expected_loss = (chances * loss_of(numbers(VALUES))).sum()
    assert_close(chances.detach(), numbers(CHANCES), 1e-6)
    assert expected_loss.item() == pytest.approx(MEAN_LOSS, abs=1e-6)
    exact = gradient(expected_loss, scores)
    assert_close(exact, numbers(EXACT), 1e-6)
    each = torch.stack([reinforced(place, baseline) for place in range(3)])
    assert_close(chances.detach() @ each, exact, 1e-12)


def test_the_baseline_of_the_mean_lowers_the_variance() -> None:
    def spread(baseline: float) -> float:
        each = torch.stack([reinforced(place, baseline) for place in range(3)])
        return float((numbers(CHANCES)[:, None] * (each - numbers(EXACT)) ** 2).sum())

    assert spread(MEAN_LOSS) < 0.6 * spread(0.0)


def test_straight_through_of_g15_is_on_average_the_gradient_of_soft_attention() -> None:
    """And not the exact one: that is its bias."""
    found = []
    for place in range(3):
        scores = numbers(SCORES, learned=True)
        context = straight_through(scores.softmax(0), torch.tensor(place)) @ numbers(VALUES)
        assert context.item() == VALUES[place]
        found.append(gradient(loss_of(context), scores))
    assert_close(torch.stack(found), THROUGH, 1e-6)
    average = numbers(CHANCES) @ torch.stack(found)
    assert_close(average, numbers(THROUGH_ON_AVERAGE), 2e-6)
    scores = numbers(SCORES, learned=True)
    soft = choose(scores, "soft").weights @ numbers(VALUES)
    assert_close(gradient(loss_of(soft), scores), average, 2e-6)
    assert (average - numbers(EXACT)).abs().max() > 0.1


# --- Gumbel -------------------------------------------------------------------------------------------------------


def test_noise_and_chances_of_g47() -> None:
    noise = gumbel_noise(numbers([0.3, 0.6, 0.9]))
    assert_close(noise, numbers([-0.185627, 0.671727, 2.250367]), 1e-6)
    assert_close(((numbers(SCORES) + noise) / 0.5).softmax(0), numbers([0.004133, 0.012599, 0.983269]), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_finite_wherever_uniform_numbers_can_be(dtype: torch.dtype) -> None:
    highest = 1 - torch.finfo(dtype).eps / 2
    assert torch.isfinite(gumbel_noise(torch.tensor([0.0, highest], dtype=dtype))).all()


def test_gumbel_learns_through_its_noisy_chances() -> None:
    """Noise is that of the uniform numbers its generator gives next, and counts with the temperature."""
    scores, temperature = normal(5, 4, seed=1).requires_grad_(), 0.5
    values, drawn = normal(4, seed=2), torch.rand(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    noisy = (scores + -torch.log(-torch.log(drawn))) / temperature
    found = choose(scores, "gumbel", temperature=temperature, seed=3).weights
    assert torch.equal(found.argmax(-1), noisy.argmax(-1))
    expected = gradient((noisy.softmax(-1) @ values).sum(), scores)
    assert_close(gradient((found @ values).sum(), scores), expected, 1e-12)


# --- all kinds ----------------------------------------------------------------------------------------------------


@every_hard_kind
@pytest.mark.parametrize("training", [True, False])
def test_one_is_taken_whole_and_only_where_one_may_look(how: Choice, training: bool) -> None:
    scores = normal(200, 5, seed=4)
    scores[:, 3] += 100
    may_attend = torch.tensor([True, True, False, False, True])
    found = choose(scores, how, may_attend=may_attend, training=training).weights
    assert_close(found.sum(-1), torch.ones(200, dtype=torch.float64), 1e-12)
    assert ((found.abs() < 1e-12) | (found == 1)).all()
    assert (found[:, [2, 3]].abs() < 1e-12).all()


@every_hard_kind
def test_answers_take_the_best(how: Choice) -> None:
    scores = normal(50, 6, seed=5)
    found = choose(scores, how, training=False)
    assert torch.equal(found.weights, torch.nn.functional.one_hot(scores.argmax(-1), 6).double())
    assert found.log_probability is None and found.entropy is None


def test_soft_attention_at_no_temperature_takes_the_best() -> None:
    scores = normal(50, 6, seed=5)
    best = choose(scores, "straight-through", training=False).weights
    assert_close(choose(scores, "soft", temperature=1e-5).weights, best, 1e-9)
    assert (choose(scores, "soft", temperature=1.0).weights - best).abs().max() > 0.5
    assert_close(choose(scores, "soft", temperature=1e6).weights, torch.full_like(scores, 1 / 6), 1e-5)


@pytest.mark.parametrize("how", ["gumbel", "reinforce"])
def test_draws_follow_the_softmax(how: Choice) -> None:
    """Of places where one may look; at a temperature of two for REINFORCE, which draws from what it learns."""
    temperature, many = (2.0 if how == "reinforce" else 1.0), 20_000
    may_attend = torch.tensor([True, True, True, False])
    scores = numbers([0.2, -0.9, 1.0, 5.0]).expand(many, 4)
    found = choose(scores, how, may_attend=may_attend, temperature=temperature).weights.argmax(-1)
    counts = np.bincount(found.numpy(), minlength=4)
    expected = many * np.exp(np.array([0.2, -0.9, 1.0]) / temperature)
    expected = expected / (expected.sum() / many)
    assert counts[3] == 0
    assert float(((counts[:3] - expected) ** 2 / expected).sum()) < most_chi_square(3)


def test_reinforce_knows_the_chance_of_what_it_drew_and_the_entropy() -> None:
    scores = normal(2, 30, 5, seed=6)
    may_attend = torch.arange(5) < torch.tensor([5, 3])[:, None, None]
    found = choose(scores, "reinforce", may_attend=may_attend, temperature=0.7)
    assert found.log_probability is not None and found.entropy is not None
    assert found.log_probability.shape == found.entropy.shape == (2, 30)
    chances = np.exp(scores.numpy() / 0.7) * may_attend.numpy()
    chances /= chances.sum(-1, keepdims=True)
    drawn = (chances * found.weights.numpy()).sum(-1)
    assert_close(found.log_probability, torch.from_numpy(np.log(drawn)), 1e-12)
    safe = np.where(chances > 0, chances, 1)
    assert_close(found.entropy, torch.from_numpy(-(chances * np.log(safe)).sum(-1)), 1e-12)


def test_entropy_of_equal_chances_and_its_gradient_where_one_may_not_look() -> None:
    scores = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    masked = scores.masked_fill(torch.tensor([False, False, False, True]), -math.inf)
    found = entropy(masked.log_softmax(0))
    assert found.item() == pytest.approx(math.log(3), abs=1e-12)
    assert gradient(found, scores).tolist() == pytest.approx([0, 0, 0, 0], abs=1e-12), "it is highest here"


@every_hard_kind
def test_same_generator_same_draw(how: Choice) -> None:
    scores = normal(100, 6, seed=7)
    one, same, other = (choose(scores, how, seed=seed).weights.argmax(-1) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert torch.equal(one, other) == (how == "straight-through"), "which draws nothing"


# --- which way gradients go ---------------------------------------------------------------------------------------


def test_reinforce_reaches_values_by_the_one_taken_and_scores_by_its_chance_alone() -> None:
    scores, values = normal(3, 4, seed=8).requires_grad_(), normal(3, 4, seed=9).requires_grad_()
    found = choose(scores, "reinforce")
    losses = loss_of((found.weights * values).sum(-1))
    assert not found.weights.requires_grad
    assert torch.equal(gradient(losses.sum(), values) != 0, found.weights == 1)
    losses = loss_of((found.weights * values).sum(-1))
    assert found.log_probability is not None and found.entropy is not None
    extra = reinforce_loss(losses, found.log_probability, 0.3, entropy=found.entropy, bonus=0.1)
    through = torch.autograd.grad(extra, (values, scores), allow_unused=True)
    assert [gradient is None for gradient in through] == [True, False], "the losses are not learned from twice"
    assert (through[1] != 0).any()


def test_each_loss_meets_its_own_draw() -> None:
    """A user who did as well as was expected learns nothing; one who did worse than that makes its draw less likely."""
    log_probability = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    losses = numbers([1.0, 1.0, 4.0], learned=True)
    none = torch.zeros(3, dtype=torch.float64)
    found = reinforce_loss(losses, log_probability, numbers([1.0]), entropy=none, bonus=0.0)
    assert gradient(found, log_probability).tolist() == [0, 0, 1]


def test_entropy_is_worth_its_bonus() -> None:
    spread = numbers([0.5, 1.5], learned=True)
    found = reinforce_loss(numbers([2.0, 2.0]), numbers([0.0, 0.0]), 2.0, entropy=spread, bonus=0.1)
    assert found.item() == pytest.approx(-0.1)
    assert gradient(found, spread).tolist() == pytest.approx([-0.05, -0.05])


# --- masks come before the softmax --------------------------------------------------------------------------------


@pytest.mark.parametrize(("hidden", "leaked"), [(1.0, 0.3318), (5.0, 0.0090)])
def test_a_mask_hides_the_score_itself_g18(hidden: float, leaked: float) -> None:
    """Zeroing weights after the softmax would let what is hidden through, by way of the denominator."""
    scores, back = torch.tensor([[0.3, hidden], [0.2, 0.1]]), torch.ones(2, 2, dtype=torch.bool).tril()
    assert choose(scores, "soft", may_attend=back).weights[0].tolist() == [1, 0]
    assert (scores.softmax(-1) * back)[0, 0].item() == pytest.approx(leaked, abs=5e-5)


def test_zero_keys_are_no_mask_g19() -> None:
    """One token with a score of .4, and three of padding, whose product with anything is zero."""
    scores = numbers([0.4, 0, 0, 0])
    may_attend = torch.tensor([True, False, False, False])
    assert choose(scores, "soft", may_attend=may_attend).weights.tolist() == [1, 0, 0, 0]
    assert choose(scores, "soft").weights[0].item() == pytest.approx(0.3321, abs=5e-5)
