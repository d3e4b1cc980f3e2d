"""Every model can learn: by heart what can be learned by heart, and nothing from noise."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from model_cases import (
    CHOICES,
    MASK,
    N_ITEMS,
    NOT_CAUSAL,
    batch_of,
    case_of,
    eight_users,
    every_builder,
    looking_back,
    looking_both_ways,
    new_model,
    packed_of,
    planning,
    random_users,
    states_of,
    task_of,
    tied_or_not,
)
from settings_tables import BUILDERS, objective_settings

from segue.data.batch import Batch
from segue.layers.dropout import set_generator
from segue.layers.packed import tensors
from segue.models.sequence import SequenceModel
from segue.objective.objective import Objective
from segue.objective.settings import ObjectiveSettings
from segue.testing.learning import QUICK, Learner, memorises_eight_users

COUNTS = np.r_[0, np.ones(N_ITEMS, dtype=np.int64)]
SAMPLED = objective_settings(loss="sampled-softmax", sampler="uniform", sampler__negatives=12)


def trained(
    model: SequenceModel, batch: Batch, steps: int, *, loss: ObjectiveSettings | None = None, **changed: Any
) -> list[float]:
    """The loss at each of some steps over one batch, in the model's task."""
    return Learner(model, batch, objective=loss, train=msgspec.structs.replace(QUICK, **changed)).steps(steps)


@pytest.mark.parametrize(
    ("builder", "tied"),
    [
        *product(sorted(BUILDERS.keys() - NOT_CAUSAL), (True, False)),
        *product(sorted(CHOICES.keys() - NOT_CAUSAL), (True,)),
    ],
)
def test_eight_users_of_ten_items_are_learned_by_heart(builder: str, tied: bool) -> None:
    memorises_eight_users(case_of(builder, width=16, depth=1, length=10, items__tied=tied), steps=150)


@looking_back
def test_what_depends_on_the_event_before_the_last_is_learned(builder: str) -> None:
    """Two walks on a cycle take turns: the last event says nothing of the next, the one before it everything. What
    knows no more than the last event is right once in twelve."""

    def walks(first: int, second: int) -> list[int]:
        return [((first, second)[place % 2] + place // 2) % 12 + 1 for place in range(8)]

    drawn = np.random.default_rng(0).permutation(144)
    known, others = ([walks(pair // 12, pair % 12) for pair in pairs.tolist()] for pairs in (drawn[:120], drawn[120:]))
    model = new_model(builder, width=32, length=8)
    learner, wanted, right = Learner(model, batch_of(*known)), torch.tensor([user[-1] for user in others]), 0.0
    for _ in range(10):
        learner.steps(15)
        with torch.inference_mode():
            scores = model.score_all(model.query(packed_of(*(user[:-1] for user in others))))
        right = (scores[:, 1:].argmax(1) + 1 == wanted).double().mean().item()
        if right > 0.9:
            return
    raise AssertionError(f"only {right:.2f} of the answers are right")


@looking_both_ways
@tied_or_not
def test_what_is_hidden_of_eight_users_is_learned_by_heart(builder: str, tied: bool) -> None:
    """The last event, which every step hides; and of all events, each hidden alone, nearly all."""
    model, users, right = new_model(builder, width=32, depth=1, length=10, items__tied=tied), eight_users(N_ITEMS), 0
    trained(model, batch_of(*users), 150)
    last = model.score_all(model.query(packed_of(*(user[:-1] for user in users))))[:, 1:].argmax(1) + 1
    assert last.tolist() == [user[-1] for user in users]
    for place in range(10):
        hidden = [[*user[:place], MASK, *user[place + 1 :]] for user in users]
        states = torch.stack([state[place] for state in states_of(model, hidden)])
        found = model.score_all(model.head(states))[:, 1:].argmax(1) + 1
        right += sum(item == user[place] for item, user in zip(found.tolist(), users, strict=True))
    assert right >= 70, "of eighty"


@looking_both_ways
def test_what_comes_next_on_a_cycle_is_learned_from_what_is_hidden(builder: str) -> None:
    """Users of four and of six events are trained on; a mask after four makes five, which it has never met."""

    def walk(start: int, length: int) -> list[int]:
        return [(start + place) % 12 + 1 for place in range(length)]

    model = new_model(builder, width=32, depth=1, length=10)
    trained(model, batch_of(*(walk(start, length) for start in range(12) for length in (4, 6))), 150)
    found = model.score_all(model.query(packed_of(*(walk(start, 4) for start in range(12)))))[:, 1:].argmax(1) + 1
    assert found.tolist() == [walk(start, 5)[-1] for start in range(12)]


@planning
def test_what_came_after_each_cut_of_eight_users_is_learned_by_heart(builder: str) -> None:
    memorises_eight_users(case_of(builder, width=32, depth=1, length=10))


@every_builder
def test_a_seed_gives_one_sequence_of_losses(builder: str) -> None:
    """The weights' and the one that dropout draws from."""

    def losses(weights: int, dropped: int) -> list[float]:
        model = new_model(builder, seed=weights, dropout=0.3)
        set_generator(model, torch.Generator().manual_seed(dropped))
        return trained(model, batch_of(*random_users([7, 3])), 2)

    first = losses(1, 1)
    assert losses(1, 1) == first
    assert losses(2, 1) != first and losses(1, 2) != first


@every_builder
def test_loss_starts_at_chance(builder: str) -> None:
    """About log V: logits of size one add a half to it."""
    (loss,) = trained(new_model(builder, width=32), batch_of(*random_users([20] * 10)), 1)
    assert loss == pytest.approx(math.log(N_ITEMS), abs=1)


@every_builder
def test_random_targets_stay_at_chance_on_users_not_trained_on(builder: str) -> None:
    """Were the answer anywhere in the input, this would be learned."""
    batch, others = batch_of(*random_users([20] * 30, seed=3)), batch_of(*random_users([20] * 20, seed=4))
    model = new_model(builder)
    trained(model, batch, 15)  # where the target is its own input, this learns a tenth of log V and more
    objective = Objective(objective_settings(), COUNTS)
    examples = task_of(model)(others, np.random.default_rng(1))
    states = model.encode(tensors(examples.inputs))
    assert objective.loss(model, states, examples, torch.Generator()).item() > math.log(N_ITEMS) - 0.02


@every_builder
@tied_or_not
@pytest.mark.parametrize("loss", [objective_settings(), SAMPLED], ids=["softmax", "sampled-softmax"])
def test_the_padding_row_stays_zero(builder: str, tied: bool, loss: ObjectiveSettings) -> None:
    model = new_model(builder, items__tied=tied)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    trained(model, batch_of(*random_users([5, 2, 7])), 2, loss=loss, weight_decay=0.1)
    assert all(not torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert (model.items.into[0] == 0).all()
    assert (model.item_vectors()[0] == 0).all()


@every_builder
def test_users_with_one_input_can_be_learned_from(builder: str) -> None:
    model = new_model(builder)
    losses = trained(model, batch_of([1, 2], [3, 4]), 5)
    assert all(math.isfinite(loss) for loss in losses) and losses[-1] < losses[0]
    assert all(torch.isfinite(weight).all() for weight in model.state_dict().values())
