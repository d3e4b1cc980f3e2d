"""A client's requests → whether the next one may pass, or how long it must wait."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

from segue.errors import InputError

MAX_CLIENTS = 10_000


class RateLimit:
    """A token bucket for each client, refilled at `per_second`, with room for one second's tokens and at least one.

    For one thread. The least recently active clients are dropped, so their next request meets a full bucket.
    """

    def __init__(
        self,
        per_second: float,
        *,
        max_clients: int = MAX_CLIENTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 < per_second < float("inf"):
            raise InputError(f"--rate-limit must be a number of requests a second above 0, got {per_second}.")
        self._rate = per_second
        self._full = max(per_second, 1)
        self._max_clients = max_clients
        self._clock = clock
        self._buckets: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()  # tokens left, and when

    def wait(self, client: Hashable) -> float:
        """Take a token and return 0; if there is none, return the seconds until there is."""
        now = self._clock()
        tokens, counted = self._buckets.pop(client, (self._full, now))
        tokens = min(self._full, tokens + (now - counted) * self._rate)
        passes = tokens >= 1
        self._buckets[client] = (tokens - 1 if passes else tokens, now)
        if len(self._buckets) > self._max_clients:
            self._buckets.popitem(last=False)
        return 0.0 if passes else (1 - tokens) / self._rate
