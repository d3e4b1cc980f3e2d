"""Kinds of events: names outside, numbers inside. The numbers of a run may differ from those of another log."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np


class Kinds:
    """The kinds of events that a run was trained on; an unknown kind has the number after the last."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        """names: by number, as in a data folder; the empty name is that of events without a kind."""
        self.names = tuple(names)
        self._numbers = {name: number for number, name in enumerate(self.names)}

    def __len__(self) -> int:
        return len(self.names)

    def numbers(self, names: Sequence[str | None]) -> np.ndarray:
        """Numbers of kinds [n] int64; None is an event without a kind."""
        numbers = map(self._numbers.get, (name or "" for name in names), itertools.repeat(len(self.names)))
        return np.fromiter(numbers, dtype=np.int64, count=len(names))
