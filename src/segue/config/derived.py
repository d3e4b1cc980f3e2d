"""A log → the settings of the recipe `default` that depend on it, each with its reason.

The rules were found on twelve logs, each judged on logs that it was not fitted to: see docs/recipes.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from segue.config.recipes import DEFAULT_RECIPE, read_recipe
from segue.config.settings import Settings, make_settings
from segue.data.dataset import Data
from segue.evaluation.split_log import SplitLog

LENGTHS = (20, 50, 100, 200)
COVERED = 95  # percent of the users whose whole training history a window holds, if it may be so long
DENSE = 150  # training events an item from which on a log is dense
MOST_BATCH, LEAST_BATCH, STEPS_OF_EPOCH = 2000, 128, 100
LONG_EPOCH, SHORT_EPOCH = 1_000_000, 5_000  # training events
PASSES, DENSE_PASSES = 20, 20
MINUTES = ((100_000, 5.0), (500_000, 15.0))
MOST_MINUTES = 45.0
MOST_SOFTMAX = 50_000_000  # events × items of a batch up to which the full softmax is taken


class Derived(msgspec.Struct, frozen=True):
    """A setting that was derived from the log."""

    key: str
    value: str | int | float
    reason: str

    @property
    def override(self) -> str:
        """As --set takes it."""
        return f"{self.key}={msgspec.json.encode(self.value).decode()}"


@dataclass(frozen=True, slots=True)
class LogShape:
    """The facts of the training part that settings depend on."""

    users: int
    items: int
    """Items with training events."""
    events: int
    """Training events that follow another of their user: one is a target of training."""
    lengths: np.ndarray
    """Training events of each user [U]."""

    @staticmethod
    def of(log: SplitLog) -> LogShape:
        lengths = np.asarray(log.split.train_end) - np.asarray(log.sequences.offsets)[:-1]
        return LogShape(
            users=int((lengths > 0).sum()),
            items=int((log.training_counts > 0).sum()),
            events=int(np.maximum(0, lengths - 1).sum()),
            lengths=lengths[lengths > 0],
        )

    @property
    def minutes(self) -> float:
        """The minutes that training takes at most if the user names none."""
        return next((minutes for events, minutes in MINUTES if self.events < events), MOST_MINUTES)


def settings_of(
    recipe: str | Path | None, overrides: Sequence[str], data: Data
) -> tuple[Settings, tuple[Derived, ...]]:
    """The settings of a recipe for a log, and those of them that were derived from it: none unless the recipe is
    `default`. Overrides come before what is derived."""
    tables = read_recipe(recipe or DEFAULT_RECIPE)
    if recipe not in (None, DEFAULT_RECIPE):
        return make_settings(tables, overrides), ()
    given = {text.partition("=")[0].strip() for text in overrides}
    derived = tuple(each for each in derive(LogShape.of(SplitLog.of(data))) if each.key not in given)
    return make_settings(tables, [*(each.override for each in derived), *overrides]), derived


def derive(log: LogShape) -> list[Derived]:
    """The settings for a log, the reason of each in a few words."""
    covering = float(np.percentile(log.lengths, COVERED)) if len(log.lengths) else 1.0
    length = next((length for length in LENGTHS if covering < length), LENGTHS[-1])
    per_item = log.events / max(1, log.items)
    dense = per_item >= DENSE
    batch = int(min(MOST_BATCH, max(LEAST_BATCH, log.events / STEPS_OF_EPOCH)))
    epoch = min(LONG_EPOCH, max(SHORT_EPOCH, log.events))
    epochs = max(1, round((DENSE_PASSES if dense else PASSES) * max(log.events, SHORT_EPOCH) / epoch))
    return [
        Derived("model.length", length, f"{COVERED} % of the users have at most {covering:,.0f} training events"),
        Derived("model.dropout", 0.3 if dense else 0.5, f"{per_item:,.0f} training events an item"),
        Derived("train.tokens", batch, f"about {STEPS_OF_EPOCH} steps in {log.events:,} events"),
        Derived("train.epoch_events", 0 if epoch == log.events else epoch, f"{log.events:,} training events"),
        Derived("train.epochs", epochs, "passes over the log"),
    ]
