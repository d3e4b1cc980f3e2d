"""Jobs done together beside the event loop: all of them, each its own result, bounded in number and in time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from segue.serve.batching import Batching, OverloadedError, one_by_one


def doubling(sizes: list[int], gate: threading.Event | None = None) -> Callable[[Sequence[int]], list[int | Exception]]:
    """Work that doubles numbers, refuses 13, notes how many it got at a time, and may be held at a gate."""

    def work(jobs: Sequence[int]) -> list[int | Exception]:
        if gate is not None:
            gate.wait()
        sizes.append(len(jobs))
        return [ValueError("thirteen") if job == 13 else 2 * job for job in jobs]

    return work


def test_jobs_that_wait_are_done_together_and_in_order() -> None:
    sizes: list[int] = []
    gate = threading.Event()
    batching = Batching("test", doubling(sizes, gate), most_waiting=100, most_together=8)

    async def ask() -> list[int | BaseException]:
        jobs = [asyncio.ensure_future(batching.ask(number, deadline=5)) for number in range(20)]
        await asyncio.sleep(0.05)
        gate.set()
        return await asyncio.gather(*jobs, return_exceptions=True)

    results = asyncio.run(ask())
    batching.close()
    assert [result for number, result in enumerate(results) if number != 13] == [2 * n for n in range(20) if n != 13]
    assert isinstance(results[13], ValueError), "a job that fails fails alone"
    assert sum(sizes) == 20
    assert max(sizes) == 8, "those that waited at the gate went together, as many as may"
    assert len(sizes) <= 4
    assert batching.waiting == 0


def test_past_the_bound_a_job_is_refused_at_once() -> None:
    gate = threading.Event()
    batching = Batching("test", doubling([], gate), most_waiting=3, most_together=1)

    async def ask() -> list[int | BaseException]:
        jobs = [asyncio.ensure_future(batching.ask(number, deadline=5)) for number in range(5)]
        await asyncio.sleep(0.01)
        gate.set()
        return await asyncio.gather(*jobs, return_exceptions=True)

    results = asyncio.run(ask())
    batching.close()
    assert results[:3] == [0, 2, 4]
    assert [isinstance(result, OverloadedError) and result.reason for result in results[3:]] == ["queue", "queue"]


def test_a_deadline_frees_the_asker_and_the_job_is_not_done() -> None:
    sizes: list[int] = []
    gate = threading.Event()
    batching = Batching("test", doubling(sizes, gate), most_waiting=10, most_together=1)

    async def ask() -> tuple[float, list[str]]:
        began = time.monotonic()
        jobs = [asyncio.ensure_future(batching.ask(number, deadline=0.05)) for number in range(3)]
        results = await asyncio.gather(*jobs, return_exceptions=True)
        seconds = time.monotonic() - began
        gate.set()
        return seconds, [result.reason if isinstance(result, OverloadedError) else "answered" for result in results]

    seconds, reasons = asyncio.run(ask())
    batching.close()
    assert reasons == ["deadline"] * 3
    assert 0.04 < seconds < 2
    assert len(sizes) <= 1, "the first was begun; those behind it had left before their turn"


def test_closing_finishes_what_was_asked_and_refuses_more() -> None:
    sizes: list[int] = []
    batching = Batching("test", doubling(sizes), most_waiting=100, most_together=4)

    async def ask() -> list[int]:
        jobs = [asyncio.ensure_future(batching.ask(number, deadline=5)) for number in range(30)]
        await asyncio.sleep(0)
        await asyncio.to_thread(batching.close)
        results = await asyncio.gather(*jobs)
        with pytest.raises(OverloadedError, match="stopping"):
            await batching.ask(1, deadline=1)
        return results

    assert asyncio.run(ask()) == [2 * number for number in range(30)]


def test_the_event_loop_goes_on_while_work_is_done() -> None:
    gate = threading.Event()
    batching = Batching("test", doubling([], gate), most_waiting=10, most_together=1)

    async def ask() -> int:
        job = asyncio.ensure_future(batching.ask(1, deadline=5))
        turns = 0
        while turns < 100:
            await asyncio.sleep(0)
            turns += 1
        assert not job.done()
        gate.set()
        await job
        return turns

    assert asyncio.run(ask()) == 100
    batching.close()


def test_calls_one_by_one() -> None:
    def fail() -> int:
        raise KeyError("no")

    first, second, third = one_by_one([lambda: 1, fail, lambda: 3])
    assert (first, third) == (1, 3)
    assert isinstance(second, KeyError)
