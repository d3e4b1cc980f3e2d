"""REINFORCE: on average over all samples, the gradient of the training loss is the exact one."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from settings_tables import model_settings, objective_settings
from torch import Tensor
from torch.nn import functional

from segue.config.settings import make_settings
from segue.data.batch import Batch
from segue.errors import SettingsError
from segue.layers.blocks.recurrent import NarmBlock
from segue.layers.dropout import set_generator
from segue.layers.packed import tensors
from segue.models.build import build_model
from segue.models.encoders.narm import NarmModel
from segue.objective.losses.softmax import full_softmax
from segue.objective.objective import Objective
from segue.objective.settings import ObjectiveSettings
from segue.objective.tasks.examples import Examples

V = 4
COUNTS = np.r_[0, np.ones(V, dtype=np.int64)]
HISTORY = Batch(items=np.array([2, 4, 1]), times=np.arange(3), lengths=np.array([3]))
SOFTMAX = objective_settings()
PAIRS = objective_settings(loss="bpr-max", sampler="uniform", sampler__negatives=3, loss__regularisation=0.5)

# Queries: one of every state; some states twice, with weights; one state alone.
EXAMPLES = {
    "every state": Examples(inputs=HISTORY, targets=np.array([4, 1, 3])),
    "a state twice": Examples(
        inputs=HISTORY,
        targets=np.array([4, 2, 3, 3]),
        positions=np.array([1, 2, 2, 0]),
        weights=np.array([1.0, 0.5, 2.0, 1.0]),
    ),
    "one state": Examples(inputs=HISTORY, targets=np.array([3]), positions=np.array([2])),
}
every_example = pytest.mark.parametrize("name", EXAMPLES)


def model_of(**changed: Any) -> NarmModel:
    shape = {"kind": "narm", "width": 3, "depth": 1, "scores": "bilinear", "choice": "reinforce", "dropout": 0.0}
    settings = model_settings(**{**shape, **changed})
    model = build_model(settings, V, generator=torch.Generator().manual_seed(1)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)  # away from equal probabilities
    assert isinstance(model, NarmModel)
    return model.train()


def sampled_loss(model: NarmModel, examples: Examples, settings: ObjectiveSettings, seed: int) -> tuple[Tensor, Tensor]:
    """The training loss with the samples of a seed, and their log-probabilities [3]."""
    set_generator(model, torch.Generator().manual_seed(seed))
    hidden = model.encode(tensors(examples.inputs))
    samples = model.sampled_attention(hidden)
    assert samples is not None
    loss = Objective(settings, COUNTS).loss(model, hidden, examples, torch.Generator().manual_seed(0))
    return loss, samples.log_probability


def gradients(model: NarmModel, loss: Tensor) -> list[Tensor]:
    result = torch.autograd.grad(loss, list(model.parameters()))
    return [*result]


def every_sample(model: NarmModel, examples: Examples) -> list[tuple[float, Tensor, Tensor]]:
    """Each outcome of sampling one, then one of two, then one of three states: its probability, its loss and the three
    log-probabilities."""
    outcomes: dict[float, tuple[float, Tensor, Tensor]] = {}
    for seed in range(500):
        loss, log_probabilities = sampled_loss(model, examples, SOFTMAX, seed)
        together = log_probabilities.sum().item()
        outcomes.setdefault(round(together, 9), (math.exp(together), loss, log_probabilities))
        if len(outcomes) == 6:
            break
    assert sum(probability for probability, _, _ in outcomes.values()) == pytest.approx(1, abs=1e-9)
    return [*outcomes.values()]


def exact_loss(model: NarmModel, examples: Examples) -> Tensor:
    """The expected cross-entropy: over all states that may be sampled, without sampling."""
    recurrent, attention = model.blocks
    assert isinstance(attention, NarmBlock)
    batch = tensors(examples.inputs)
    states = recurrent(model.items.into[batch.items] * math.sqrt(3), batch)
    positions = range(3) if examples.positions is None else examples.positions.tolist()
    weights = torch.ones(len(positions)).double() if examples.weights is None else torch.tensor(examples.weights)
    losses = []
    for position, target in zip(positions, examples.targets.tolist(), strict=True):
        before = states[: position + 1]
        probabilities = attention.score(states[position : position + 1], before)[0].softmax(0)
        joined = torch.cat((before, states[position].expand_as(before)), dim=1) @ attention.joined.weight.T
        scores = joined @ model.items.into[1:].T
        losses.append(
            probabilities @ functional.cross_entropy(scores, torch.full((position + 1,), target - 1), reduction="none")
        )
    return (torch.stack(losses) * weights).sum() / weights.sum()


@every_example
def test_the_gradient_averaged_over_all_samples_is_the_exact_one(name: str) -> None:
    """In every weight: those of the scores, on which only the probabilities depend, and all others."""
    model, examples = model_of(), EXAMPLES[name]
    samples, exact = every_sample(model, examples), exact_loss(model, examples)
    assert sum(probability * loss.item() for probability, loss, _ in samples) == pytest.approx(exact.item(), abs=1e-9)
    each = [[probability * gradient for gradient in gradients(model, loss)] for probability, loss, _ in samples]
    names = [name for name, _ in model.named_parameters()]
    for parameter, expected, *terms in zip(names, gradients(model, exact), *each, strict=True):
        torch.testing.assert_close(torch.stack(terms).sum(0), expected, rtol=0, atol=1e-9, msg=parameter)
        if parameter.endswith("score.query.weight"):
            assert expected.abs().max() > 1e-3, "the gradient is not zero"


def test_the_baseline_reduces_the_variance_of_the_gradient() -> None:
    """Without it, each sample is weighted by the whole loss."""
    model, examples = model_of(), EXAMPLES["every state"]
    samples, attention = every_sample(model, examples), model.blocks[1]
    assert isinstance(attention, NarmBlock)
    (weight,) = attention.score.parameters()
    probabilities = torch.tensor([probability for probability, _, _ in samples], dtype=torch.float64)

    def scatter(*losses: Tensor) -> float:
        """The expected squared distance from the mean."""
        stacked = torch.stack([torch.autograd.grad(one, weight, retain_graph=True)[0].flatten() for one in losses])
        return float(probabilities @ (stacked - probabilities @ stacked).square().sum(1))

    without_baseline = [(loss.detach() * log_probabilities).mean() for _, loss, log_probabilities in samples]
    assert scatter(*(loss for _, loss, _ in samples)) < scatter(*without_baseline) / 2


@pytest.mark.parametrize("settings", [SOFTMAX, PAIRS], ids=["softmax", "bpr-max"])
@every_example
def test_the_value_of_the_loss_is_that_of_the_queries(name: str, settings: ObjectiveSettings) -> None:
    """The same states without the log-probabilities of samples have the same loss."""
    model, examples = model_of(), EXAMPLES[name]
    loss, _ = sampled_loss(model, examples, settings, seed=3)
    set_generator(model, torch.Generator().manual_seed(3))
    hidden = model.encode(tensors(examples.inputs))[:, :3]
    plain = Objective(settings, COUNTS).loss(model, hidden, examples, torch.Generator().manual_seed(0))
    assert loss.item() == pytest.approx(plain.item(), abs=1e-12)


def test_the_entropy_bonus_adds_the_gradient_of_the_entropy() -> None:
    plain, bonus = model_of(), model_of(choice__entropy_bonus=0.3)
    examples = EXAMPLES["every state"]
    first, second = (gradients(model, sampled_loss(model, examples, SOFTMAX, seed=5)[0]) for model in (plain, bonus))
    set_generator(plain, torch.Generator().manual_seed(5))
    samples = plain.sampled_attention(plain.encode(tensors(HISTORY)))
    assert samples is not None
    entropy = torch.autograd.grad(samples.entropy.mean(), list(plain.parameters()), materialize_grads=True)
    for without, with_bonus, of_entropy in zip(first, second, entropy, strict=True):
        torch.testing.assert_close(with_bonus, without - 0.3 * of_entropy, rtol=0, atol=1e-12)


def test_evaluation_samples_nothing() -> None:
    model = model_of().eval()
    hidden = model.encode(tensors(HISTORY))
    assert hidden.shape == (3, 3) and model.sampled_attention(hidden) is None
    assert torch.equal(model.encode(tensors(HISTORY)), hidden)


def test_the_softmax_reports_the_loss_of_each_query() -> None:
    """By its derivative in the weights, like the losses of plain operations."""
    generator = torch.Generator().manual_seed(0)
    hidden, matrix = (torch.randn(rows, 4, generator=generator, dtype=torch.float64) for rows in (6, 9))
    targets, weights = torch.tensor([0, 3, 8, 3, 1, 5]), torch.tensor([1.0, 2, 0.5, 1, 1, 3]).double().requires_grad_()
    each = functional.cross_entropy(hidden @ matrix.T, targets, reduction="none")
    loss = full_softmax(hidden, matrix, targets, weights)
    (gradient,) = torch.autograd.grad(loss, weights)
    torch.testing.assert_close(gradient, (each - loss) / weights.sum(), rtol=0, atol=1e-12)


def test_equal_weights_are_the_default() -> None:
    model, examples = model_of(), EXAMPLES["every state"]
    equal = replace(examples, weights=np.full(3, 7.0, dtype=np.float32))
    losses = [sampled_loss(model, one, SOFTMAX, seed=2)[0] for one in (examples, equal)]
    for one, other in zip(*(gradients(model, loss) for loss in losses), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "objective",
    [{"loss": "sce"}, {"loss": "lambdarank", "task": "recency"}],
    ids=["sce", "lambdarank"],
)
def test_a_loss_that_is_no_mean_over_queries_is_refused(objective: dict[str, Any]) -> None:
    narm = {"kind": "narm", "choice": "reinforce"}
    with pytest.raises(SettingsError, match="'reinforce' needs the loss of each query") as error:
        make_settings({"model": narm, "objective": objective})
    assert objective["loss"] in str(error.value) and "choose objective.loss" in str(error.value)
    make_settings({"model": {**narm, "choice": "gumbel"}, "objective": objective})
