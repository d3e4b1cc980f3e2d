"""Concurrent requests → work done together, with a bound on what may wait and for how long."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, Protocol, TypeVar

from segue.serving.requests import OverloadedError

Job = TypeVar("Job")
Result = TypeVar("Result")
Taken = TypeVar("Taken", contravariant=True)
Made = TypeVar("Made", covariant=True)

BatchFunction = Callable[[Sequence[Job]], Awaitable[Sequence[Result | Exception]]]


class JobProcessor(Protocol[Taken, Made]):
    """Whoever does the jobs."""

    def take(self, job: Taken) -> bool:
        """Take a job on; False where it has to wait until others are done."""
        ...

    async def done(self) -> Sequence[Made | Exception]:
        """Results of the jobs taken on first, of at least one, in their order; an exception where one failed. Raises
        where all that were taken on have failed."""
        ...


class BatchProcessor(Generic[Job, Result]):
    """A worker that does all it was given at once, and takes on nothing else before that is done."""

    def __init__(self, work: BatchFunction[Job, Result], *, most: int = 1) -> None:
        self._work = work
        self._most = most
        self._taken: list[Job] = []
        self._working = False

    def take(self, job: Job) -> bool:
        if self._working or len(self._taken) == self._most:
            return False
        self._taken.append(job)
        return True

    async def done(self) -> Sequence[Result | Exception]:
        jobs, self._taken, self._working = self._taken, [], True
        try:
            return await self._work(jobs)
        finally:
            self._working = False


class Batcher(Generic[Job, Result]):
    """Hands jobs to a worker as it takes them on, and results to those who asked. For one event loop.

    A job whose asker has left before it was taken on is not done.
    """

    def __init__(
        self,
        worker: JobProcessor[Job, Result],
        *,
        most_waiting: int,
        wait: float = 0.0,
        finished: Callable[[int, int], None] | None = None,
    ) -> None:
        """`wait`: seconds that the first job after a pause waits for others. `finished` is told how many jobs were done
        together and how many wait still."""
        self.waiting = 0  # asked and not yet answered
        self._worker = worker
        self._most_waiting = most_waiting
        self._wait = wait
        self._finished = finished
        self._jobs: deque[tuple[asyncio.Future[Result], Job]] = deque()
        self._taken: deque[asyncio.Future[Result]] = deque()
        self._working: asyncio.Task[None] | None = None
        self._stopping = False

    async def ask(self, job: Job, *, deadline: float) -> Result:
        """The job's result, within `deadline` seconds; else, or where too many wait already, `OverloadedError`."""
        if self._stopping:
            raise OverloadedError("stopping", "The service is stopping; ask another replica, or again in a moment.")
        if self.waiting >= self._most_waiting:
            raise OverloadedError("queue", f"{self.waiting} requests wait already; ask again in a moment.")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        self.waiting += 1
        waiting = (future, job)
        try:
            self._jobs.append(waiting)
            if self._working is None:
                self._working = loop.create_task(self._work_on())
            elif self._taken:  # else the first ones are still waiting for others
                self._hand_over()
            async with asyncio.timeout(deadline):
                return await future
        except BaseException as error:
            with contextlib.suppress(ValueError):  # it was taken on
                self._jobs.remove(waiting)  # or what nobody waits for would pile up
            if not isinstance(error, TimeoutError):
                raise
            sentence = f"There was no answer within {deadline:g} s; ask again in a moment."
            raise OverloadedError("deadline", sentence) from None
        finally:
            self.waiting -= 1

    async def close(self) -> None:
        """Finish what was asked; nothing more is taken."""
        self._stopping = True
        if self._working is not None:
            await self._working

    async def _work_on(self) -> None:
        """Until nothing waits."""
        try:
            if self._wait:
                await asyncio.sleep(self._wait)
            self._hand_over()
            while self._taken:
                await self._finish()
                self._hand_over()
        finally:
            self._working = None

    def _hand_over(self) -> None:
        while self._jobs:
            future, job = self._jobs[0]
            if not future.done():
                if not self._worker.take(job):
                    return
                self._taken.append(future)
            self._jobs.popleft()

    async def _finish(self) -> None:
        results: Sequence[Result | Exception]
        try:
            results = await self._worker.done()
        except Exception as error:  # noqa: BLE001  # whatever it is, the askers get it
            results = [error] * len(self._taken)
        for result in results:
            future = self._taken.popleft()
            if future.done():
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)
        if self._finished is not None:
            self._finished(len(results), len(self._jobs) + len(self._taken))
