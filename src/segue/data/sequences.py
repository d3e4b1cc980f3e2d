"""The events of all users as flat arrays: user u's events, oldest first, are rows offsets[u] .. offsets[u+1]."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """Flat arrays, usually memory maps of a data folder's files."""

    offsets: np.ndarray  # [U + 1] int64
    items: np.ndarray  # [E] int32, 1..n
    times: np.ndarray  # [E] int64, microseconds UTC; an order (0, 1, 2 …) if the log has no dates
    kinds: np.ndarray | None = None  # [E] uint16, indices into the manifest's list of kinds
    values: np.ndarray | None = None  # [E] float32, NaN if the log has none

    @property
    def n_users(self) -> int:
        return len(self.offsets) - 1

    @property
    def n_events(self) -> int:
        return len(self.items)

    def owners(self, rows: np.ndarray) -> np.ndarray:
        """The users of these rows."""
        return np.asarray(np.searchsorted(self.offsets, rows, side="right") - 1)
