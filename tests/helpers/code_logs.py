"""Small logs from which codes of items are assigned."""

from __future__ import annotations

import numpy as np

from segue.data.sequences import Sequences

N_ITEMS = 40


def log_of(items: list[list[int]]) -> Sequences:
    lengths = [len(user) for user in items]
    return Sequences(
        offsets=np.r_[0, np.cumsum(lengths)],
        items=np.concatenate(items).astype(np.int32),
        times=np.arange(sum(lengths)),
    )


def random_log(users: int = 90, *, n_items: int = N_ITEMS, seed: int = 0) -> Sequences:
    """Histories mostly within one half of the items, popular ones more often, with repeats."""
    rng = np.random.default_rng(seed)
    chances = 1 / np.arange(1, n_items // 2 + 1)
    positions = rng.choice(n_items // 2, (users, 9), p=chances / chances.sum())
    halves = (np.arange(users)[:, None] + (rng.random((users, 9)) < 0.2)) % 2
    return log_of((positions * 2 + halves + 1).tolist())


def log_of_kinds() -> Sequences:
    """Every user has all forty items, ten of a kind in a row: only distance in the sequence separates the kinds."""
    rng = np.random.default_rng(3)
    kinds = np.arange(1, N_ITEMS + 1).reshape(4, 10)
    return log_of(
        [[*np.concatenate([rng.permutation(kind) for kind in rng.permutation(kinds)]), 1, 2] for _ in range(60)]
    )


def common_codes(codes: np.ndarray) -> tuple[float, float]:
    """The share of equal codes of two items of a kind in `log_of_kinds`, and of different kinds."""
    same = np.kron(np.eye(4), np.ones((10, 10))) > 0
    alike = (codes[1:, None] == codes[None, 1:]).mean(2)
    return float(alike[same].mean()), float(alike[~same].mean())
