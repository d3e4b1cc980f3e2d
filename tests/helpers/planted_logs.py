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


def titled_items(items: int = 12) -> str:
    """A catalogue of the cycle's items: a title of two words that no other has together, and one of three kinds."""
    rows = [f"i{number:02},{title(number)},k{number % 3}" for number in range(items)]
    return "item,title,kind\n" + "\n".join(rows) + "\n"


def title(number: int) -> str:
    """Of an item of the cycle; a new item with the same one is known by the same."""
    words = ("amber", "birch", "coral", "dune", "ember", "fjord", "glade", "heath", "inlet", "jade", "kelp", "loam")
    return f"{words[number]} {words[(number + 1) % 12]}"
