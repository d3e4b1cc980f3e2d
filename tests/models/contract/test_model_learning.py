"""Every model can learn: it memorises small data, and learns nothing from noise."""

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
    bidirectional,
    case_of,
    causal,
    eight_users,
    every_builder,
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
def test_eight_users_of_ten_items_are_memorised(builder: str, tied: bool) -> None:
    memorises_eight_users(case_of(builder, width=16, depth=1, length=10, items__tied=tied), steps=150)


@causal
def test_a_dependence_on_the_event_before_the_last_is_learned(builder: str) -> None:
    """Two walks on a cycle alternate: the event before the last determines the next one, the last event does
    not. A model that uses only the last event is right once in twelve."""

    def walks(first: int, second: int) -> list[int]:
        return [((first, second)[position % 2] + position // 2) % 12 + 1 for position in range(8)]

    order = np.random.default_rng(0).permutation(144)
    users, others = ([walks(pair // 12, pair % 12) for pair in pairs.tolist()] for pairs in (order[:120], order[120:]))
    model = new_model(builder, width=32, length=8)
    learner, targets, accuracy = Learner(model, batch_of(*users)), torch.tensor([user[-1] for user in others]), 0.0
    for _ in range(10):
        learner.steps(15)
        with torch.inference_mode():
            scores = model.score_all(model.query(packed_of(*(user[:-1] for user in others))))
        accuracy = (scores[:, 1:].argmax(1) + 1 == targets).double().mean().item()
        if accuracy > 0.9:
            return
    raise AssertionError(f"only {accuracy:.2f} of the answers are right")


@bidirectional
@tied_or_not
def test_masked_events_of_eight_users_are_memorised(builder: str, tied: bool) -> None:
    """The last event, which every step masks; and nearly all events, each masked alone."""
    model, users, correct = (
        new_model(builder, width=32, depth=1, length=10, items__tied=tied),
        eight_users(N_ITEMS),
        0,
    )
    trained(model, batch_of(*users), 150)
    last = model.score_all(model.query(packed_of(*(user[:-1] for user in users))))[:, 1:].argmax(1) + 1
    assert last.tolist() == [user[-1] for user in users]
    for position in range(10):
        hidden = [[*user[:position], MASK, *user[position + 1 :]] for user in users]
        states = torch.stack([state[position] for state in states_of(model, hidden)])
        answers = model.score_all(model.head(states))[:, 1:].argmax(1) + 1
        correct += sum(item == user[position] for item, user in zip(answers.tolist(), users, strict=True))
    assert correct >= 70, "of eighty"


@bidirectional
def test_the_next_item_of_a_cycle_is_learned_from_masked_items(builder: str) -> None:
    """Trained on users of four and six events; four events and a mask make five, a length unseen in training."""

    def walk(start: int, length: int) -> list[int]:
        return [(start + position) % 12 + 1 for position in range(length)]

    model = new_model(builder, width=32, depth=1, length=10)
    trained(model, batch_of(*(walk(start, length) for start in range(12) for length in (4, 6))), 150)
    answers = model.score_all(model.query(packed_of(*(walk(start, 4) for start in range(12)))))[:, 1:].argmax(1) + 1
    assert answers.tolist() == [walk(start, 5)[-1] for start in range(12)]


@planning
def test_continuations_of_eight_users_are_memorised(builder: str) -> None:
    memorises_eight_users(case_of(builder, width=32, depth=1, length=10))


@every_builder
def test_a_seed_gives_one_sequence_of_losses(builder: str) -> None:
    """The seed of the weights and that of dropout."""

    def losses(weights: int, dropout: int) -> list[float]:
        model = new_model(builder, seed=weights, dropout=0.3)
        set_generator(model, torch.Generator().manual_seed(dropout))
        return trained(model, batch_of(*random_users([7, 3])), 2)

    first = losses(1, 1)
    assert losses(1, 1) == first
    assert losses(2, 1) != first and losses(1, 2) != first


@every_builder
def test_loss_starts_at_chance(builder: str) -> None:
    """About log V: logits of unit variance add a half to it."""
    (loss,) = trained(new_model(builder, width=32), batch_of(*random_users([20] * 10)), 1)
    assert loss == pytest.approx(math.log(N_ITEMS), abs=1)


@every_builder
def test_random_targets_stay_at_chance_on_unseen_users(builder: str) -> None:
    """If the input contained the target, this would be learned."""
    batch, others = batch_of(*random_users([20] * 30, seed=3)), batch_of(*random_users([20] * 20, seed=4))
    model = new_model(builder)
    trained(model, batch, 15)  # if the input contained the target, this would learn a tenth of log V and more
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
def test_users_with_one_input_can_be_trained_on(builder: str) -> None:
    model = new_model(builder)
    losses = trained(model, batch_of([1, 2], [3, 4]), 5)
    assert all(math.isfinite(loss) for loss in losses) and losses[-1] < losses[0]
    assert all(torch.isfinite(weight).all() for weight in model.state_dict().values())
