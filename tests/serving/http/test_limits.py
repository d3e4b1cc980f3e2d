"""The rate limit: a burst, then a steady rate, for each client alone, in bounded memory."""

from __future__ import annotations

import pytest

from segue.errors import InputError
from segue.serving.http.guard import MAX_CLIENTS, RateLimit


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(name="clock")
def stopped_clock() -> Clock:
    return Clock()


def count_passed(limit: RateLimit, client: object, tries: int) -> int:
    return sum(limit.wait(client) == 0 for _ in range(tries))


def test_a_burst_and_then_the_rate(clock: Clock) -> None:
    limit = RateLimit(4, clock=clock)
    assert count_passed(limit, "a", 10) == 4
    assert limit.wait("a") == 0.25
    clock.now += 0.125
    assert limit.wait("a") == 0.125  # a refused request costs nothing
    clock.now += 0.125
    assert count_passed(limit, "a", 2) == 1
    clock.now += 0.5
    assert count_passed(limit, "a", 10) == 2
    clock.now += 3600
    assert count_passed(limit, "a", 10) == 4  # never more than one second's worth


def test_a_rate_below_one_lets_one_pass_at_a_time(clock: Clock) -> None:
    limit = RateLimit(0.25, clock=clock)  # one request a second, shared by four workers
    assert count_passed(limit, "a", 3) == 1
    assert limit.wait("a") == 4
    clock.now += 4
    assert count_passed(limit, "a", 3) == 1


def test_each_client_has_its_own_limit(clock: Clock) -> None:
    limit = RateLimit(2, clock=clock)
    assert [count_passed(limit, client, 5) for client in ("a", "b", 1, None)] == [2, 2, 2, 2]


def test_memory_is_bounded_and_the_oldest_clients_are_dropped(clock: Clock) -> None:
    limit = RateLimit(1, max_clients=3, clock=clock)
    for client in ("a", "b", "c", "a", "d"):  # d replaces b, the least recently active
        limit.wait(client)
    assert [client for client in ("a", "c", "d") if limit.wait(client) == 0] == []
    assert limit.wait("b") == 0
    assert len(limit._buckets) == 3


def test_ten_thousand_clients_by_default(clock: Clock) -> None:
    limit = RateLimit(1, clock=clock)
    for client in range(MAX_CLIENTS + 50):
        limit.wait(client)
    assert len(limit._buckets) == MAX_CLIENTS == 10_000


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf")])
def test_a_rate_of_zero_or_less_is_refused(rate: float) -> None:
    with pytest.raises(InputError, match="--rate-limit must be a number of requests a second above 0"):
        RateLimit(rate)
