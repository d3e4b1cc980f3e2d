"""The law that every model can memorise a few histories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from segue.data.batch import Batch
from segue.layers.packed import tensors
from segue.models.sequence import SequenceModel
from segue.objective.objective import Objective
from segue.objective.settings import ObjectiveSettings
from segue.objective.tasks.continuation import Continuation
from segue.objective.tasks.examples import Examples, TaskFacts
from segue.objective.tasks.masked_item import MaskedItem
from segue.objective.tasks.next_item import NextItem
from segue.testing.cases import Case, batch_of, packed_of, random_users
from segue.training.optimiser import optimiser
from segue.training.settings import TrainSettings

QUICK = TrainSettings(learning_rate=1e-2)


def task_of(model: SequenceModel) -> Callable[[Batch, np.random.Generator], Examples]:
    """A task that the model can learn."""
    if model.has_decoder:
        return Continuation(items=3, cuts=8)  # of ten events: fewer cuts would leave the result to chance
    if model.items.mask is None:
        return NextItem()
    return partial(MaskedItem(share=0.3, most=20, last=1.0), facts=TaskFacts(model.items.mask_number))


class Learner:
    """A model that is trained on one batch."""

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
    """Eight histories of ten items, each with its own first item, so that it identifies the user. No history repeats
    its first item at once: a model of distances alone could not tell that from one event."""
    users = random_users([10] * 8, seed=4, n_items=n_items)
    return [[first, *user[1:]] for first, user in enumerate(users, start=1)]


def memorises_eight_users(case: Case, steps: int = 299) -> None:
    """Eight histories of ten items are memorised within `steps` steps: after each event the next item ranks first; of
    bidirectional models, the last item.
    """
    model, users = case.new(), eight_users(case.n_items)
    learner = Learner(model, batch_of(*users))
    correct, total = 0, 1
    for done in range(0, steps, 25):
        learner.steps(min(25, steps - done))
        correct, total = _memorised(model, users)
        if correct == total:
            return
    raise AssertionError(
        f"After {steps} steps only {correct} of {total} targets are memorised: the model does not learn."
    )


def _memorised(model: SequenceModel, users: Sequence[Sequence[int]]) -> tuple[int, int]:
    """How many targets rank first, and of how many."""
    histories = packed_of(*(user[:-1] for user in users))
    with torch.inference_mode():
        if model.has_decoder:
            prefixes = [user[:length] for user in users for length in range(1, len(user))]
            queries, targets = model.query(packed_of(*prefixes)), [item for user in users for item in user[1:]]
        elif model.items.mask is None:
            queries, targets = model.head(model.encode(histories)), [item for user in users for item in user[1:]]
        else:
            queries, targets = model.query(histories), [user[-1] for user in users]
        best = model.score_all(queries)[:, 1:].argmax(1) + 1
    return int((best == torch.tensor(targets)).sum()), len(targets)
