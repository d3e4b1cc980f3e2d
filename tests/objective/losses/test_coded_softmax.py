"""The full softmax over codes equals that over vectors written out, gradients included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from settings_tables import model_settings, objective_settings
from torch import Tensor

from segue.layers.packed import tensors
from segue.models.build import build_model
from segue.models.items.tables import DataFacts
from segue.models.sequence import SequenceModel
from segue.objective.losses import catalogue, softmax
from segue.objective.losses.softmax import coded_softmax
from segue.objective.objective import Objective
from segue.testing.cases import batch_of, random_users

N_ITEMS = 40


def model_of(**changed: Any) -> SequenceModel:
    shape = {"kind": "sasrec", "width": 12, "depth": 1, "length": 64, "dropout": 0.0, "items": "codes"}
    codes = np.random.default_rng(0).integers(0, 7, (N_ITEMS + 1, 3)).astype(np.uint8)
    settings = model_settings(**(shape | {"items__parts": 3, "items__values": 7} | changed))
    model = build_model(settings, N_ITEMS, generator=torch.Generator().manual_seed(1), facts=DataFacts(codes=codes))
    with torch.no_grad():
        for table in model.items.learned:
            table.normal_(generator=torch.Generator().manual_seed(2))
    model.items.clear_padding()
    return model.double()


def loss_and_gradients(model: SequenceModel, objective: Objective) -> list[Tensor]:
    """The loss and all gradients."""
    model.zero_grad(set_to_none=True)
    examples = objective.examples(batch_of(*random_users([9, 4, 1, 12], n_items=30)), np.random.default_rng(0))
    loss = objective.loss(model, model.encode(tensors(examples.inputs)), examples, torch.Generator())
    torch.autograd.backward(loss)
    return [loss.detach(), *(weight.grad for weight in model.parameters() if weight.grad is not None)]


@pytest.mark.parametrize(
    "changed", [{}, {"items__tied": False}, {"similarity": "cosine", "similarity__temperature": "learned"}], ids=str
)
@pytest.mark.parametrize("trained", [N_ITEMS, 30], ids=["all", "some"])
@pytest.mark.parametrize("tile", [1, 90, 1 << 20])
def test_losses_and_gradients_are_those_of_vectors(
    changed: dict[str, Any], trained: int, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(softmax, "TILE_SCORES", tile)
    counts = np.r_[0, np.ones(trained, int), np.zeros(N_ITEMS - trained, int)]
    model, objective = model_of(**changed), Objective(objective_settings(equal_users=True), counts, only_trained=True)
    plain = loss_and_gradients(model, objective)
    monkeypatch.setattr(catalogue, "LEAST_CODED", trained)
    monkeypatch.setattr(catalogue, "full_softmax", lambda *_: pytest.fail("item vectors were computed"))
    coded = loss_and_gradients(model, objective)
    assert len(plain) == len(coded)
    for one, other in zip(coded, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_gradient_check() -> None:
    rng = np.random.default_rng(3)
    indices = torch.from_numpy(rng.integers(0, 4, (9, 2)) + np.array([0, 4])).int()
    tables = torch.from_numpy(rng.normal(size=(8, 5))).requires_grad_()
    lengths = torch.from_numpy(rng.uniform(0.5, 2, 9)).requires_grad_()
    weights = torch.tensor([1.0, 2, 0, 4, 5], dtype=torch.float64)
    targets = torch.tensor([0, 8, 3, 3, 1])
    assert torch.autograd.gradcheck(
        lambda t, n: coded_softmax(t, indices, targets, weights, lengths=n) * 3, (tables, lengths)
    )


def test_an_answer_of_probability_zero_in_float32_has_its_loss() -> None:
    indices, tables = torch.tensor([[0], [1]]).int(), torch.tensor([[0.0], [300.0]]).requires_grad_()
    assert coded_softmax(tables, indices, torch.tensor([0])).item() == pytest.approx(300)
