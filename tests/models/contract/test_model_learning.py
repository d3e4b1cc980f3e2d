"""Every model can learn: by heart what can be learned by heart, and nothing from noise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from model_cases import N_ITEMS, batch_of, every_builder, new_model, packed_of, random_users, tied_or_not

from segue.data.batch import Batch
from segue.layers.packed import tensors
from segue.models.sequence import SequenceModel
from segue.objective.objective import Objective
from segue.objective.settings import ObjectiveSettings
from segue.train.optimiser import optimiser
from segue.train.settings import TrainSettings

COUNTS = np.r_[0, np.ones(N_ITEMS, dtype=np.int64)]
SAMPLED = ObjectiveSettings(loss="sampled-softmax", sampler="uniform", negatives=12)


def trained(
    model: SequenceModel, batch: Batch, steps: int, *, loss: ObjectiveSettings | None = None, **changed: Any
) -> list[float]:
    """The loss at each of some steps over one batch."""
    objective, generator = Objective(loss or ObjectiveSettings(), COUNTS), torch.Generator().manual_seed(0)
    adamw = optimiser(model.train(), TrainSettings(**{"learning_rate": 1e-2, **changed}))
    examples, losses = objective.examples(batch), []
    for _ in range(steps):
        found = objective.loss(model, model.encode(tensors(examples.inputs)), examples, generator)
        adamw.zero_grad()
        torch.autograd.backward(found)
        adamw.step()
        losses.append(found.item())
    model.eval()
    return losses


@every_builder
@tied_or_not
def test_eight_users_of_ten_items_are_learned_by_heart(builder: str, tied: bool) -> None:
    users = random_users([10] * 8, seed=2)
    for first, user in enumerate(users, start=1):
        user[0] = first  # from the first item on it is clear who it is
    model = new_model(builder, width=16, length=10, tied=tied)
    trained(model, batch_of(*users), 150)
    states = model.encode(packed_of(*(user[:-1] for user in users)))
    found = model.score_all(states)[:, 1:].argmax(1) + 1
    assert found.tolist() == [item for user in users for item in user[1:]]


@every_builder
def test_loss_starts_at_chance(builder: str) -> None:
    """About log V: logits of size one add a half to it."""
    (loss,) = trained(new_model(builder, width=32), batch_of(*random_users([20] * 10)), 1)
    assert loss == pytest.approx(math.log(N_ITEMS), abs=1)


@every_builder
def test_random_targets_stay_at_chance_on_users_not_trained_on(builder: str) -> None:
    """Were the answer anywhere in the input, this would be learned."""
    batch, others = batch_of(*random_users([20] * 60, seed=3)), batch_of(*random_users([20] * 20, seed=4))
    model = new_model(builder)
    trained(model, batch, 25, learning_rate=3e-3)
    objective = Objective(ObjectiveSettings(), COUNTS)
    examples = objective.examples(others)
    states = model.encode(tensors(examples.inputs))
    assert objective.loss(model, states, examples, torch.Generator()).item() > math.log(N_ITEMS) - 0.02


@every_builder
@tied_or_not
@pytest.mark.parametrize("loss", [ObjectiveSettings(), SAMPLED], ids=["softmax", "sampled-softmax"])
def test_the_padding_row_stays_zero(builder: str, tied: bool, loss: ObjectiveSettings) -> None:
    model = new_model(builder, tied=tied)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    trained(model, batch_of(*random_users([5, 2, 7])), 5, loss=loss, weight_decay=0.1)
    assert all(not torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert (model.items.into[0] == 0).all()
    assert (model.item_vectors()[0] == 0).all()


@every_builder
def test_users_with_one_input_can_be_learned_from(builder: str) -> None:
    model = new_model(builder)
    losses = trained(model, batch_of([1, 2], [3, 4]), 5)
    assert all(math.isfinite(loss) for loss in losses) and losses[-1] < losses[0]
    assert all(torch.isfinite(weight).all() for weight in model.state_dict().values())
