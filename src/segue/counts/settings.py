"""Whether item-to-item counts are added to a model's scores."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from segue.counts.neighbours import PairLimits
from segue.kinds import Count, Kind


class NoCountsSettings(Kind, frozen=True, tag="none"):
    """The scores are the model's alone."""

    @property
    def limits(self) -> PairLimits | None:
        return None


class FittedCountsSettings(Kind, frozen=True, tag="fitted"):
    """Counts of what followed what in training are added to the scores. Their weights are fitted on validation; if they
    do not help there, they are left out."""

    least_users: Count = 2
    """Users who must have a pair of items for it to be kept. With 1, a run holds pairs that only one user has, and so
    parts of that user's history."""
    neighbours: Annotated[int, Meta(ge=1, le=10_000)] = 200
    """Neighbours kept of an item, those with the highest counts: they bound the memory."""

    @property
    def limits(self) -> PairLimits | None:
        return PairLimits(least_users=self.least_users, most=self.neighbours)


CountsSettings = NoCountsSettings | FittedCountsSettings
