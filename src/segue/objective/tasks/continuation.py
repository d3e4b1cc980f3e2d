"""Continuation: a decoder predicts the items after a cut of the history, one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from segue.data.batch import Batch, ragged_rows
from segue.kinds import Count
from segue.objective.tasks.examples import NO_FACTS, Examples, Task, TaskFacts, sample_without_replacement


class Continuation(Task, frozen=True, tag="continuation"):
    """Histories are cut, and a decoder predicts the items after a cut one by one, given the items before.

    For encoders with a decoder. A cut may come after any event but the last; each is an example of its own. The history
    ends there. The targets are the next `items` events, or as many as there are. All but the last of them are inputs of
    the decoder (teacher forcing). The state at the history's last event predicts the first of them.
    """

    items: Count = 5
    """Items to predict after a cut."""
    cuts: Count = 1
    """Cuts of a window, each with equal probability and at most once."""

    def __call__(self, batch: Batch, rng: np.random.Generator, facts: TaskFacts = NO_FACTS) -> Examples:  # noqa: ARG002
        begins = np.cumsum(batch.lengths) - batch.lengths
        possible = batch.lengths - 1  # cuts after 1 … n - 1 events
        sampled = sample_without_replacement(possible, np.minimum(self.cuts, possible), rng)
        user = np.repeat(np.arange(len(possible)), possible)[sampled]
        histories = sampled - (np.cumsum(possible) - possible)[user] + 1
        counts = np.minimum(self.items, batch.lengths[user] - histories)
        lengths = histories + counts - 1
        inputs = batch.tokens(ragged_rows(begins[user], lengths), lengths)
        return Examples(
            inputs=replace(inputs, histories=histories),
            targets=batch.items[ragged_rows(begins[user] + histories, counts)],
            positions=ragged_rows(np.cumsum(lengths) - counts, counts),
        )
