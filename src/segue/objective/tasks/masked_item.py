"""Masked item: the states at masks predict the events that they replace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from segue.data.batch import Batch, ragged_rows
from segue.kinds import Count, ProperShare, Share
from segue.objective.tasks.examples import EXTRA, Examples, Task, TaskSettings, sample_without_replacement


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedItem:
    """Some events of each user are hidden by a mask, and the states at the masks are asked for them (BERT4Rec).

    For encoders that look both ways. Of a user's n events min(most, max(1, n * share)) are hidden, any of them with
    equal chance, a half rounded up; everything that is hidden is replaced by the mask, none by another item. As an
    answer is asked for after the history, some users come a second time, after all others, with only the last hidden.
    """

    mask: int
    """The number that stands for a hidden item."""
    share: float
    """Of the events that are hidden."""
    most: int
    """Events of a user that are hidden."""
    last: float
    """Share of the users that come a second time."""

    @property
    def extra(self) -> int:
        return EXTRA

    def __call__(self, batch: Batch, rng: np.random.Generator) -> Examples:
        counts = np.maximum(1, np.floor(batch.lengths * self.share + 0.5).astype(np.int64))
        hidden = sample_without_replacement(batch.lengths, np.minimum(counts, self.most), rng)
        again = rng.random(len(batch.lengths)) < self.last
        lengths, ends, tokens = batch.lengths[again], np.cumsum(batch.lengths)[again], len(batch.items)
        rows = np.concatenate((np.arange(tokens), ragged_rows(ends - lengths, lengths)))
        inputs = batch.tokens(rows, np.concatenate((batch.lengths, lengths)))  # arrays of its own: they may be changed
        positions = np.concatenate((hidden, tokens + np.cumsum(lengths) - 1))
        targets = inputs.items[positions]
        inputs.items[positions] = self.mask
        # What else is known of an event is hidden with it: a question's mask has none of it either.
        if inputs.kinds is not None:
            inputs.kinds[positions] = 0
        if inputs.values is not None:
            inputs.values[positions] = np.nan
        return Examples(inputs=inputs, targets=targets, positions=positions)


class MaskedItemSettings(TaskSettings, frozen=True, tag="masked-item"):
    """Some events are masked, and the states at the masks predict them (BERT4Rec)."""

    share: ProperShare = 0.2
    """Share of a user's events that are masked."""
    most: Count = 40
    """Events of a user that are masked, at most."""
    last: Share = 0.1
    """Share of the users that come a second time, with only their last event masked."""

    def task(self, n_items: int, kinds: Sequence[str], length: int | None) -> Task:  # noqa: ARG002
        return MaskedItem(mask=n_items + 1, share=self.share, most=self.most, last=self.last)
