"""Batches of jobs beside the event loop: each job gets its own result; queue and waiting time are bounded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from segue.serving.engine.batching import Batcher, BatchFunction, BatchProcessor
from segue.serving.requests import OverloadedError


def doubling(sizes: list[int], gate: asyncio.Event | None = None) -> BatchFunction[int, int]:
    """A batch function that doubles numbers, refuses 13, records batch sizes, and may wait for a gate."""

    async def work(jobs: Sequence[int]) -> list[int | Exception]:
        if gate is not None:
            await gate.wait()
        sizes.append(len(jobs))
        return [ValueError("thirteen") if job == 13 else 2 * job for job in jobs]

    return work


async def run_all(
    batcher: Batcher[int, int], jobs: Sequence[int], gate: asyncio.Event, *, deadline: float = 5
) -> list[int | BaseException]:
    """Run all jobs, open the gate once they are queued, and gather the results."""
    runs = [asyncio.ensure_future(batcher.run(job, deadline=deadline)) for job in jobs]
    await asyncio.sleep(0.01)
    gate.set()
    return await asyncio.gather(*runs, return_exceptions=True)


def test_queued_jobs_are_batched_in_order() -> None:
    sizes: list[int] = []

    async def main() -> list[int | BaseException]:
        gate = asyncio.Event()
        batcher = Batcher(BatchProcessor(doubling(sizes, gate), max_batch=8), max_waiting=100)
        results = await run_all(batcher, range(21), gate)
        assert batcher.waiting == 0
        return results

    results = asyncio.run(main())
    assert [result for number, result in enumerate(results) if number != 13] == [2 * n for n in range(21) if n != 13]
    assert isinstance(results[13], ValueError), "one failing job does not fail the others"
    assert sizes == [8, 8, 5], "queued jobs form batches of the largest size"


def test_a_failing_batch_fails_for_every_caller() -> None:
    async def broken(jobs: Sequence[int]) -> list[int | Exception]:
        raise KeyError(str(len(jobs)))

    async def main() -> list[int | BaseException]:
        batcher = Batcher(BatchProcessor(broken, max_batch=9), max_waiting=9)
        return await asyncio.gather(*(batcher.run(n, deadline=5) for n in range(3)), return_exceptions=True)

    assert [repr(result) for result in asyncio.run(main())] == ["KeyError('3')"] * 3


def test_a_full_queue_refuses_a_job_at_once() -> None:
    async def main() -> list[int | BaseException]:
        gate = asyncio.Event()
        batcher = Batcher(BatchProcessor(doubling([], gate), max_batch=1), max_waiting=3)
        return await run_all(batcher, range(5), gate)

    results = asyncio.run(main())
    assert results[:3] == [0, 2, 4]
    assert [isinstance(result, OverloadedError) and result.reason for result in results[3:]] == ["queue", "queue"]


def test_a_job_past_its_deadline_fails_and_is_not_run() -> None:
    sizes: list[int] = []

    async def main() -> tuple[float, list[str]]:
        gate = asyncio.Event()
        batcher = Batcher(BatchProcessor(doubling(sizes, gate), max_batch=1), max_waiting=10)
        start = time.monotonic()
        runs = [batcher.run(number, deadline=0.05) for number in range(3)]
        results = await asyncio.gather(*runs, return_exceptions=True)
        seconds = time.monotonic() - start
        assert not batcher._queue, "abandoned jobs leave the queue"
        gate.set()
        await batcher.close()
        return seconds, [result.reason if isinstance(result, OverloadedError) else "answered" for result in results]

    seconds, reasons = asyncio.run(main())
    assert reasons == ["deadline"] * 3
    assert 0.04 < seconds < 2
    assert sizes == [1], "only the first job ran; the others timed out in the queue"


def test_the_first_job_after_a_pause_waits_for_others() -> None:
    sizes: list[int] = []

    async def main() -> None:
        batcher = Batcher(BatchProcessor(doubling(sizes), max_batch=10), max_waiting=10, delay=0.05)
        first = asyncio.ensure_future(batcher.run(1, deadline=5))
        await asyncio.sleep(0.01)
        assert await batcher.run(2, deadline=5) == 4
        assert await first == 2

    asyncio.run(main())
    assert sizes == [2]


def test_closing_finishes_accepted_jobs_and_refuses_new_ones() -> None:
    async def main() -> list[int]:
        batcher = Batcher(BatchProcessor(doubling([]), max_batch=4), max_waiting=100)
        runs = [asyncio.ensure_future(batcher.run(number, deadline=5)) for number in range(20, 50)]
        await asyncio.sleep(0)
        await batcher.close()
        with pytest.raises(OverloadedError, match="stopping"):
            await batcher.run(1, deadline=1)
        return await asyncio.gather(*runs)

    assert asyncio.run(main()) == [2 * number for number in range(20, 50)]


class Belt:
    """A worker that accepts up to five jobs while it is busy and finishes two at a time when allowed."""

    def __init__(self) -> None:
        self.belt: list[int] = []
        self.let = asyncio.Semaphore(0)
        self.broken = False

    def submit(self, job: int) -> bool:
        if len(self.belt) == 5:
            return False
        self.belt.append(job)
        return True

    async def results(self) -> list[int | Exception]:
        await self.let.acquire()
        if self.broken:
            self.belt.clear()
            raise KeyError("broken")
        two, self.belt = self.belt[:2], self.belt[2:]
        return [2 * job for job in two]


def test_a_pipelined_worker_gets_jobs_while_it_is_busy() -> None:
    batches: list[tuple[int, int]] = []

    async def main() -> None:
        belt = Belt()
        batcher = Batcher(belt, max_waiting=100, on_results=lambda *counts: batches.append(counts))
        runs = [asyncio.ensure_future(batcher.run(0, deadline=5))]
        await asyncio.sleep(0.01)
        runs += [asyncio.ensure_future(batcher.run(job, deadline=5)) for job in range(1, 8)]
        await asyncio.sleep(0.01)
        assert belt.belt == [0, 1, 2, 3, 4], "jobs are sent up to its bound before any result"
        runs[3].cancel()  # accepted: its result must go to no other caller
        runs[6].cancel()  # not accepted: never run
        for _ in range(4):
            belt.let.release()
        results = await asyncio.gather(*runs, return_exceptions=True)
        assert [result for result in results if not isinstance(result, BaseException)] == [0, 2, 4, 8, 10, 14]
        assert batcher.waiting == 0

    asyncio.run(main())
    assert [together for together, _ in batches] == [2, 2, 2, 1], "0 and 1, 2 and 3, 4 and 5, 7"
    assert [waiting for _, waiting in batches] == [5, 3, 1, 0]


def test_a_broken_worker_fails_its_accepted_jobs_and_resumes_with_the_rest() -> None:
    async def main() -> None:
        belt = Belt()
        batcher = Batcher(belt, max_waiting=100)
        runs = [asyncio.ensure_future(batcher.run(job, deadline=5)) for job in range(7)]
        await asyncio.sleep(0.01)
        belt.broken = True
        belt.let.release()
        failures = await asyncio.gather(*runs[:5], return_exceptions=True)
        assert [repr(result) for result in failures] == ["KeyError('broken')"] * 5
        belt.broken = False
        belt.let.release()
        assert await asyncio.gather(*runs[5:]) == [10, 12]

    asyncio.run(main())
