"""What a model has to beat. Each is fit on the training part alone and measured by the same ruler."""

from __future__ import annotations

from typing import Protocol

from segue.data.sequences import Sequences
from segue.data.split import Split
from segue.evaluation.baselines.last_item import LastItem
from segue.evaluation.baselines.popularity import Popularity, RecentPopularity
from segue.evaluation.baselines.session_knn import SessionNeighbours
from segue.evaluation.evaluator import Scorer


class Baseline(Scorer, Protocol):
    """A scorer that says in a sentence what it is."""

    @property
    def note(self) -> str: ...


class Fit(Protocol):
    """Training part → baseline. Where something is chosen, validation chooses it."""

    def __call__(self, sequences: Sequences, split: Split, n_items: int) -> Baseline: ...


BASELINES: dict[str, Fit] = {
    "popularity": Popularity.fit,
    "recent-popularity": RecentPopularity.fit,
    "last-item": LastItem.fit,
    "session-knn": SessionNeighbours.fit,
}
