"""A log → the settings of the recipe `default` that depend on it, each with its reason.

docs/results.md has what they reach on twelve logs.
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
from segue.kinds import KIND, kind_of

LENGTHS = (20, 50, 100, 200)
COVERED = 95  # percent of the users whose whole training history a window holds, up to the longest of LENGTHS
DENSE = 200  # training events an item from which on a log is dense
MOST_BATCH, LEAST_BATCH, STEPS_OF_EPOCH = 2000, 128, 100
LONG_EPOCH, SHORT_EPOCH = 1_000_000, 5_000  # training events
COMPANIONS = 50  # training events an item up to which vectors that begin with companions are better than random ones
PASSES = 20
MINUTES = ((100_000, 5.0), (500_000, 15.0))
MOST_MINUTES = 45.0
FULL_PASSES = 5  # the softmax is over all items only if the time suffices for so many passes over the log
SOFTMAX_SPEED = 100e9 / (6 * 128)  # scores a second of two cores, each of a width of 128, forward and backward
NEGATIVES = 3000
MEMBERS, MEMBER_WIDTH = 2, 128
MEMBER_PASSES = 10  # there are several encoders only if the time suffices for so many passes of each
VALIDATION = 0.2  # share of the time that validation takes at most, about
LEAST_CASES = 2000
ENCODERS = ("sasrec", "gru4rec", "hstu")  # tried if there is time; the last one needs times


MEMBERS_NEED = (
    *("model", "model.encoder", "model.items", "model.inputs", "model.output", "model.similarity"),
    "objective.loss",
)
REPLACED_BY = {
    "model": ("model.encoder",),
    "model.width": MEMBERS_NEED,
    "model.members": ("model.width", *MEMBERS_NEED),
    "objective.sampler": ("objective.loss",),
    "objective.sampler.negatives": ("objective.loss",),
    "train.items": ("model.items",),
}
"""Keys that are not derived if the user sets one of others."""


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
    """Training events."""
    targets: int
    """Training events that follow another of their user."""
    lengths: np.ndarray
    """Training events of each user [U]."""
    catalogue: int
    """All items, which a full softmax scores."""
    cases: int
    """Events of the validation part."""

    @staticmethod
    def of(log: SplitLog) -> LogShape:
        lengths = np.asarray(log.split.train_end) - np.asarray(log.sequences.offsets)[:-1]
        return LogShape(
            users=int((lengths > 0).sum()),
            items=int((log.training_counts > 0).sum()),
            events=int(lengths.sum()),
            targets=int(np.maximum(0, lengths - 1).sum()),
            lengths=lengths[lengths > 0],
            catalogue=log.n_items,
            cases=int((np.asarray(log.split.valid_end) - np.asarray(log.split.train_end)).sum()),
        )

    @property
    def per_item(self) -> float:
        """Training events of an item on average."""
        return self.events / max(1, self.items)

    @property
    def dense(self) -> bool:
        """Whether items have so many events that a recurrent encoder learns their order, and overfits little."""
        return self.per_item >= DENSE

    @property
    def encoder(self) -> str:
        """The encoder for the log."""
        return "gru4rec" if self.dense else "sasrec"

    @property
    def full_minutes(self) -> float:
        """Minutes of a pass over the log with the softmax over all items, about."""
        return self.targets * self.catalogue / SOFTMAX_SPEED / 60

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
    if recipe not in (None, DEFAULT_RECIPE):
        return LogSettings(make_settings(read_recipe(recipe), overrides))
    log = LogShape.of(SplitLog.of(data))
    derived = tuple(
        each
        for each in derive(log, minutes=_given_minutes(overrides))
        if not any(is_given(key, overrides) for key in (each.key, *REPLACED_BY.get(each.key, ())))
    )
    return LogSettings(_with_encoder(_encoder(log, overrides), derived, overrides), derived)


def _encoder(log: LogShape, overrides: Sequence[str]) -> str:
    """The encoder whose recipe the settings begin with: the user's if it is one of ENCODERS, else that for the log. One
    from outside begins with the same settings on every log."""
    if is_given("model.encoder", overrides):
        return ENCODERS[0]
    given = [text.partition("=")[2].strip().strip("\"'") for text in overrides if is_given("model", [text])]
    return given[-1] if given and given[-1] in ENCODERS else log.encoder


def _with_encoder(name: str, derived: Sequence[Derived], overrides: Sequence[str]) -> Settings:
    """The recipe `default` with the encoder and the objective of another recipe. HSTU does not read the
    time of the target, which no other encoder reads."""
    tables = read_recipe(DEFAULT_RECIPE)
    if name != tables["model"]["kind"]:
        tables |= {part: read_recipe(name)[part] for part in ("model", "objective")}
    own = ["model.target_time=false"] if name == "hstu" else []
    left_out = ("model",) if name == ENCODERS[0] else ("model", "model.members", "model.width")
    return make_settings(tables, [*(each.override for each in derived if each.key not in left_out), *own, *overrides])


def _given_minutes(overrides: Sequence[str]) -> float | None:
    """The user's train.minutes, if any; what is no number is refused later."""
    values = [text.partition("=")[2] for text in overrides if is_given("train.minutes", [text])]
    try:
        return float(values[-1]) or None if values else None
    except ValueError:
        return None


def is_given(key: str, overrides: Sequence[str]) -> bool:
    """Whether the user set a key."""
    return any(text.partition("=")[0].strip() in (key, f"{key}.{KIND}") for text in overrides)


def candidates(chosen: LogSettings, overrides: Sequence[str], *, timed: bool) -> dict[str, Settings]:
    """The settings to try, by the name of the encoder: the chosen ones first, then those of other encoders with the
    same derived values. `timed`: whether the log has times. If the user chose an encoder, there are no others."""
    own = {kind_of(chosen.settings.model): chosen.settings}
    if is_given("model", overrides) or is_given("model.encoder", overrides):
        return own
    for name in ENCODERS if timed else ENCODERS[:-1]:
        if name not in own:
            with suppress(SettingsError):  # of an override that this encoder does not have
                own[name] = _with_encoder(name, chosen.derived, overrides)
    return own


def derive(log: LogShape, *, minutes: float | None = None) -> list[Derived]:
    """The settings for a log, the reason of each in a few words. `minutes`: the user's limit; None is that for the
    log."""
    minutes = minutes or log.minutes
    covering = float(np.percentile(log.lengths, COVERED)) if len(log.lengths) else 1.0
    length = next((length for length in LENGTHS if covering <= length), LENGTHS[-1])
    batch = int(min(MOST_BATCH, max(LEAST_BATCH, log.targets / STEPS_OF_EPOCH)))
    epoch = min(LONG_EPOCH, max(SHORT_EPOCH, log.targets))
    epochs = max(1, round(PASSES * max(log.targets, SHORT_EPOCH) / epoch))
    often = f"{log.per_item:,.0f} training events an item: {'dense' if log.dense else 'sparse'}"
    passes = epochs * epoch / max(1, log.targets)
    return [
        Derived("model", log.encoder, often),
        *_members(log, minutes),
        Derived("model.length", length, f"{COVERED} % of the users have at most {covering:,.0f} training events"),
        Derived("model.dropout", 0.3 if log.dense else 0.5, often),
        *_softmax(log, minutes),
        Derived("train.items", "companions" if log.per_item < COMPANIONS else "random", often),
        Derived("train.tokens", batch, f"about {max(1, epoch // batch):,} steps an epoch"),
        Derived("train.epoch_events", 0 if epoch == log.targets else epoch, f"the log has {log.targets:,} targets"),
        Derived("train.epochs", epochs, f"{passes:,.0f} passes over the log, at most"),
        *_cases(log, minutes, min(epochs, PASSES)),
        Derived("train.minutes", log.minutes, f"at most, with the report, for {log.events:,} training events"),
    ]


def _members(log: LogShape, minutes: float) -> list[Derived]:
    """An ensemble of two encoders, each with a softmax over all items, where there is time for both."""
    if log.encoder != ENCODERS[0] or MEMBERS * MEMBER_PASSES * log.full_minutes > minutes:
        return []
    return [
        Derived("model.width", MEMBERS * MEMBER_WIDTH, f"for {MEMBERS} encoders of {MEMBER_WIDTH}"),
        Derived("model.members", MEMBERS, "their scores are added, like those of an ensemble"),
    ]


def _softmax(log: LogShape, minutes: float) -> list[Derived]:
    """The loss and its negatives, if the softmax over all items takes too long."""
    if FULL_PASSES * log.full_minutes <= minutes:
        return []
    reason = f"over all {log.catalogue:,} items a pass takes about {log.full_minutes:,.0f} minutes"
    return [
        Derived("objective.loss", "sampled-softmax", reason),
        Derived("objective.sampler", "uniform", "of the negatives"),
        Derived("objective.sampler.negatives", NEGATIVES, "shared by a batch"),
    ]


def _cases(log: LogShape, minutes: float, validations: int) -> list[Derived]:
    """The validation cases, if all of them take too long."""
    speed = 3 * SOFTMAX_SPEED  # forward only
    affordable = int(VALIDATION * 60 * minutes * speed / (validations * max(1, log.catalogue)))
    cases = max(LEAST_CASES, affordable)
    if cases >= log.cases:
        return []
    return [
        Derived(
            "evaluate.cases", cases, f"of {log.cases:,}, so that validation takes about {VALIDATION:.0%} of the time"
        )
    ]
