"""Jobs done together beside the event loop: all of them, each its own result, bounded in number and in time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from segue.serving.engine.batching import Batcher, BatchFunction, BatchProcessor
from segue.serving.requests import OverloadedError


def doubling(sizes: list[int], gate: asyncio.Event | None = None) -> BatchFunction[int, int]:
    """BatchFunction that doubles numbers, refuses 13, notes how many it got at a time, and may be held at a gate."""

    async def work(jobs: Sequence[int]) -> list[int | Exception]:
        if gate is not None:
            await gate.wait()
        sizes.append(len(jobs))
        return [ValueError("thirteen") if job == 13 else 2 * job for job in jobs]

    return work


async def all_asked(
    batching: Batcher[int, int], jobs: Sequence[int], gate: asyncio.Event, *, deadline: float = 5
) -> list[int | BaseException]:
    """Ask for all, open the gate when they wait, and gather."""
    asked = [asyncio.ensure_future(batching.ask(job, deadline=deadline)) for job in jobs]
    await asyncio.sleep(0.01)
    gate.set()
    return await asyncio.gather(*asked, return_exceptions=True)


def test_jobs_that_wait_are_done_together_and_in_order() -> None:
    sizes: list[int] = []

    async def main() -> list[int | BaseException]:
        gate = asyncio.Event()
        batching = Batcher(BatchProcessor(doubling(sizes, gate), most=8), most_waiting=100)
        results = await all_asked(batching, range(21), gate)
        assert batching.waiting == 0
        return results

    results = asyncio.run(main())
    assert [result for number, result in enumerate(results) if number != 13] == [2 * n for n in range(21) if n != 13]
    assert isinstance(results[13], ValueError), "a job that fails fails alone"
    assert sizes == [8, 8, 5], "those that waited went together, as many as may"


def test_work_that_fails_fails_for_everyone_who_asked() -> None:
    async def broken(jobs: Sequence[int]) -> list[int | Exception]:
        raise KeyError(str(len(jobs)))

    async def main() -> list[int | BaseException]:
        batching = Batcher(BatchProcessor(broken, most=9), most_waiting=9)
        return await asyncio.gather(*(batching.ask(n, deadline=5) for n in range(3)), return_exceptions=True)

    assert [repr(result) for result in asyncio.run(main())] == ["KeyError('3')"] * 3


def test_past_the_bound_a_job_is_refused_at_once() -> None:
    async def main() -> list[int | BaseException]:
        gate = asyncio.Event()
        batching = Batcher(BatchProcessor(doubling([], gate), most=1), most_waiting=3)
        return await all_asked(batching, range(5), gate)

    results = asyncio.run(main())
    assert results[:3] == [0, 2, 4]
    assert [isinstance(result, OverloadedError) and result.reason for result in results[3:]] == ["queue", "queue"]


def test_a_deadline_frees_the_asker_and_the_job_is_not_done() -> None:
    sizes: list[int] = []

    async def main() -> tuple[float, list[str]]:
        gate = asyncio.Event()
        batching = Batcher(BatchProcessor(doubling(sizes, gate), most=1), most_waiting=10)
        began = time.monotonic()
        asked = [batching.ask(number, deadline=0.05) for number in range(3)]
        results = await asyncio.gather(*asked, return_exceptions=True)
        seconds = time.monotonic() - began
        assert not batching._jobs, "what nobody waits for does not pile up"
        gate.set()
        await batching.close()
        return seconds, [result.reason if isinstance(result, OverloadedError) else "answered" for result in results]

    seconds, reasons = asyncio.run(main())
    assert reasons == ["deadline"] * 3
    assert 0.04 < seconds < 2
    assert sizes == [1], "the first was begun; those behind it had left before their turn"


def test_the_first_job_after_a_pause_waits_for_others() -> None:
    sizes: list[int] = []

    async def main() -> None:
        batching = Batcher(BatchProcessor(doubling(sizes), most=10), most_waiting=10, wait=0.05)
        first = asyncio.ensure_future(batching.ask(1, deadline=5))
        await asyncio.sleep(0.01)
        assert await batching.ask(2, deadline=5) == 4
        assert await first == 2

    asyncio.run(main())
    assert sizes == [2]


def test_closing_finishes_what_was_asked_and_refuses_more() -> None:
    async def main() -> list[int]:
        batching = Batcher(BatchProcessor(doubling([]), most=4), most_waiting=100)
        asked = [asyncio.ensure_future(batching.ask(number, deadline=5)) for number in range(20, 50)]
        await asyncio.sleep(0)
        await batching.close()
        with pytest.raises(OverloadedError, match="stopping"):
            await batching.ask(1, deadline=1)
        return await asyncio.gather(*asked)

    assert asyncio.run(main()) == [2 * number for number in range(20, 50)]


class Belt:
    """A worker that takes on jobs while it is at work, up to five, and does two at a time, when it is let."""

    def __init__(self) -> None:
        self.belt: list[int] = []
        self.let = asyncio.Semaphore(0)
        self.broken = False

    def take(self, job: int) -> bool:
        if len(self.belt) == 5:
            return False
        self.belt.append(job)
        return True

    async def done(self) -> list[int | Exception]:
        await self.let.acquire()
        if self.broken:
            self.belt.clear()
            raise KeyError("broken")
        two, self.belt = self.belt[:2], self.belt[2:]
        return [2 * job for job in two]


def test_a_worker_that_can_is_given_jobs_while_it_is_at_work() -> None:
    finished: list[tuple[int, int]] = []

    async def main() -> None:
        belt = Belt()
        batching = Batcher(belt, most_waiting=100, finished=lambda *told: finished.append(told))
        asked = [asyncio.ensure_future(batching.ask(0, deadline=5))]
        await asyncio.sleep(0.01)
        asked += [asyncio.ensure_future(batching.ask(job, deadline=5)) for job in range(1, 8)]
        await asyncio.sleep(0.01)
        assert belt.belt == [0, 1, 2, 3, 4], "all that it takes, though nothing is done yet"
        asked[3].cancel()  # taken on: its result must go to nobody else
        asked[6].cancel()  # not taken on: never done
        for _ in range(4):
            belt.let.release()
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert [result for result in results if not isinstance(result, BaseException)] == [0, 2, 4, 8, 10, 14]
        assert batching.waiting == 0

    asyncio.run(main())
    assert [together for together, _ in finished] == [2, 2, 2, 1], "0 and 1, 2 and 3, 4 and 5, 7"
    assert [waiting for _, waiting in finished] == [5, 3, 1, 0]


def test_a_worker_that_breaks_fails_what_it_took_on_and_goes_on_with_the_rest() -> None:
    async def main() -> None:
        belt = Belt()
        batching = Batcher(belt, most_waiting=100)
        asked = [asyncio.ensure_future(batching.ask(job, deadline=5)) for job in range(7)]
        await asyncio.sleep(0.01)
        belt.broken = True
        belt.let.release()
        broken = await asyncio.gather(*asked[:5], return_exceptions=True)
        assert [repr(result) for result in broken] == ["KeyError('broken')"] * 5
        belt.broken = False
        belt.let.release()
        assert await asyncio.gather(*asked[5:]) == [10, 12]

    asyncio.run(main())
