"""Requests of a client → whether the next one may pass now, or how long it has to wait."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

from segue.errors import InputError

MAX_CLIENTS = 10_000


class RateLimit:
    """A bucket of tokens a client, filled at `per_second` and holding a second of it, or one; a request takes one.

    For one thread. The clients heard of longest ago are forgotten, which gives them a full bucket.
    """

    def __init__(
        self,
        per_second: float,
        *,
        max_clients: int = MAX_CLIENTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 < per_second < float("inf"):
            raise InputError(
                f"A rate limit is a number of requests a second above 0, got {per_second}; set it with --rate-limit."
            )
        self._rate = per_second
        self._full = max(per_second, 1)
        self._most_clients = max_clients
        self._clock = clock
        self._buckets: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()  # tokens left, and when

    def wait(self, client: Hashable) -> float:
        """Zero if the client's request may pass, which is then counted; else the seconds until one may."""
        now = self._clock()
        tokens, then = self._buckets.pop(client, (self._full, now))
        tokens = min(self._full, tokens + (now - then) * self._rate)
        passes = tokens >= 1
        self._buckets[client] = (tokens - 1 if passes else tokens, now)
        if len(self._buckets) > self._most_clients:
            self._buckets.popitem(last=False)
        return 0.0 if passes else (1 - tokens) / self._rate
