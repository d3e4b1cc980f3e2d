"""A learned temperature: above its floor, in the loss only, and without effect on rankings."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
import torch
from settings_tables import model_settings, objective_settings
from torch.nn import functional

from segue.models.build import build_model
from segue.models.sequence import SequenceModel
from segue.models.similarity.dot import Dot
from segue.objective.objective import Objective
from segue.objective.settings import ObjectiveSettings
from segue.objective.tasks.examples import Examples
from segue.testing.cases import batch_of

COUNTS = np.r_[0, np.ones(7, dtype=np.int64)]
SHARED = objective_settings(loss="sampled-softmax", sampler="uniform", sampler__negatives=4)
OWN = objective_settings(loss="sampled-softmax", sampler="uniform", sampler__negatives=4, sampler__shared=False)


def model_of(temperature: str = "learned") -> SequenceModel:
    settings = model_settings(
        kind="sasrec",
        width=6,
        dropout=0.0,
        similarity="cosine",
        similarity__temperature=temperature,
    )
    return build_model(settings, 7, generator=torch.Generator().manual_seed(0)).double()


def loss_of(model: SequenceModel, settings: ObjectiveSettings) -> torch.Tensor:
    examples = Examples(inputs=batch_of([1, 2], [3]), targets=np.array([4, 5, 6]))
    states = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return Objective(settings, COUNTS).loss(model, states, examples, torch.Generator().manual_seed(2))


def heat_of(model: SequenceModel) -> torch.nn.Parameter:
    assert isinstance(model.similarity, Dot) and model.similarity.heat is not None
    return model.similarity.heat


def temperature_of(model: SequenceModel) -> float:
    assert isinstance(model.similarity, Dot) and model.similarity.temperature is not None
    return model.similarity.temperature.item()


def test_it_starts_at_the_deviation_of_random_scores_and_stays_above_a_hundredth() -> None:
    model = model_of()
    directions = functional.normalize(torch.randn(2000, 6, generator=torch.Generator().manual_seed(3)), dim=1)
    assert (directions[:1000] * directions[1000:]).sum(1).std().item() == pytest.approx(temperature_of(model), rel=0.1)
    with torch.no_grad():
        heat_of(model).fill_(-1000)
    assert temperature_of(model) == 0.01
    assert len(list(model_of("fixed").similarity.parameters())) == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("settings", [objective_settings(), SHARED, OWN], ids=["softmax", "shared", "own"])
@pytest.mark.parametrize("heat", [0.0, -3.2, -6.0])
def test_the_loss_is_that_of_a_fixed_temperature(settings: ObjectiveSettings, heat: float) -> None:
    model = model_of()
    with torch.no_grad():
        heat_of(model).fill_(heat)
    fixed = msgspec.structs.replace(settings, temperature=0.01 + math.exp(heat))
    torch.testing.assert_close(loss_of(model, settings), loss_of(model_of("fixed"), fixed))


@pytest.mark.parametrize("settings", [objective_settings(), SHARED, OWN], ids=["softmax", "shared", "own"])
def test_its_gradient_is_that_of_the_loss(settings: ObjectiveSettings) -> None:
    model, step = model_of(), 1e-6
    first = heat_of(model).item()
    torch.autograd.backward(loss_of(model, settings))
    gradient = heat_of(model).grad
    losses = []
    for offset in (-step, step):
        with torch.no_grad():
            heat_of(model).fill_(first + offset)
        losses.append(loss_of(model, settings).item())
    assert gradient is not None and gradient.item() == pytest.approx((losses[1] - losses[0]) / (2 * step), rel=1e-5)


def test_queries_have_length_one_at_every_temperature() -> None:
    model, states = model_of(), torch.randn(3, 6, dtype=torch.float64)
    before = model.head(states)
    with torch.no_grad():
        heat_of(model).fill_(2.0)
    assert torch.equal(model.head(states), before)
    torch.testing.assert_close(before.norm(dim=1), torch.ones(3, dtype=torch.float64))
