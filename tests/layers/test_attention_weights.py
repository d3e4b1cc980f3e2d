"""Hard attention: one sampled item instead of a mean, and which gradients reach the scores."""

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

# G15: scores and values of three positions; the loss of a context c is (c - 1)^2.
SCORES, VALUES = [0.2, -0.1, 0.5], [1.5, 0.0, -0.5]
PROBABILITIES, MEAN_LOSS = [0.323554, 0.239694, 0.436752], 1.303274
EXACT = [-0.340791, -0.072693, 0.413484]
WITH_BASELINE = [[-0.712484, 0.252464, 0.460020], [0.098126, -0.230581, 0.132456], [-0.306317, -0.226925, 0.533241]]
WITHOUT_BASELINE = [0.169112, -0.059924, -0.109188]
THROUGH = [[0.398956, -0.063988, -0.334969], [-0.797913, 0.127975, 0.669938], [-1.196869, 0.191963, 1.004907]]
THROUGH_ON_AVERAGE = [-0.584906, 0.093812, 0.491095]


def numbers(values: list[float], *, requires_grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=requires_grad)


def loss_of(context: Tensor) -> Tensor:
    return (context - 1) ** 2


def gradient(loss: Tensor, of: Tensor) -> Tensor:
    (result,) = torch.autograd.grad(loss, of)
    return result


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


def reinforce_gradient(position: int, baseline: float) -> Tensor:
    """The REINFORCE gradient of one sample [3]."""
    scores, sample = numbers(SCORES, requires_grad=True), torch.tensor(position)
    log_probabilities = scores.log_softmax(0)
    loss = reinforce_loss(
        loss_of(numbers(VALUES)[position])[None],
        log_probabilities.gather(-1, sample[..., None]).squeeze(-1)[None],
        baseline,
        entropy=entropy(log_probabilities)[None],
        bonus=0.0,
    )
    return gradient(loss, scores)


# --- the gradients of G15 -----------------------------------------------------------------------------------------


def test_reinforce_with_a_baseline_of_g15() -> None:
    gradients = torch.stack([reinforce_gradient(position, MEAN_LOSS) for position in range(3)])
    assert_close(gradients, WITH_BASELINE, 2e-6)
    assert_close(reinforce_gradient(0, 0.0), numbers(WITHOUT_BASELINE), 1e-6)


@given(baseline=st.floats(-5, 5))
def test_the_mean_of_reinforce_is_the_exact_gradient_for_any_baseline(baseline: float) -> None:
    scores = numbers(SCORES, requires_grad=True)
    probabilities = scores.softmax(0)
    expected_loss = (probabilities * loss_of(numbers(VALUES))).sum()
    assert_close(probabilities.detach(), numbers(PROBABILITIES), 1e-6)
    assert expected_loss.item() == pytest.approx(MEAN_LOSS, abs=1e-6)
    exact = gradient(expected_loss, scores)
    assert_close(exact, numbers(EXACT), 1e-6)
    each = torch.stack([reinforce_gradient(position, baseline) for position in range(3)])
    assert_close(probabilities.detach() @ each, exact, 1e-12)


def test_the_mean_loss_as_baseline_lowers_the_variance() -> None:
    def spread(baseline: float) -> float:
        each = torch.stack([reinforce_gradient(position, baseline) for position in range(3)])
        return float((numbers(PROBABILITIES)[:, None] * (each - numbers(EXACT)) ** 2).sum())

    assert spread(MEAN_LOSS) < 0.6 * spread(0.0)


def test_straight_through_of_g15_is_on_average_the_gradient_of_soft_attention() -> None:
    """Not the exact gradient: the difference is its bias."""
    gradients = []
    for position in range(3):
        scores = numbers(SCORES, requires_grad=True)
        context = straight_through(scores.softmax(0), torch.tensor(position)) @ numbers(VALUES)
        assert context.item() == VALUES[position]
        gradients.append(gradient(loss_of(context), scores))
    assert_close(torch.stack(gradients), THROUGH, 1e-6)
    average = numbers(PROBABILITIES) @ torch.stack(gradients)
    assert_close(average, numbers(THROUGH_ON_AVERAGE), 2e-6)
    scores = numbers(SCORES, requires_grad=True)
    soft = choose(scores, "soft").weights @ numbers(VALUES)
    assert_close(gradient(loss_of(soft), scores), average, 2e-6)
    assert (average - numbers(EXACT)).abs().max() > 0.1


# --- Gumbel -------------------------------------------------------------------------------------------------------


def test_noise_and_probabilities_of_g47() -> None:
    noise = gumbel_noise(numbers([0.3, 0.6, 0.9]))
    assert_close(noise, numbers([-0.185627, 0.671727, 2.250367]), 1e-6)
    assert_close(((numbers(SCORES) + noise) / 0.5).softmax(0), numbers([0.004133, 0.012599, 0.983269]), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_finite_for_every_uniform_number(dtype: torch.dtype) -> None:
    highest = 1 - torch.finfo(dtype).eps / 2
    assert torch.isfinite(gumbel_noise(torch.tensor([0.0, highest], dtype=dtype))).all()


def test_gumbel_has_the_gradient_of_its_noisy_softmax() -> None:
    """The noise comes from the generator's next uniform numbers, and is divided by the temperature."""
    scores, temperature = normal(5, 4, seed=1).requires_grad_(), 0.5
    values, u = normal(4, seed=2), torch.rand(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    noisy = (scores + -torch.log(-torch.log(u))) / temperature
    weights = choose(scores, "gumbel", temperature=temperature, seed=3).weights
    assert torch.equal(weights.argmax(-1), noisy.argmax(-1))
    expected = gradient((noisy.softmax(-1) @ values).sum(), scores)
    assert_close(gradient((weights @ values).sum(), scores), expected, 1e-12)


# --- all kinds ----------------------------------------------------------------------------------------------------


@every_hard_kind
@pytest.mark.parametrize("training", [True, False])
def test_hard_attention_selects_one_unmasked_item(how: Choice, training: bool) -> None:
    scores = normal(200, 5, seed=4)
    scores[:, 3] += 100
    may_attend = torch.tensor([True, True, False, False, True])
    weights = choose(scores, how, may_attend=may_attend, training=training).weights
    assert_close(weights.sum(-1), torch.ones(200, dtype=torch.float64), 1e-12)
    assert ((weights.abs() < 1e-12) | (weights == 1)).all()
    assert (weights[:, [2, 3]].abs() < 1e-12).all()


@every_hard_kind
def test_inference_selects_the_best(how: Choice) -> None:
    scores = normal(50, 6, seed=5)
    attention = choose(scores, how, training=False)
    assert torch.equal(attention.weights, torch.nn.functional.one_hot(scores.argmax(-1), 6).double())
    assert attention.log_probability is None and attention.entropy is None


def test_soft_attention_near_temperature_zero_selects_the_best() -> None:
    scores = normal(50, 6, seed=5)
    best = choose(scores, "straight-through", training=False).weights
    assert_close(choose(scores, "soft", temperature=1e-5).weights, best, 1e-9)
    assert (choose(scores, "soft", temperature=1.0).weights - best).abs().max() > 0.5
    assert_close(choose(scores, "soft", temperature=1e6).weights, torch.full_like(scores, 1 / 6), 1e-5)


@pytest.mark.parametrize("how", ["gumbel", "reinforce"])
def test_samples_follow_the_softmax(how: Choice) -> None:
    """Of unmasked positions; at temperature two for REINFORCE, which samples from the distribution that it learns."""
    temperature, many = (2.0 if how == "reinforce" else 1.0), 20_000
    may_attend = torch.tensor([True, True, True, False])
    scores = numbers([0.2, -0.9, 1.0, 5.0]).expand(many, 4)
    samples = choose(scores, how, may_attend=may_attend, temperature=temperature).weights.argmax(-1)
    counts = np.bincount(samples.numpy(), minlength=4)
    expected = many * np.exp(np.array([0.2, -0.9, 1.0]) / temperature)
    expected = expected / (expected.sum() / many)
    assert counts[3] == 0
    assert float(((counts[:3] - expected) ** 2 / expected).sum()) < most_chi_square(3)


def test_reinforce_has_the_log_probability_of_its_sample_and_the_entropy() -> None:
    scores = normal(2, 30, 5, seed=6)
    may_attend = torch.arange(5) < torch.tensor([5, 3])[:, None, None]
    attention = choose(scores, "reinforce", may_attend=may_attend, temperature=0.7)
    assert attention.log_probability is not None and attention.entropy is not None
    assert attention.log_probability.shape == attention.entropy.shape == (2, 30)
    probabilities = np.exp(scores.numpy() / 0.7) * may_attend.numpy()
    probabilities /= probabilities.sum(-1, keepdims=True)
    probability = (probabilities * attention.weights.numpy()).sum(-1)
    assert_close(attention.log_probability, torch.from_numpy(np.log(probability)), 1e-12)
    safe = np.where(probabilities > 0, probabilities, 1)
    assert_close(attention.entropy, torch.from_numpy(-(probabilities * np.log(safe)).sum(-1)), 1e-12)


def test_entropy_of_equal_probabilities_and_its_gradient_under_a_mask() -> None:
    scores = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    masked = scores.masked_fill(torch.tensor([False, False, False, True]), -math.inf)
    result = entropy(masked.log_softmax(0))
    assert result.item() == pytest.approx(math.log(3), abs=1e-12)
    assert gradient(result, scores).tolist() == pytest.approx([0, 0, 0, 0], abs=1e-12), "it is highest here"


@every_hard_kind
def test_same_generator_same_sample(how: Choice) -> None:
    scores = normal(100, 6, seed=7)
    one, same, other = (choose(scores, how, seed=seed).weights.argmax(-1) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert torch.equal(one, other) == (how == "straight-through"), "which samples nothing"


# --- which way gradients go ---------------------------------------------------------------------------------------


def test_reinforce_reaches_values_by_the_sample_and_scores_by_its_probability_alone() -> None:
    scores, values = normal(3, 4, seed=8).requires_grad_(), normal(3, 4, seed=9).requires_grad_()
    attention = choose(scores, "reinforce")
    losses = loss_of((attention.weights * values).sum(-1))
    assert not attention.weights.requires_grad
    assert torch.equal(gradient(losses.sum(), values) != 0, attention.weights == 1)
    losses = loss_of((attention.weights * values).sum(-1))
    assert attention.log_probability is not None and attention.entropy is not None
    extra = reinforce_loss(losses, attention.log_probability, 0.3, entropy=attention.entropy, bonus=0.1)
    through = torch.autograd.grad(extra, (values, scores), allow_unused=True)
    assert [gradient is None for gradient in through] == [True, False], "the losses give no second gradient"
    assert (through[1] != 0).any()


def test_each_loss_weights_its_own_sample() -> None:
    """A user with the expected loss gives no gradient; one with a higher loss makes its sample less likely."""
    log_probability = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    losses = numbers([1.0, 1.0, 4.0], requires_grad=True)
    none = torch.zeros(3, dtype=torch.float64)
    loss = reinforce_loss(losses, log_probability, numbers([1.0]), entropy=none, bonus=0.0)
    assert gradient(loss, log_probability).tolist() == [0, 0, 1]


def test_entropy_lowers_the_loss_by_its_bonus() -> None:
    spread = numbers([0.5, 1.5], requires_grad=True)
    loss = reinforce_loss(numbers([2.0, 2.0]), numbers([0.0, 0.0]), 2.0, entropy=spread, bonus=0.1)
    assert loss.item() == pytest.approx(-0.1)
    assert gradient(loss, spread).tolist() == pytest.approx([-0.05, -0.05])


# --- masks come before the softmax --------------------------------------------------------------------------------


@pytest.mark.parametrize(("score", "leak"), [(1.0, 0.3318), (5.0, 0.0090)])
def test_a_mask_hides_the_score_itself_g18(score: float, leak: float) -> None:
    """Zeroing weights after the softmax would leak the masked score through the denominator."""
    scores, back = torch.tensor([[0.3, score], [0.2, 0.1]]), torch.ones(2, 2, dtype=torch.bool).tril()
    assert choose(scores, "soft", may_attend=back).weights[0].tolist() == [1, 0]
    assert (scores.softmax(-1) * back)[0, 0].item() == pytest.approx(leak, abs=5e-5)


def test_zero_keys_are_no_mask_g19() -> None:
    """One token with a score of .4, and three of padding, whose product with anything is zero."""
    scores = numbers([0.4, 0, 0, 0])
    may_attend = torch.tensor([True, False, False, False])
    assert choose(scores, "soft", may_attend=may_attend).weights.tolist() == [1, 0, 0, 0]
    assert choose(scores, "soft").weights[0].item() == pytest.approx(0.3321, abs=5e-5)
