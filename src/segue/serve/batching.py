"""Concurrent requests → work done together, with a bound on what may wait and for how long."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from segue.serve.refusals import OverloadedError

Job = TypeVar("Job")
Result = TypeVar("Result")

Work = Callable[[Sequence[Job]], Awaitable[Sequence[Result | Exception]]]


class Batching(Generic[Job, Result]):
    """Collects jobs while others are being worked on, and then works on all of them at once. For one event loop.

    `work` gives a result for each job, an exception where one failed. A job whose asker has left is not done.
    """

    def __init__(self, work: Work[Job, Result], *, most_waiting: int, most_together: int, wait: float = 0.0) -> None:
        """`wait`: seconds that the first job after a pause waits for others."""
        self.waiting = 0  # asked and not yet answered
        self._work = work
        self._most_waiting = most_waiting
        self._most_together = most_together
        self._wait = wait
        self._jobs: deque[tuple[asyncio.Future[Result], Job]] = deque()
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
            async with asyncio.timeout(deadline):
                return await future
        except BaseException as error:
            with contextlib.suppress(ValueError):  # it was taken
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
            while self._jobs:
                count = min(len(self._jobs), self._most_together)
                taken = [self._jobs.popleft() for _ in range(count)]
                await self._finish([pair for pair in taken if not pair[0].done()])
        finally:
            self._working = None

    async def _finish(self, taken: list[tuple[asyncio.Future[Result], Job]]) -> None:
        if not taken:
            return
        results: Sequence[Result | Exception]
        try:
            results = await self._work([job for _, job in taken])
        except Exception as error:  # noqa: BLE001  # whatever it is, the askers get it
            results = [error] * len(taken)
        for (future, _), result in zip(taken, results, strict=True):
            if future.done():
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)
