"""A log → the settings of the recipe `default` that depend on it, each with its reason.

The rules were found on twelve logs, each judged on logs that it was not fitted to: see docs/recipes.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from segue.config.recipes import DEFAULT_RECIPE, read_recipe
from segue.config.settings import Settings, make_settings
from segue.data.dataset import Data
from segue.errors import SettingsError
from segue.evaluation.split_log import SplitLog
from segue.kinds import kind_of

LENGTHS = (20, 50, 100, 200)
COVERED = 95  # percent of the users whose whole training history a window holds, if it may be so long
DENSE = 150  # training events an item from which on a log is dense
MOST_BATCH, LEAST_BATCH, STEPS_OF_EPOCH = 2000, 128, 100
LONG_EPOCH, SHORT_EPOCH = 1_000_000, 5_000  # training events
PASSES, DENSE_PASSES = 20, 20
MINUTES = ((100_000, 5.0), (500_000, 15.0))
MOST_MINUTES = 45.0
OTHERS = ("gru4rec", "hstu")  # recipes whose encoders are tried beside the default's if there is time


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


@dataclass(frozen=True, slots=True)
class LogSettings:
    """The settings of a recipe for a log."""

    settings: Settings
    derived: tuple[Derived, ...] = ()
    """Those that were derived from the log: none unless the recipe is `default`."""


def settings_for(recipe: str | Path | None, overrides: Sequence[str], data: Data) -> LogSettings:
    """The settings of a recipe for a log. Overrides come before what is derived."""
    tables = read_recipe(recipe or DEFAULT_RECIPE)
    if recipe not in (None, DEFAULT_RECIPE):
        return LogSettings(make_settings(tables, overrides))
    derived = derive(LogShape.of(SplitLog.of(data)))
    own = tuple(each for each in derived if not is_given(each.key, overrides))
    return LogSettings(make_settings(tables, [*(each.override for each in own), *overrides]), own)


def is_given(key: str, overrides: Sequence[str]) -> bool:
    """Whether the user set a key."""
    return any(text.partition("=")[0].strip() == key for text in overrides)


def candidates(chosen: LogSettings, overrides: Sequence[str], *, timed: bool) -> dict[str, Settings]:
    """The settings to try, by the name of the encoder: those of the default first, then of other encoders with the
    same derived values. `timed`: whether the log has times. If the user chose an encoder, there are no others."""
    own = {kind_of(chosen.settings.model): chosen.settings}
    if any(text.partition("=")[0].strip() in ("model", "model.kind", "model.encoder") for text in overrides):
        return own
    for name in OTHERS:
        if name == "hstu" and not timed:
            continue
        tables = {**read_recipe(DEFAULT_RECIPE), **{part: read_recipe(name)[part] for part in ("model", "objective")}}
        untold = ["model.target_time=false"] if name == "hstu" else []
        with suppress(SettingsError):  # of an override that this encoder does not have
            own[name] = make_settings(tables, [*(each.override for each in chosen.derived), *untold, *overrides])
    return own


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
        Derived("train.minutes", log.minutes, f"at most, for {log.events:,} events"),
    ]
