"""Next item: every state predicts the event after it."""

from __future__ import annotations

import numpy as np

from segue.data.batch import Batch
from segue.objective.tasks.examples import NO_FACTS, Examples, Task, TaskFacts


class NextItem(Task, frozen=True, tag="next-item"):
    """Every event but a user's last is an input, and the event after it is its target."""

    def __call__(self, batch: Batch, rng: np.random.Generator, facts: TaskFacts = NO_FACTS) -> Examples:  # noqa: ARG002
        ends = np.cumsum(batch.lengths)
        inputs, targets = np.ones(len(batch.items), dtype=bool), np.ones(len(batch.items), dtype=bool)
        inputs[ends - 1] = False
        targets[ends - batch.lengths] = False
        return Examples(
            inputs=batch.tokens(inputs, batch.lengths - 1, query_times=batch.times[ends - 1], users=batch.users),
            targets=batch.items[targets],
        )
