"""Concurrent requests → work done together, in one thread beside the event loop, with a bound on what may wait."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, Literal, TypeVar

from segue.errors import SegueError

Job = TypeVar("Job")
Result = TypeVar("Result")

Reason = Literal["queue", "deadline", "stopping"]


class OverloadedError(SegueError):
    """There is more to do than can be done in time; the same request may succeed a little later."""

    def __init__(self, reason: Reason, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


class Batching(Generic[Job, Result]):
    """Collects jobs while the thread is busy, and hands it all of them at once.

    `work` gives a result for each job, an exception where one failed. A job whose asker has left is not done.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[Sequence[Job]], Sequence[Result | Exception]],
        *,
        most_waiting: int,
        most_together: int,
        wait: float = 0.0,
    ) -> None:
        """`wait`: seconds that the first job of a batch waits for others."""
        self.waiting = 0  # asked and not yet answered; touched by the event loop alone
        self._work = work
        self._most_waiting = most_waiting
        self._most_together = most_together
        self._wait = wait
        self._jobs: queue.SimpleQueue[tuple[Job, asyncio.Future[Result]] | None] = queue.SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"segue-{name}", daemon=True)
        self._thread.start()

    async def ask(self, job: Job, *, deadline: float) -> Result:
        """The job's result, within `deadline` seconds; else, or where too many wait already, `OverloadedError`."""
        if self._stopping:
            raise OverloadedError("stopping", "The service is stopping; ask another replica, or again in a moment.")
        if self.waiting >= self._most_waiting:
            raise OverloadedError("queue", f"{self.waiting} requests wait already; ask again in a moment.")
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self.waiting += 1
        try:
            self._jobs.put((job, future))
            async with asyncio.timeout(deadline):
                return await future
        except TimeoutError:
            raise OverloadedError(
                "deadline", f"There was no answer within {deadline:g} s; ask again in a moment."
            ) from None
        finally:
            self.waiting -= 1

    def close(self) -> None:
        """Finish what was asked, then end the thread. Blocks until then."""
        self._stopping = True
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (first := self._jobs.get()) is not None:
            if self._wait and self._jobs.qsize() + 1 < self._most_together:
                time.sleep(self._wait)
            taken, ended = [first], False
            while len(taken) < self._most_together and not self._jobs.empty():
                job = self._jobs.get()
                if job is None:
                    ended = True
                    break
                taken.append(job)
            self._finish([pair for pair in taken if not pair[1].cancelled()])
            if ended:
                return

    def _finish(self, taken: list[tuple[Job, asyncio.Future[Result]]]) -> None:
        if not taken:
            return
        results: Sequence[Result | Exception]
        try:
            results = self._work([job for job, _ in taken])
        except Exception as error:  # noqa: BLE001  # whatever it is, the askers get it
            results = [error] * len(taken)
        futures = [future for _, future in taken]
        with contextlib.suppress(RuntimeError):  # the loop has ended and nobody waits
            futures[0].get_loop().call_soon_threadsafe(_deliver, futures, results)


def _deliver(futures: Sequence[asyncio.Future[Result]], results: Sequence[Result | Exception]) -> None:
    for future, result in zip(futures, results, strict=True):
        if future.done():
            continue
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)


def one_by_one(jobs: Sequence[Callable[[], Result]]) -> list[Result | Exception]:
    """The work of jobs that are calls: one failing does not touch the others."""
    results: list[Result | Exception] = []
    for job in jobs:
        try:
            results.append(job())
        except Exception as error:  # noqa: BLE001  # its asker gets it
            results.append(error)
    return results
