"""Which events count as answers: all of them, or some kinds, from some value on."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from segue.data.batch import Batch
from segue.errors import SettingsError


class Positive(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Events of one kind, or of a value, that are worth learning to foresee."""

    kind: str | None = None
    """The kind of event; `save` is also every `save@…`. Left out, any."""
    min_value: float | None = None
    """The least value, as of a rating or a duration; an event without one has none. Left out, any."""

    def __post_init__(self) -> None:
        if self.kind is None and self.min_value is None:
            raise SettingsError(
                "An entry of objective.task.positive says which events count, by kind, min_value or both, got neither; "
                "where every event counts, leave objective.task.positive out."
            )
        if self.min_value is not None and not math.isfinite(self.min_value):
            raise SettingsError(f"objective.task.positive: min_value must be a finite number, got {self.min_value}.")


class PositiveEvents:
    """Tells which events of a batch are positive; no entries mean that every event is."""

    def __init__(self, entries: Sequence[Positive], kinds: Sequence[str]) -> None:
        """`kinds` are the names of the log's kinds of events, by number."""
        self._entries = [(_matching(entry.kind, kinds), entry.min_value) for entry in entries]

    def refuse_without_values(self, values: np.ndarray | None) -> None:
        """Refuse a log without values where some are asked for."""
        bounds = [least for _, least in self._entries if least is not None]
        if values is None and bounds:
            raise SettingsError(
                f"objective.task.positive asks for values of at least {bounds[0]}, and the log has no values: leave "
                "min_value out, or name the column with `segue prepare --value`."
            )

    def __call__(self, batch: Batch) -> np.ndarray:
        """A mask of the tokens [T]."""
        self.refuse_without_values(batch.values)
        found = np.full(len(batch.items), not self._entries)
        for matching, least in self._entries:
            meant = np.ones(len(batch.items), dtype=bool)
            if matching is not None:
                assert batch.kinds is not None, "the names of kinds are those of this log"
                meant &= matching[batch.kinds]
            if least is not None and batch.values is not None:
                meant &= batch.values >= np.float32(least)  # NaN, no value, is none
            found |= meant
        return found


def _matching(kind: str | None, kinds: Sequence[str]) -> np.ndarray | None:
    """Which numbers of kinds are meant [kinds] bool; None where any is."""
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
