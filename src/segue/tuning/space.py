"""The search space: a small table of settings, reduced to those that make sense for the log and the recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import msgspec

from segue.config.settings import Settings
from segue.data.dataset import Data
from segue.errors import SettingsError, TrainingError
from segue.kinds import KIND, Table, decode, kind_of, override, variants_of
from segue.objective.losses import AnyLossSettings
from segue.objective.losses.sampled import SampledLossSettings
from segue.training.windows import training_windows


class Knob(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The values of one setting: some `choices`, or any number from `low` to `high`."""

    choices: tuple[str | int, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    """Whether values are sampled on a logarithmic scale."""
    losses: tuple[str, ...] = ()
    """The losses that have the setting; empty: all."""


Space = dict[str, Knob]
Values = dict[str, Any]
"""section.key → value, of the knobs that belong to one loss."""

LOSS, SAMPLER, NEGATIVES = "objective.loss", "objective.sampler", "objective.sampler.negatives"
HEADS = ("model.heads", "model.body.heads")
"""Where attention heads are set, in the encoders that have them."""
SAMPLED = ("sampled-softmax", "gbce")
SPACE: Space = {
    LOSS: Knob(choices=("softmax", *SAMPLED)),  # first: whether others belong depends on it
    SAMPLER: Knob(choices=("uniform", "popularity"), losses=SAMPLED),
    NEGATIVES: Knob(choices=(256, 1000, 3000), losses=SAMPLED),
    "model.length": Knob(choices=(20, 50, 100, 200, 400)),
    "model.width": Knob(choices=(32, 64, 96, 128, 192)),
    "model.depth": Knob(choices=(1, 2, 3)),
    **{name: Knob(choices=(1, 2, 4)) for name in HEADS},
    "model.dropout": Knob(low=0.0, high=0.5),
    "train.tokens": Knob(choices=(1000, 2000, 4000, 8000)),
    "train.learning_rate": Knob(low=3e-4, high=5e-3, log=True),
}

MOST_ITEMS_OF_SOFTMAX = 200_000  # beyond, one step over the whole catalogue takes seconds: a trial would be a day
LEAST_STEPS = 10  # an epoch of fewer steps learns too little for epochs to be compared


@dataclass(frozen=True, slots=True)
class LogFacts:
    """The facts that the search space depends on. The test part is not included."""

    items: int
    events: int
    """Training events."""
    longest: int
    """The longest history of a validation query."""


def log_facts(data: Data, recipe: Settings) -> LogFacts:
    """The facts of a log. A log without validation events is refused."""
    cases = data.split.cases("valid", recipe.evaluate.target)
    if not len(cases):
        raise TrainingError(
            "No event is left for validation, which compares the trials; users need at least three events under "
            "--split last."
        )
    windows = training_windows(data.sequences, data.split.train_end, length=data.sequences.n_events)
    return LogFacts(
        items=len(data.vocabulary),
        events=int((windows.ends - windows.starts).sum()),
        longest=int((cases.targets - cases.starts).max()),
    )


def space_for(recipe: Settings, log: LogFacts) -> Space:
    """The part of SPACE that makes sense, widened to hold the recipe itself: it is the first trial.

    A length that covers every history makes longer ones pointless. Negatives are fewer than the items; if even the
    smallest choice is not, scoring all items costs less than sampling, and the space has no sampled loss. For
    a larger catalogue it has, even if the softmax is cheap: negatives also change what is learned, not only the cost.
    """
    own, model = _table(recipe), recipe.model
    covering = min((length for length in _numbers("model.length") if length >= log.longest), default=0)
    fewest = min(_numbers(NEGATIVES))
    sensible: dict[str, Callable[[Any], bool]] = {
        LOSS: lambda loss: fewest < log.items if loss in SAMPLED else log.items <= MOST_ITEMS_OF_SOFTMAX,
        NEGATIVES: lambda count: count < log.items,
        "model.length": lambda length: length < log.longest or (length == covering and model.length < log.longest),
        "model.width": lambda width: _is_accepted(recipe, {"model.width": width}),
        "train.tokens": lambda tokens: tokens * LEAST_STEPS <= log.events,
    }
    space: Space = {}
    for name, knob in SPACE.items():
        is_own = not knob.losses or own[LOSS] in knob.losses
        if is_own and name not in own:
            continue  # the recipe's encoder has no such key
        choices = [value for value in knob.choices if sensible.get(name, _always)(value)]
        space[name] = (
            _widened(knob, choices, own[name]) if is_own else msgspec.structs.replace(knob, choices=tuple(choices))
        )
    widths = space["model.width"].choices
    for name in HEADS:
        if name in space:
            heads = [
                heads
                for heads in space[name].choices
                if all(_is_accepted(recipe, {"model.width": width, name: heads}) for width in widths)
            ]
            space[name] = Knob(choices=tuple(heads))
    losses = [loss for loss in space[LOSS].choices if loss == own[LOSS] or _possible(recipe, space, str(loss))]
    space[LOSS] = Knob(choices=tuple(losses))
    return {name: knob for name, knob in space.items() if _is_open(knob, losses)}


def _numbers(name: str) -> list[int]:
    return [int(value) for value in SPACE[name].choices]


def _always(_: Any) -> bool:
    return True


def _widened(knob: Knob, values: list[Any], own: Any) -> Knob:
    """The knob with these values and the recipe's own."""
    if not knob.choices:
        return msgspec.structs.replace(knob, low=min(knob.low, own), high=max(knob.high, own))
    choices = [*values, own] if own not in values else values
    return msgspec.structs.replace(knob, choices=tuple(choices if isinstance(own, str) else sorted(choices)))


def _possible(recipe: Settings, space: Space, loss: str) -> bool:
    """Whether the settings themselves accept this loss with all that belongs to it, for the recipe's task and model."""
    names = [name for name in belonging(space, loss) if space[name].losses]
    ranges = (space[name].choices or (space[name].low, space[name].high) for name in names)
    return all(
        _is_accepted(recipe, {LOSS: loss, **dict(zip(names, values, strict=True))}) for values in product(*ranges)
    )


def _is_accepted(recipe: Settings, values: Values) -> bool:
    try:
        laid_over(recipe, values)
    except SettingsError:
        return False
    return True


def _is_open(knob: Knob, losses: list[Any]) -> bool:
    """Whether there are values to choose from, or one of the losses needs the knob."""
    if knob.losses:
        return any(loss in losses for loss in knob.losses)
    return len(knob.choices) != 1


def belonging(space: Space, loss: str) -> Iterator[str]:
    """The knobs that a trial with this loss has."""
    return (name for name, knob in space.items() if not knob.losses or loss in knob.losses)


def own_values(recipe: Settings, space: Space) -> Values:
    """The recipe's values of the knobs that its loss has."""
    own = _table(recipe)
    return {name: own[name] for name in belonging(space, kind_of(recipe.objective.loss))}


def rounded(values: Values, own: Values) -> Values:
    """The values with numbers rounded to two digits; the recipe's own stay as they are."""
    return {
        name: float(f"{value:.2g}") if isinstance(value, float) and value != own.get(name) else value
        for name, value in values.items()
    }


def laid_over(recipe: Settings, values: Values) -> Settings:
    """The recipe with these values, checked like all settings."""
    tables = msgspec.to_builtins(recipe)
    if values.get(LOSS, kind_of(recipe.objective.loss)) != kind_of(recipe.objective.loss):
        del tables["objective"]["sampler"]  # another loss starts without the recipe's
    if LOSS in values and not issubclass(variants_of(AnyLossSettings)[values[LOSS]], SampledLossSettings):
        values = {**values, SAMPLER: "none"}
    for name in sorted(values, key=lambda name: name.count(".")):
        tables = override(tables, Settings, name.split("."), values[name])
    return decode(tables, Settings)


def changes(recipe: Settings, values: Values) -> dict[str, tuple[Any, Any]]:
    """section.key → (the recipe's value, this one), where they differ."""
    own = _table(recipe)
    return {name: (own.get(name), value) for name, value in values.items() if value != own.get(name)}


def _table(settings: Settings) -> Values:
    """Every setting as section.key → value; of a choice, its kind."""
    return _flat(msgspec.to_builtins(settings), "")


def _flat(table: Table, path: str) -> Values:
    values: Values = {}
    for key, value in table.items():
        if not isinstance(value, dict):
            values[f"{path}{key}"] = value
            continue
        values |= _flat(value, f"{path}{key}.")
        if KIND in value:
            values[f"{path}{key}"] = value[KIND]
    return values
