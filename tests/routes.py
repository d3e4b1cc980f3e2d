"""A log of round routes: after any stop, what comes next is certain."""

from __future__ import annotations

import itertools

import numpy as np

ROUTES, STOPS = 8, 12
LEAST, MOST = 12, 15  # stops of a user


def routes() -> list[list[str]]:
    """Each has stops of its own."""
    drawn = np.random.default_rng(1).permutation(ROUTES * STOPS).reshape(ROUTES, STOPS)
    return [[f"stop {number}" for number in route] for route in drawn.tolist()]


def drive(route: list[str], first: int, stops: int) -> list[str]:
    """From a stop on, round and round."""
    return [route[(first + place) % STOPS] for place in range(stops)]


def begins() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(route, first stop) where users of the log begin, and where nobody does."""
    every = [(route, first) for route in range(ROUTES) for first in range(STOPS)]
    held_out = set(np.random.default_rng(2).permutation(len(every))[:34].tolist())
    return (
        [begin for place, begin in enumerate(every) if place not in held_out],
        [begin for place, begin in enumerate(every) if place in held_out],
    )


def routes_log(users: int = 300) -> str:
    """The users' drives as CSV."""
    rng, lines, (used, _) = np.random.default_rng(0), routes(), begins()
    rows = []
    for user in range(users):
        route, first = used[user % len(used)]
        stops = drive(lines[route], first, int(rng.integers(LEAST, MOST + 1)))
        rows += [f"{user},{stop},{1_600_000_000 + 60 * place}" for place, stop in enumerate(stops)]
    return "user,item,time\n" + "\n".join(rows) + "\n"


def held_out_prefixes() -> list[tuple[list[str], list[str]]]:
    """Histories of two to seven stops that begin where nobody in the log does, and the five stops that come next."""
    lines = routes()
    return [
        (drive(lines[route], first, stops), drive(lines[route], first + stops, 5))
        for (route, first), stops in itertools.product(begins()[1], range(2, 8))
    ]
