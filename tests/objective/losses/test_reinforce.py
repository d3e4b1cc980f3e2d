"""What is drawn is learned from: on average over all draws, the gradient of the whole loss is the exact one."""

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

# Questions: one of every state; some states twice, with weights; one state alone.
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
            parameter.mul_(1.5)  # away from even chances
    assert isinstance(model, NarmModel)
    return model.train()


def drawn_loss(model: NarmModel, examples: Examples, settings: ObjectiveSettings, seed: int) -> tuple[Tensor, Tensor]:
    """The training loss after the draws of a seed, and the logarithms of their chances [3]."""
    set_generator(model, torch.Generator().manual_seed(seed))
    hidden = model.encode(tensors(examples.inputs))
    draws = model.sampled_attention(hidden)
    assert draws is not None
    loss = Objective(settings, COUNTS).loss(model, hidden, examples, torch.Generator().manual_seed(0))
    return loss, draws.log_probability


def gradients(model: NarmModel, loss: Tensor) -> list[Tensor]:
    found = torch.autograd.grad(loss, list(model.parameters()))
    return [*found]


def every_draw(model: NarmModel, examples: Examples) -> list[tuple[float, Tensor, Tensor]]:
    """Each way to draw, one, then one of two, then one of three states: its chance, the loss that follows it and the
    logarithms of the three chances."""
    found: dict[float, tuple[float, Tensor, Tensor]] = {}
    for seed in range(500):
        loss, log_probabilities = drawn_loss(model, examples, SOFTMAX, seed)
        together = log_probabilities.sum().item()
        found.setdefault(round(together, 9), (math.exp(together), loss, log_probabilities))
        if len(found) == 6:
            break
    assert sum(chance for chance, _, _ in found.values()) == pytest.approx(1, abs=1e-9)
    return [*found.values()]


def exact_loss(model: NarmModel, examples: Examples) -> Tensor:
    """The expected cross-entropy: over all states that could be drawn, without drawing any."""
    recurrent, looking = model.blocks
    assert isinstance(looking, NarmBlock)
    batch = tensors(examples.inputs)
    states = recurrent(model.items.into[batch.items] * math.sqrt(3), batch)
    positions = range(3) if examples.positions is None else examples.positions.tolist()
    weights = torch.ones(len(positions)).double() if examples.weights is None else torch.tensor(examples.weights)
    losses = []
    for place, target in zip(positions, examples.targets.tolist(), strict=True):
        before = states[: place + 1]
        chances = looking.score(states[place : place + 1], before)[0].softmax(0)
        joined = torch.cat((before, states[place].expand_as(before)), dim=1) @ looking.joined.weight.T
        scores = joined @ model.items.into[1:].T
        losses.append(
            chances @ functional.cross_entropy(scores, torch.full((place + 1,), target - 1), reduction="none")
        )
    return (torch.stack(losses) * weights).sum() / weights.sum()


@every_example
def test_the_gradient_averaged_over_all_draws_is_the_exact_one(name: str) -> None:
    """That of every weight: of the scores', on which only the chances depend, and of the others'."""
    model, examples = model_of(), EXAMPLES[name]
    draws, exact = every_draw(model, examples), exact_loss(model, examples)
    assert sum(chance * loss.item() for chance, loss, _ in draws) == pytest.approx(exact.item(), abs=1e-9)
    each = [[chance * gradient for gradient in gradients(model, loss)] for chance, loss, _ in draws]
    names = [name for name, _ in model.named_parameters()]
    for parameter, expected, *found in zip(names, gradients(model, exact), *each, strict=True):
        torch.testing.assert_close(torch.stack(found).sum(0), expected, rtol=0, atol=1e-9, msg=parameter)
        if parameter.endswith("score.query.weight"):
            assert expected.abs().max() > 1e-3, "there is something to learn"


def test_what_is_usual_makes_draws_less_various() -> None:
    """Without it, each draw would be blamed for all that is lost."""
    model, examples = model_of(), EXAMPLES["every state"]
    draws, looking = every_draw(model, examples), model.blocks[1]
    assert isinstance(looking, NarmBlock)
    (weight,) = looking.score.parameters()
    chances = torch.tensor([chance for chance, _, _ in draws], dtype=torch.float64)

    def scatter(*of_draws: Tensor) -> float:
        """The expected squared distance from the mean."""
        stacked = torch.stack([torch.autograd.grad(one, weight, retain_graph=True)[0].flatten() for one in of_draws])
        return float(chances @ (stacked - chances @ stacked).square().sum(1))

    blamed = [(loss.detach() * log_probabilities).mean() for _, loss, log_probabilities in draws]
    assert scatter(*(loss for _, loss, _ in draws)) < scatter(*blamed) / 2


@pytest.mark.parametrize("settings", [SOFTMAX, PAIRS], ids=["softmax", "bpr-max"])
@every_example
def test_the_number_is_what_the_questions_lost(name: str, settings: ObjectiveSettings) -> None:
    """The same states without a word about draws cost the same."""
    model, examples = model_of(), EXAMPLES[name]
    loss, _ = drawn_loss(model, examples, settings, seed=3)
    set_generator(model, torch.Generator().manual_seed(3))
    hidden = model.encode(tensors(examples.inputs))[:, :3]
    plain = Objective(settings, COUNTS).loss(model, hidden, examples, torch.Generator().manual_seed(0))
    assert loss.item() == pytest.approx(plain.item(), abs=1e-12)


def test_entropy_is_worth_its_bonus() -> None:
    free, paid = model_of(), model_of(choice__entropy_bonus=0.3)
    examples = EXAMPLES["every state"]
    first, second = (gradients(model, drawn_loss(model, examples, SOFTMAX, seed=5)[0]) for model in (free, paid))
    set_generator(free, torch.Generator().manual_seed(5))
    draws = free.sampled_attention(free.encode(tensors(HISTORY)))
    assert draws is not None
    entropy = torch.autograd.grad(draws.entropy.mean(), list(free.parameters()), materialize_grads=True)
    for without, with_bonus, of_entropy in zip(first, second, entropy, strict=True):
        torch.testing.assert_close(with_bonus, without - 0.3 * of_entropy, rtol=0, atol=1e-12)


def test_answers_draw_nothing() -> None:
    model = model_of().eval()
    hidden = model.encode(tensors(HISTORY))
    assert hidden.shape == (3, 3) and model.sampled_attention(hidden) is None
    assert torch.equal(model.encode(tensors(HISTORY)), hidden)


def test_the_softmax_says_what_each_question_lost() -> None:
    """By its derivative in the weights, as the losses in plain operations do."""
    generator = torch.Generator().manual_seed(0)
    hidden, matrix = (torch.randn(rows, 4, generator=generator, dtype=torch.float64) for rows in (6, 9))
    targets, weights = torch.tensor([0, 3, 8, 3, 1, 5]), torch.tensor([1.0, 2, 0.5, 1, 1, 3]).double().requires_grad_()
    each = functional.cross_entropy(hidden @ matrix.T, targets, reduction="none")
    loss = full_softmax(hidden, matrix, targets, weights)
    (found,) = torch.autograd.grad(loss, weights)
    torch.testing.assert_close(found, (each - loss) / weights.sum(), rtol=0, atol=1e-12)


def test_weights_that_are_all_alike_need_not_be_given() -> None:
    model, examples = model_of(), EXAMPLES["every state"]
    alike = replace(examples, weights=np.full(3, 7.0, dtype=np.float32))
    losses = [drawn_loss(model, one, SOFTMAX, seed=2)[0] for one in (examples, alike)]
    for one, other in zip(*(gradients(model, loss) for loss in losses), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "objective",
    [{"loss": "sce"}, {"loss": "lambdarank", "task": "recency"}],
    ids=["sce", "lambdarank"],
)
def test_a_loss_that_is_no_mean_over_questions_is_refused(objective: dict[str, Any]) -> None:
    narm = {"kind": "narm", "choice": "reinforce"}
    with pytest.raises(SettingsError, match="'reinforce' needs the loss of each query") as caught:
        make_settings({"model": narm, "objective": objective})
    assert objective["loss"] in str(caught.value) and "choose objective.loss" in str(caught.value)
    make_settings({"model": {**narm, "choice": "gumbel"}, "objective": objective})
