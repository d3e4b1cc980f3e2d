"""Circular routes: the stop after any stop is certain. Stops are numbered from 1, route after route."""

from __future__ import annotations

import itertools

import numpy as np

ROUTES, STOPS = 8, 12
LEAST, MOST = 12, 15  # stops of a user


def drive(route: int, first: int, stops: int) -> list[int]:
    """Stops of a route from `first` on, cyclic."""
    return [STOPS * route + (first + step) % STOPS + 1 for step in range(stops)]


def begins() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(route, first stop) of the users, and those held out."""
    every = list(itertools.product(range(ROUTES), range(STOPS)))
    held_out = set(np.random.default_rng(2).permutation(len(every))[:34].tolist())
    return (
        [begin for index, begin in enumerate(every) if index not in held_out],
        [begin for index, begin in enumerate(every) if index in held_out],
    )


def drives(users: int = 300) -> list[list[int]]:
    """Each user's stops."""
    rng, (used, _) = np.random.default_rng(0), begins()
    return [drive(*used[user % len(used)], int(rng.integers(LEAST, MOST + 1))) for user in range(users)]


def held_out_prefixes() -> list[tuple[list[int], list[int]]]:
    """Histories of two to seven stops from the held-out starts, and the five stops that follow."""
    return [
        (drive(route, first, stops), drive(route, first + stops, 5))
        for (route, first), stops in itertools.product(begins()[1], range(2, 8))
    ]
