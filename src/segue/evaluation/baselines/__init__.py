"""Baselines that a model has to beat: fit on the training part and measured like the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from segue.evaluation.baselines.last_item import LastItem
from segue.evaluation.baselines.popularity import Popularity
from segue.evaluation.baselines.session_knn import SessionNeighbours
from segue.evaluation.evaluator import Scorer
from segue.evaluation.split_log import SplitLog


class Baseline(Scorer, Protocol):
    """A scorer with a description for the report."""

    @property
    def note(self) -> str: ...


# The hyperparameters of a baseline are chosen on validation.
BASELINES: dict[str, Callable[[SplitLog], Baseline]] = {
    "popularity": Popularity.fit,
    "recent-popularity": Popularity.fit_recent,
    "last-item": LastItem.fit,
    "session-knn": SessionNeighbours.fit,
}
