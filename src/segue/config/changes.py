"""Which settings may differ from those that a training began with."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from segue.config.settings import Settings
from segue.errors import SettingsError
from segue.kinds import KIND, Table

CHANGEABLE = (
    "train.epochs",
    "train.minutes",
    "train.patience",
    "train.learning_rate",
    "train.threads",
    "train.device",
)
"""Keys that may differ when training resumes."""
MEASURED = ("evaluate.cases", "evaluate.days", "evaluate.seen", "evaluate.target")
"""Keys by which the best epoch is chosen: all epochs must be measured alike."""


def changed_keys(before: Table, after: Table, path: str = "") -> Iterator[str]:
    """The keys whose values differ; a choice whose kind differs is one key."""
    for key in before:
        name = f"{path}{key}"
        old, new = before[key], after.get(key)
        if isinstance(old, dict) and isinstance(new, dict) and old.get(KIND) == new.get(KIND):
            yield from changed_keys(old, new, f"{name}.")
        elif old != new:
            yield name


def refuse_changes(saved: Settings, new: Settings) -> None:
    """Refuse to resume training with other settings than it began with, except CHANGEABLE ones."""
    changed = [
        name
        for name in changed_keys(msgspec.to_builtins(saved), msgspec.to_builtins(new))
        if (name.partition(".")[0] not in ("about", "counts", "evaluate", "index") or name in MEASURED)
        and name not in CHANGEABLE
    ]
    if changed:
        raise SettingsError(
            f"--resume cannot change {', '.join(changed)}: the run began with other values. "
            f"It can change {', '.join(CHANGEABLE)}; otherwise train anew into another folder."
        )


def refuse_another_model(saved: Settings, new: Settings, *, whose: str) -> None:
    """Refuse to transfer weights to a model of other settings; `whose` names the run that has them."""
    changed = list(changed_keys(msgspec.to_builtins(saved.model), msgspec.to_builtins(new.model), "model."))
    if changed:
        raise SettingsError(
            f"--from cannot change {', '.join(changed)}: the weights of {whose} fit no other model. Leave it as it is "
            "there, or train anew without --from."
        )
