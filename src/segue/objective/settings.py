"""What is learned, in names and numbers. Impossible combinations are refused here."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from segue.errors import SettingsError
from segue.objective.tasks.positive import Positive

SAMPLED = ("sampled-softmax", "bce", "gbce", "bpr", "bpr-max", "top1", "top1-max")
"""Losses that compare an answer with drawn negatives."""
AHEAD = ("dense-all-action", "all-action")
"""Tasks that look so many days ahead."""
ACTIONS = (*AHEAD, "next-action")
"""Tasks that ask for what a user did later, by the clock."""
ANSWERS = ("answers", "answers+uniform")
"""Samplers that draw from the answers of the batch."""


class ObjectiveSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The section `objective` of the settings."""

    task: Literal[
        "next-item", "masked-item", "recency", "continuation", "dense-all-action", "all-action", "next-action"
    ] = "next-item"
    """What is asked of the encoder: at every token, the item that comes next; at masks, the items they hide; after the
    history, some recent items that were taken out of it; after a part of the history, the items that followed, one
    after the other; at every token, one of the positive events in the days after it, drawn anew each epoch; at the
    newest token, all of them; at every token, the first positive event that is later."""
    loss: Literal[
        "softmax", "sampled-softmax", "bce", "gbce", "bpr", "bpr-max", "top1", "top1-max", "lambdarank", "sce"
    ] = "softmax"
    """Over the whole catalogue (softmax, lambdarank), over its hardest items (sce), or over drawn negatives."""
    sampler: Literal["none", "uniform", "popularity", "in-batch", "mixed", "answers", "answers+uniform"] = "none"
    """Where negatives come from: every item alike, by training count to a power, the distinct items of the batch, or
    partly these and partly every item; the answers of the batch as often as they occur, or partly these."""
    negatives: int = 0
    """Negatives of an answer; for `sce`, the items of a bucket."""
    shared: bool = True
    """Whether negatives are drawn once a batch and shared by all of it, or anew for each answer."""
    power: float = 1.0
    """Exponent of the count for the sampler `popularity`; 0 would be `uniform`."""
    in_batch: float = 0.5
    """Share of the batch's items in what the samplers `mixed` and `answers+uniform` draw."""
    log_q: bool = True
    """Whether `sampled-softmax` takes back what the sampler prefers."""
    temperature: float = 1.0
    """What scores are divided by; small (0.05) where model.similarity is `cosine`."""
    calibration: float = 0.75
    """How much of its overconfidence `gbce` gives up: 0 is `bce`, 1 all of it."""
    offset: float = 0.0
    """What `bce` and `gbce` add to every score. With many negatives almost every item is to score far below 0: begin
    there, at the logarithm of 1 / negatives, or a model first learns to refuse everything, and hardly gets over it."""
    regularisation: float = 0.0
    """What `bpr-max` charges for the negatives' squared scores."""
    masked: float = 0.2
    """Share of a user's events that `masked-item` hides."""
    most_masked: int = 40
    """Events of a user that `masked-item` hides at most."""
    last_masked: float = 0.1
    """Share of the users that `masked-item` shows a second time, with only the last event hidden."""
    importance: Literal["exponential", "linear"] = "exponential"
    """How the chance of an event to be taken out by `recency` rises towards the newest."""
    alpha: float = 0.8
    """What an event's importance is multiplied by with each event after it; 1 is all alike."""
    taken: float = 0.2
    """Share of the events before a cut that `recency` draws."""
    cuts: int = 1
    """Moments of a history that `recency` asks about, its end and others drawn at random; or `continuation`, all of
    them drawn."""
    plan: int = 5
    """Items that `continuation` asks for after a cut."""
    days: float = 28.0
    """How far `dense-all-action` and `all-action` look ahead."""
    labels: int = 32
    """Events after the inputs that a training window of `dense-all-action` and `all-action` keeps to ask for; and
    answers of a state, for `all-action`. Of a history longer than a window the newest so many are never inputs."""
    positive: tuple[Positive, ...] = ()
    """The events that `dense-all-action`, `all-action` and `next-action` ask for, such as [{kind = "buy"}, {kind =
    "rate", min_value = 4.0}]; where none is named, all. No positive of a user's training history is drawn as a negative
    of it. They are also what evaluation by window asks for, and validation with evaluate.days; validation and reports
    that ask for the next event ask for every kind."""
    equal_users: bool = False
    """Whether every user weighs the same in an epoch, however many of its states are asked, in however many windows:
    the mean of the users' means."""

    def __post_init__(self) -> None:
        self._check_ranges()
        self._check_negatives()
        self._refuse_without_effect()

    @property
    def samples(self) -> bool:
        """Whether the loss draws negatives."""
        return self.loss in SAMPLED

    def _check_negatives(self) -> None:
        if self.samples and (self.sampler == "none" or self.negatives < 1):
            raise SettingsError(
                f"objective.loss = {self.loss!r} needs objective.sampler ('uniform', 'popularity', 'in-batch', "
                f"'mixed', 'answers' or 'answers+uniform') and objective.negatives of at least 1, got "
                f"{self.sampler!r} and {self.negatives}."
            )
        if self.loss == "sce" and self.task in ACTIONS:
            raise SettingsError(
                f"objective.loss = 'sce' would take the user's other positives, which score high, for its hardest "
                f"negatives: with objective.task = {self.task!r} choose 'softmax' or one of {', '.join(SAMPLED)}."
            )
        if self.loss == "sce" and self.negatives < 1:
            raise SettingsError(
                f"objective.loss = 'sce' needs objective.negatives, the items of a bucket (256 is usual), got "
                f"{self.negatives}."
            )
        if not self.samples and self.sampler != "none":
            raise SettingsError(
                f"objective.loss = {self.loss!r} chooses its items itself and draws none: leave objective.sampler out, "
                f"or choose one of the losses {', '.join(SAMPLED)}."
            )
        if self.loss in ("softmax", "lambdarank") and self.negatives:
            raise SettingsError(
                f"objective.loss = {self.loss!r} looks at every item: leave objective.negatives out, or choose one of "
                f"the losses {', '.join(SAMPLED)}."
            )
        if self.loss == "lambdarank" and self.task != "recency":
            raise SettingsError(
                "objective.loss = 'lambdarank' sorts the whole catalogue for every state asked, which is for "
                f"objective.task = 'recency' and its few states: choose that, or another loss for {self.task!r}."
            )

    def _check_ranges(self) -> None:
        for name, sound, range_ in (
            ("negatives", self.negatives >= 0, "at least 0"),
            ("power", math.isfinite(self.power), "a finite number"),
            ("in_batch", 0 < self.in_batch < 1, "between 0 and 1"),
            ("temperature", 0 < self.temperature < math.inf, "above 0"),
            ("calibration", 0 <= self.calibration <= 1, "in [0, 1]"),
            ("offset", math.isfinite(self.offset), "a finite number"),
            ("regularisation", 0 <= self.regularisation < math.inf, "at least 0"),
            ("masked", 0 < self.masked < 1, "between 0 and 1"),
            ("most_masked", self.most_masked >= 1, "at least 1"),
            ("last_masked", 0 <= self.last_masked <= 1, "in [0, 1]"),
            ("alpha", 0 < self.alpha <= 1, "above 0 and at most 1"),
            ("taken", 0 < self.taken < 1, "between 0 and 1"),
            ("cuts", self.cuts >= 1, "at least 1"),
            ("plan", self.plan >= 1, "at least 1"),
            ("days", LEAST_DAYS <= self.days < math.inf, "a number of at least a second, which is 1 / 86400"),
            ("labels", self.labels >= 1, "at least 1"),
        ):
            if not sound:
                raise SettingsError(f"objective.{name} must be {range_}, got {getattr(self, name)}.")

    def _refuse_without_effect(self) -> None:
        """A key that the chosen task, loss or sampler does not look at."""
        for owner, values, names in (
            ("sampler", ("popularity",), ("power",)),
            ("sampler", ("mixed", "answers+uniform"), ("in_batch",)),
            ("loss", ("sampled-softmax",), ("log_q",)),
            ("loss", ("gbce",), ("calibration",)),
            ("loss", ("bpr-max",), ("regularisation",)),
            ("task", ("masked-item",), ("masked", "most_masked", "last_masked")),
            ("task", ("recency",), ("importance", "alpha", "taken")),
            ("task", ("continuation",), ("plan",)),
            ("task", AHEAD, ("days", "labels")),
            ("task", ACTIONS, ("positive",)),
        ):
            for name in names:
                if getattr(self, owner) not in values and getattr(self, name) != DEFAULTS[name]:
                    chosen = " or ".join(repr(value) for value in values)
                    raise SettingsError(
                        f"objective.{name} belongs to objective.{owner} = {chosen}: leave it out, or choose that."
                    )
        if self.offset and self.loss not in ("bce", "gbce"):
            raise SettingsError("objective.offset belongs to objective.loss = 'bce' or 'gbce': leave it out.")
        if self.cuts != DEFAULTS["cuts"] and self.task not in ("recency", "continuation"):
            raise SettingsError(
                "objective.cuts belongs to objective.task = 'recency' and 'continuation': leave it out, or choose one."
            )
        if self.equal_users and (self.task in ("masked-item", "continuation") or self.loss == "lambdarank"):
            raise SettingsError(
                f"objective.equal_users belongs to tasks that show a user once and losses that weigh questions, and "
                f"objective.task is {self.task!r} and objective.loss {self.loss!r}: leave it out."
            )
        if not self.shared and not self.samples:
            raise SettingsError(f"objective.shared belongs to the losses {', '.join(SAMPLED)}: leave it out.")
        if not self.log_q and self.sampler in ("uniform", "in-batch"):
            raise SettingsError(
                f"objective.log_q changes nothing where objective.sampler is {self.sampler!r}, which draws all alike: "
                "leave it out."
            )
        if self.alpha != DEFAULTS["alpha"] and self.importance == "linear":
            raise SettingsError("objective.alpha belongs to objective.importance = 'exponential': leave it out.")


LEAST_DAYS = 1 / 86400  # times are seconds
DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(ObjectiveSettings)}
