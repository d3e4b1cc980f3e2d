"""Kinds of events by name outside, by number inside; a run's numbers need not be those of another log."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np


class Kinds:
    """The kinds of events that a run was trained on. One that it does not know has a number of its own, after the
    last."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        """`names` by number, as a data folder has them: the empty one is that of events without a kind."""
        self.names = tuple(names)
        self._numbers = {name: number for number, name in enumerate(self.names)}

    def __len__(self) -> int:
        return len(self.names)

    def numbers(self, names: Sequence[str | None]) -> np.ndarray:
        """Numbers of kinds [n] int64; None is that of an event without a kind."""
        found = map(self._numbers.get, (name or "" for name in names), itertools.repeat(len(self.names)))
        return np.fromiter(found, dtype=np.int64, count=len(names))
