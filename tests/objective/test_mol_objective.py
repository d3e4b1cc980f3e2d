"""Losses of a model whose scores are a mixture of logits: the same losses, of scores that are not inner products."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from settings_tables import model_settings, objective_settings
from torch import Tensor, nn

from segue.data.batch import Batch
from segue.layers.packed import tensors
from segue.models.build import build_model
from segue.models.sequence import SequenceModel
from segue.models.similarity.mol import MixtureOfLogits
from segue.objective.objective import Objective
from segue.objective.samplers.samplers import Sampler, SamplerSettings
from segue.objective.settings import SAMPLED as SAMPLED_TEXT
from segue.objective.settings import ObjectiveSettings
from segue.objective.tasks.examples import Examples

SAMPLED = SAMPLED_TEXT.split(", ")
N_ITEMS = 12
COUNTS = np.r_[0, np.arange(N_ITEMS) % 5 + 1]
SAMPLES = [3, 11, 3, 8, 1]
RECENCY: dict[str, Any] = {"task": "recency", "task__share": 0.6}
LOG_Q = [-0.1 * number for number in range(N_ITEMS + 1)]

every_sampled_loss = pytest.mark.parametrize("loss", SAMPLED)
shared_or_own = pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])


class Fixed(Sampler):
    """A sampler of fixed items, repeated `times` times."""

    def __init__(self, items: Sequence[int], log_q: Sequence[float], *, times: int) -> None:
        self._items = torch.tensor(items).repeat(times)
        self._log_q = torch.tensor(log_q)

    def sample(self, count: int, generator: torch.Generator, present: Tensor) -> Tensor:  # noqa: ARG002
        return self._items

    def log_q(self, items: Tensor, present: Tensor) -> Tensor:  # noqa: ARG002
        return self._log_q[items]


def settings_of(loss: str, *, shared: bool = True, **more: Any) -> ObjectiveSettings:
    sampling = (
        {"sampler": "popularity", "sampler__negatives": len(SAMPLES), "sampler__shared": shared}
        if loss in SAMPLED
        else {}
    )
    return objective_settings(**{"loss": loss, "temperature": 0.7, **sampling, **more})


@functools.cache
def model_of(balance: float = 0.0) -> SequenceModel:
    """In float64, without dropout, with weights that are nowhere zero. Shared: not to be changed."""
    shape = model_settings(
        kind="sasrec",
        width=4,
        depth=1,
        length=8,
        dropout=0.0,
        similarity="mol",
        similarity__query_parts=2,
        similarity__item_parts=2,
        similarity__part_width=3,
        similarity__query_hidden=4,
        similarity__gate_hidden=3,
        similarity__temperature=0.5,
        similarity__item_dropout=0.0,
        similarity__gate_dropout=0.0,
        similarity__balance=balance,
    )
    model = build_model(shape, N_ITEMS, generator=torch.Generator()).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    model.items.clear_padding()
    return model


def users() -> Batch:
    items = np.array([1, 9, 3, 4, 12, 3, 7, 5, 2])
    return Batch(items=items, times=np.arange(9), lengths=np.array([5, 4]))


def run_loss(settings: ObjectiveSettings, model: SequenceModel) -> tuple[Examples, Tensor]:
    """The examples and the loss, if every answer has the same negatives."""
    objective = Objective(settings, COUNTS)
    examples = objective.examples(users(), np.random.default_rng(1))
    if isinstance(settings.sampler, SamplerSettings):
        objective.sampler = Fixed(SAMPLES, LOG_Q, times=1 if settings.sampler.shared else len(examples.targets))
    hidden = model.encode(tensors(examples.inputs))
    return examples, objective.loss(model, hidden, examples, torch.Generator().manual_seed(2))


def with_gradients(settings: ObjectiveSettings) -> list[Tensor]:
    model = model_of()
    _, loss = run_loss(settings, model)
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


@every_sampled_loss
@pytest.mark.parametrize("task", ["next-item", "recency"])
def test_shared_negatives_equal_own_negatives_if_all_rows_sample_the_same(task: str, loss: str) -> None:
    """Law 29.3; log q, the temperature, collisions and several answers of a state included."""
    more: dict[str, Any] = RECENCY if task == "recency" else {}
    shared, own = (with_gradients(settings_of(loss, sampler__shared=shared, **more)) for shared in (True, False))
    for one, other in zip(shared, own, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-7)


@shared_or_own
def test_sampled_softmax_row_by_row(shared: bool) -> None:
    model = model_of()
    examples, loss = run_loss(settings_of("sampled-softmax", sampler__shared=shared), model)
    with torch.no_grad():
        scores = model.score_all(model.head(model.encode(tensors(examples.inputs)))).numpy()
    losses = []
    for row, target in zip(scores / 0.7 - np.array(LOG_Q), examples.targets, strict=True):
        others = [row[item] for item in SAMPLES if item != target]
        losses.append(np.logaddexp.reduce([row[target], *others]) - row[target])
    assert set(SAMPLES) & set(examples.targets.tolist())
    assert loss.item() == pytest.approx(np.mean(losses), abs=1e-6)


@pytest.mark.parametrize("loss", [*SAMPLED, "lambdarank"])
def test_a_loss_has_a_gradient_in_every_weight_and_a_step_lowers_it(loss: str) -> None:
    settings = settings_of(loss, **(RECENCY if loss == "lambdarank" else {}))
    model = copy.deepcopy(model_of(balance=0.1))
    _, value = run_loss(settings, model)
    gradients = torch.autograd.grad(value, list(model.parameters()))
    assert all(gradient.isfinite().all() and gradient.ne(0).any() for gradient in gradients)
    if loss == "lambdarank":
        return  # its gradient is not that of its value
    squared_norm = sum(gradient.square().sum().item() for gradient in gradients)
    expected = 1e-5 * value.item()
    with torch.no_grad():
        for weight, gradient in zip(model.parameters(), gradients, strict=True):
            weight.sub_(gradient, alpha=expected / squared_norm)
        _, lower = run_loss(settings, model)
    assert value.item() - lower.item() == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("loss", ["sampled-softmax", "lambdarank"])
def test_the_loss_includes_the_imbalance_of_the_answers_gates(loss: str) -> None:
    """The similarity's extra loss is added once: for every query with its answer."""
    settings = settings_of(loss, **(RECENCY if loss == "lambdarank" else {}))
    (examples, plain), (_, balanced), model = (
        run_loss(settings, model_of()),
        run_loss(settings, model_of(0.3)),
        model_of(0.3),
    )
    hidden = model.encode(tensors(examples.inputs))
    if examples.positions is not None:
        hidden = hidden[torch.from_numpy(examples.positions)]
    answers = model.item_vectors(torch.from_numpy(examples.targets))
    extra = model.similarity.extra_loss(model.head(hidden), answers)
    assert extra is not None and extra.item() != 0
    assert (balanced - plain).item() == pytest.approx(extra.item(), abs=1e-9)


@shared_or_own
def test_one_component_each_by_hand(shared: bool) -> None:
    """G6 through the mixture: with one component it is the cosine divided by its own temperature."""
    vectors = torch.tensor([[0.1, 0.2]] * 9, dtype=torch.float64)
    vectors[[2, 4, 6, 8]] = torch.tensor([[0.0, 2.0], [-3.0, 4.0], [5.0, 0.0], [4.0, -3.0]], dtype=torch.float64)
    shape = model_settings(
        kind="sasrec",
        width=2,
        depth=1,
        similarity="mol",
        similarity__query_parts=1,
        similarity__item_parts=1,
        similarity__part_width=2,
        similarity__query_hidden=0,
        similarity__item_dropout=0.0,
        similarity__gate_dropout=0.0,
    )
    model = build_model(shape, 9, generator=torch.Generator().manual_seed(0)).double()
    similarity = model.similarity
    assert isinstance(similarity, MixtureOfLogits)
    with torch.no_grad():
        model.items.into[1:] = vectors
        for tower in (similarity.query_tower, similarity.item_tower):
            assert isinstance(tower, nn.Linear)
            tower.weight.copy_(torch.eye(2))
    settings = objective_settings(
        loss="sampled-softmax", sampler="uniform", sampler__negatives=4, sampler__shared=shared
    )
    objective = Objective(settings, np.ones(10, dtype=np.int64))
    objective.sampler = Fixed([7, 3, 9, 5], [0.0] * 10, times=1)
    inputs = Batch(items=np.array([1]), times=np.array([0]), lengths=np.array([1]))
    examples = Examples(inputs=inputs, targets=np.array([3]))
    loss = objective.loss(model, torch.tensor([[3.0, 4.0]], dtype=torch.float64), examples, torch.Generator())
    assert loss.item() == pytest.approx(0.018180, abs=1e-6)
