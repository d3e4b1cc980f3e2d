"""Positive events, which may be targets: all events, or those of some kinds or with a least value."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from segue.data.batch import Batch
from segue.errors import SettingsError


class Positive(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Events of one kind, or with a least value, that are targets."""

    kind: str | None = None
    """The kind of event; `save` includes every `save@…`. Left out, any."""
    min_value: float | None = None
    """The least value, such as a rating or a duration; events without a value do not match. Left out, any."""

    def __post_init__(self) -> None:
        if self.kind is None and self.min_value is None:
            raise SettingsError(
                "An entry of objective.task.positive needs kind, min_value or both, got neither; if every event is "
                "positive, leave objective.task.positive out."
            )
        if self.min_value is not None and not math.isfinite(self.min_value):
            raise SettingsError(f"objective.task.positive: min_value must be a finite number, got {self.min_value}.")


class PositiveEvents:
    """Selects the positive events of a batch; without entries, all events."""

    def __init__(self, entries: Sequence[Positive], kinds: Sequence[str]) -> None:
        """`kinds`: the names of the log's event kinds, by number."""
        self._entries = [(_kind_mask(entry.kind, kinds), entry.min_value) for entry in entries]

    def refuse_without_values(self, values: np.ndarray | None) -> None:
        """Raise `SettingsError` if an entry has a min_value and the log has no values."""
        bounds = [least for _, least in self._entries if least is not None]
        if values is None and bounds:
            raise SettingsError(
                f"objective.task.positive needs values of at least {bounds[0]}, and the log has no values: leave "
                "min_value out, or name the column with `segue prepare --value`."
            )

    def __call__(self, batch: Batch) -> np.ndarray:
        """A mask of the tokens [T]."""
        self.refuse_without_values(batch.values)
        positive = np.full(len(batch.items), not self._entries)
        for kind_mask, least in self._entries:
            matches = np.ones(len(batch.items), dtype=bool)
            if kind_mask is not None:
                assert batch.kinds is not None, "the names of kinds are those of this log"
                matches &= kind_mask[batch.kinds]
            if least is not None and batch.values is not None:
                matches &= batch.values >= np.float32(least)  # false for NaN, no value
            positive |= matches
        return positive


ALL_EVENTS = PositiveEvents((), ())


def _kind_mask(kind: str | None, kinds: Sequence[str]) -> np.ndarray | None:
    """A mask of the matching kinds [kinds]; None: any kind."""
    if kind is None:
        return None
    if not kinds:
        raise SettingsError(
            f"objective.task.positive names the kind {kind!r}, and the log has no kinds: leave kind out, or name the "
            "column with `segue prepare --kind`."
        )
    matching = np.array([name == kind or name.startswith(f"{kind}@") for name in kinds])
    if not matching.any():
        raise SettingsError(
            f"objective.task.positive names the kind {kind!r}, which the log does not have; it has {', '.join(kinds)}."
        )
    return matching
