"""Logs whose right answers are known."""

from __future__ import annotations

import numpy as np


def cycle_log(*, users: int = 60, items: int = 12, events: int = 14, seed: int = 5) -> str:
    """A CSV in which every user walks round a cycle of items from a place of their own: the next item is certain."""
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, items, users)
    rows = [
        f"u{user:03},i{(starts[user] + step) % items:02},{1_600_000_000 + 97 * user + 3600 * step}"
        for user in range(users)
        for step in range(events)
    ]
    return "user,item,timestamp\n" + "\n".join(rows) + "\n"
