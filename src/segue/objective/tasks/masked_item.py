"""Masked item: the states at masks predict the events that they replace."""

from __future__ import annotations

import numpy as np

from segue.data.batch import Batch, ragged_rows
from segue.kinds import Count, ProperShare, Share
from segue.objective.tasks.examples import NO_FACTS, Examples, Task, TaskFacts, sample_without_replacement


class MaskedItem(Task, frozen=True, tag="masked-item"):
    """Some events of each user are masked, and the states at the masks predict them (BERT4Rec).

    For bidirectional encoders. Of a user's n events min(most, max(1, n * share)) are masked, sampled uniformly, a half
    rounded up. Every sampled event becomes the mask, none another item. Because queries come after the history, some
    users are repeated after all others with only their last event masked.
    """

    share: ProperShare = 0.2
    """Share of a user's events that are masked."""
    most: Count = 40
    """Most masked events of a user."""
    last: Share = 0.1
    """Share of the users that are repeated with only their last event masked."""

    def __call__(self, batch: Batch, rng: np.random.Generator, facts: TaskFacts = NO_FACTS) -> Examples:
        counts = np.maximum(1, np.floor(batch.lengths * self.share + 0.5).astype(np.int64))
        masked = sample_without_replacement(batch.lengths, np.minimum(counts, self.most), rng)
        repeated = rng.random(len(batch.lengths)) < self.last
        lengths, ends, tokens = batch.lengths[repeated], np.cumsum(batch.lengths)[repeated], len(batch.items)
        rows = np.concatenate((np.arange(tokens), ragged_rows(ends - lengths, lengths)))
        inputs = batch.tokens(rows, np.concatenate((batch.lengths, lengths)))  # copies, changed below
        positions = np.concatenate((masked, tokens + np.cumsum(lengths) - 1))
        targets = inputs.items[positions]
        inputs.items[positions] = facts.mask
        # The event's kind and value are masked too: the mask of a query has none.
        if inputs.kinds is not None:
            inputs.kinds[positions] = 0
        if inputs.values is not None:
            inputs.values[positions] = np.nan
        return Examples(inputs=inputs, targets=targets, positions=positions)
