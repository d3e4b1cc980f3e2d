"""Concurrent requests → batches, with bounds on how many requests wait and for how long."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, Protocol, TypeVar

from segue.serving.requests import OverloadedError

Job = TypeVar("Job")
Result = TypeVar("Result")
JobIn = TypeVar("JobIn", contravariant=True)
ResultOut = TypeVar("ResultOut", covariant=True)

BatchFunction = Callable[[Sequence[Job]], Awaitable[Sequence[Result | Exception]]]


class JobProcessor(Protocol[JobIn, ResultOut]):
    """Processes jobs and returns their results in order."""

    def submit(self, job: JobIn) -> bool:
        """Accept a job; False if it has to wait until earlier jobs are done."""
        ...

    async def results(self) -> Sequence[ResultOut | Exception]:
        """Results of the oldest accepted jobs, at least one, in order; an exception is the result of a failed job.

        Raises if all accepted jobs have failed.
        """
        ...


class BatchProcessor(Generic[Job, Result]):
    """Calls a function with all accepted jobs, and accepts no others until it returns."""

    def __init__(self, function: BatchFunction[Job, Result], *, max_batch: int = 1) -> None:
        self._function = function
        self._max_batch = max_batch
        self._jobs: list[Job] = []
        self._running = False

    def submit(self, job: Job) -> bool:
        if self._running or len(self._jobs) == self._max_batch:
            return False
        self._jobs.append(job)
        return True

    async def results(self) -> Sequence[Result | Exception]:
        jobs, self._jobs, self._running = self._jobs, [], True
        try:
            return await self._function(jobs)
        finally:
            self._running = False


class Batcher(Generic[Job, Result]):
    """A bounded queue before a `JobProcessor`. For one event loop.

    A job whose caller has left before the processor accepted it is not processed.
    """

    def __init__(
        self,
        processor: JobProcessor[Job, Result],
        *,
        max_waiting: int,
        delay: float = 0.0,
        on_results: Callable[[int, int], None] | None = None,
    ) -> None:
        """`delay`: seconds that the first job after a pause waits for others. `on_results` is called with the number
        of results that came together and the number of jobs still waiting."""
        self.waiting = 0  # jobs without a result
        self._processor = processor
        self._max_waiting = max_waiting
        self._delay = delay
        self._on_results = on_results
        self._queue: deque[tuple[asyncio.Future[Result], Job]] = deque()
        self._accepted: deque[asyncio.Future[Result]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._stopping = False

    async def run(self, job: Job, *, deadline: float) -> Result:
        """The job's result. Raises `OverloadedError` after `deadline` seconds, or at once if too many jobs wait."""
        if self._stopping:
            raise OverloadedError("stopping", "The service is stopping; retry in a moment, or use another replica.")
        if self.waiting >= self._max_waiting:
            raise OverloadedError("queue", f"{self.waiting} requests wait already; retry in a moment.")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        self.waiting += 1
        entry = (future, job)
        try:
            self._queue.append(entry)
            if self._task is None:
                self._task = loop.create_task(self._process_queue())
            elif self._accepted:  # otherwise the first jobs are still in their delay
                self._submit()
            async with asyncio.timeout(deadline):
                return await future
        except BaseException as error:
            with contextlib.suppress(ValueError):  # the processor has accepted it
                self._queue.remove(entry)
            if not isinstance(error, TimeoutError):
                raise
            sentence = f"There was no answer within {deadline:g} s; retry in a moment."
            raise OverloadedError("deadline", sentence) from None
        finally:
            self.waiting -= 1

    async def close(self) -> None:
        """Finish the jobs that wait; refuse new ones."""
        self._stopping = True
        if self._task is not None:
            await self._task

    async def _process_queue(self) -> None:
        """Run until no job waits."""
        try:
            if self._delay:
                await asyncio.sleep(self._delay)
            self._submit()
            while self._accepted:
                try:
                    results = await self._processor.results()
                except Exception as error:  # noqa: BLE001  # the callers get it
                    results = [error] * len(self._accepted)
                for result in results:
                    future = self._accepted.popleft()
                    if future.done():
                        continue
                    if isinstance(result, Exception):
                        future.set_exception(result)
                    else:
                        future.set_result(result)
                if self._on_results is not None:
                    self._on_results(len(results), len(self._queue) + len(self._accepted))
                self._submit()
        finally:
            self._task = None

    def _submit(self) -> None:
        while self._queue:
            future, job = self._queue[0]
            if not future.done():
                if not self._processor.submit(job):
                    return
                self._accepted.append(future)
            self._queue.popleft()
