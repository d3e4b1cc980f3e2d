"""Logs whose correct answers are known."""

from __future__ import annotations

import numpy as np


def cycle_log(*, users: int = 60, items: int = 12, events: int = 14, seed: int = 5) -> str:
    """A CSV in which every user follows one cycle of items from a random start: the next item is certain."""
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, items, users)
    rows = [
        f"u{user:03},i{(starts[user] + step) % items:02},{1_600_000_000 + 97 * user + 3600 * step}"
        for user in range(users)
        for step in range(events)
    ]
    return "user,item,timestamp\n" + "\n".join(rows) + "\n"


def titled_items(items: int = 12) -> str:
    """A catalogue of the cycle's items: a unique title of two words, and one of three kinds."""
    rows = [f"i{number:02},{title(number)},k{number % 3}" for number in range(items)]
    return "item,title,kind\n" + "\n".join(rows) + "\n"


def title(number: int) -> str:
    """The title of an item of the cycle; a new item with the same title has the same vector."""
    words = ("amber", "birch", "coral", "dune", "ember", "fjord", "glade", "heath", "inlet", "jade", "kelp", "loam")
    return f"{words[number]} {words[(number + 1) % 12]}"
