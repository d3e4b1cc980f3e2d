"""What every model can do: learn by heart what can be learned by heart."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from segue.data.batch import Batch
from segue.layers.packed import tensors
from segue.models.sequence import SequenceModel
from segue.objective.objective import Objective
from segue.objective.settings import ObjectiveSettings
from segue.objective.tasks.examples import Continuation, MaskedItem, Task, next_item
from segue.testing.cases import Case, batch_of, packed_of, random_users
from segue.training.optimiser import optimiser
from segue.training.settings import TrainSettings

QUICK = TrainSettings(learning_rate=1e-2)


def task_of(model: SequenceModel) -> Task:
    """A task that the model can learn."""
    if model.has_decoder:
        return Continuation(items=3, cuts=8)  # nearly all of ten events: with few, what is known wavers with the draws
    mask = model.items.mask_number
    return next_item if model.items.mask is None else MaskedItem(mask=mask, share=0.3, most=20, last=1.0)


class Learner:
    """A model and the steps that it takes over one batch."""

    def __init__(
        self,
        model: SequenceModel,
        batch: Batch,
        *,
        objective: ObjectiveSettings | None = None,
        train: TrainSettings = QUICK,
    ) -> None:
        self.model = model
        counts = np.r_[0, np.ones(model.items.n_items, dtype=np.int64)]
        self._objective = Objective(objective or ObjectiveSettings(), counts)
        self._batch, self._task = batch, task_of(model)
        self._rng, self._generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
        self._adamw = optimiser(model, train)

    def steps(self, count: int) -> list[float]:
        """The loss at each step. The model is left in evaluation mode."""
        self.model.train()
        losses = []
        with torch.random.fork_rng(devices=[]):
            for _ in range(count):
                examples = self._task(self._batch, self._rng)
                states = self.model.encode(tensors(examples.inputs))
                loss = self._objective.loss(self.model, states, examples, self._generator)
                self._adamw.zero_grad()
                torch.autograd.backward(loss)
                self._adamw.step()
                losses.append(loss.item())
        self.model.eval()
        return losses


def eight_users(n_items: int) -> list[list[int]]:
    """Of ten items; from the first one on it is clear who it is. Nobody begins with an item twice, which who knows
    distances alone cannot tell from once."""
    users = random_users([10] * 8, seed=4, n_items=n_items)
    return [[first, *user[1:]] for first, user in enumerate(users, start=1)]


def learns_by_heart(case: Case, steps: int = 299) -> None:
    """Eight users of ten items are known by heart within so many steps: after each event the next is the best answer,
    and for models that look both ways, the last one.
    """
    model, users = case.new(), eight_users(case.n_items)
    learner = Learner(model, batch_of(*users))
    right, of = 0, 1
    for done in range(0, steps, 50):
        learner.steps(min(50, steps - done))
        right, of = _known_by_heart(model, users)
        if right == of:
            return
    raise AssertionError(f"After {steps} steps only {right} of {of} answers are known by heart: it does not learn.")


def _known_by_heart(model: SequenceModel, users: Sequence[Sequence[int]]) -> tuple[int, int]:
    """How many answers are right, and of how many."""
    known = packed_of(*(user[:-1] for user in users))
    with torch.inference_mode():
        if model.has_decoder:
            prefixes = [user[:length] for user in users for length in range(1, len(user))]
            questions, wanted = model.query(packed_of(*prefixes)), [item for user in users for item in user[1:]]
        elif model.items.mask is None:
            questions, wanted = model.head(model.encode(known)), [item for user in users for item in user[1:]]
        else:
            questions, wanted = model.query(known), [user[-1] for user in users]
        found = model.score_all(questions)[:, 1:].argmax(1) + 1
    return int((found == torch.tensor(wanted)).sum()), len(wanted)
