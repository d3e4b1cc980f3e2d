"""A load generator in a process of its own: a job of HTTP requests → the latencies and statuses of each kind.

    python -m bench.serving.load < job.json > result.json

The open loop plans every request before the first is sent, at a constant rate for each kind, and measures from the
planned time: while a slow server keeps every connection busy, the requests queue here, and their waiting counts.
In the closed loop each connection sends the next request as soon as it is answered.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import math
import os
import subprocess
import sys
import tempfile
import time
from array import array
from collections import deque
from pathlib import Path
from typing import cast

import msgspec
import uvloop

from bench.serving.latencies import LOST, UNANSWERED, UNREADABLE, KindResult, Tally, kind_result, quantile

ROOT = Path(__file__).parents[2]
CONNECT_SECONDS = 10.0
RETRY_SECONDS = 0.02  # between two attempts to connect


class Kind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Requests of one kind, sent in the given order and repeated from the first."""

    name: str
    paths: list[str]
    bodies: list[str] = []
    """JSON, one for each path; empty for requests without a body."""
    method: str = "GET"
    rate: float = 0.0
    """Requests a second; unused in a closed loop."""


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to send, where to, and for how long."""

    port: int
    kinds: list[Kind]
    seconds: float
    """Of the measurement, after the warm-up."""
    warm_up: float = 0.0
    connections: int = 128
    closed: bool = False
    host: str = "127.0.0.1"
    patience: float = 10.0
    """Seconds to wait for the last answers."""


class Result(msgspec.Struct, frozen=True):
    """The answers to a job, and the cost of the generator itself."""

    kinds: list[KindResult]
    late_p99: float | None
    """How late after the plan the generator sent its requests, in ms; null in a closed loop."""
    cpu_seconds: float
    cpu_share: float
    """Of one core, warm-up included."""

    def kind(self, name: str) -> KindResult:
        return next(kind for kind in self.kinds if kind.name == name)


class Connection(asyncio.Protocol):
    """One kept-alive connection: at most one request on it at a time."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._transport: asyncio.Transport | None = None
        self._rest = b""
        self.kind = 0
        self.planned = 0.0
        self.busy = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own, which inherits nothing
        self._load.idle(self)

    def send(self, kind: int, planned: float, request: bytes) -> None:
        assert self._transport is not None
        self.kind, self.planned, self.busy = kind, planned, True
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
        end = data.find(b"\r\n\r\n")
        length = -1
        if end >= 0:
            head = data[:end].lower()
            length = content_length(head)
            if length < 0 or not self.busy:
                self._end(UNREADABLE, close=True)
                return
        if end < 0 or len(data) < end + 4 + length:
            self._rest = data
            return
        self._rest = data[end + 4 + length :]
        self._end(int(head[9:12]), close=b"\r\nconnection: close" in head)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if self.busy:
            self.busy = False
            self._load.ended(self, LOST)
        self._load.lost(self)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _end(self, code: int, *, close: bool) -> None:
        was_busy, self.busy = self.busy, False
        if close:
            self.close()
        if was_busy:
            self._load.ended(self, code)
        if not close:
            self._load.idle(self)


def content_length(head: bytes) -> int:
    """The length of the body after a lower-case head; -1 for a chunked answer, which no service here sends."""
    at = head.find(b"\r\ncontent-length:")
    if at < 0:
        return -1 if b"\r\ntransfer-encoding:" in head else 0
    stop = head.find(b"\r\n", at + 17)
    return int(head[at + 17 : stop if stop >= 0 else len(head)])


class Load:
    """A running job: the plan, the idle connections, and the requests that wait for one."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._requests = [built(kind, f"{job.host}:{job.port}") for kind in job.kinds]
        self._plan = [] if job.closed else planned(job)
        self._position = 0
        self._next = [0] * len(job.kinds)  # closed loop: each kind's next request
        self._idle: deque[Connection] = deque()
        self._waiting: deque[tuple[int, float, bytes]] = deque()
        self._connections: set[Connection] = set()
        self._dialling: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._settled = asyncio.Event()
        self._ending = False
        self._open = 0  # requests that are due and have no answer yet
        self.began = math.inf
        self.tallies = [Tally() for _ in job.kinds]
        self.late = array("d")

    async def run(self) -> None:
        """Connect, send everything, wait for the last answers."""
        job = self._job
        async with asyncio.timeout(CONNECT_SECONDS):
            await asyncio.gather(*(self._connect() for _ in range(job.connections)))
        self.began = time.monotonic()
        length = job.warm_up + job.seconds
        if job.closed:
            for _ in range(len(self._idle)):
                self.idle(self._idle.popleft())
            await asyncio.sleep(length)
        else:
            await self._send_plan()
        self._ending = True
        try:
            async with asyncio.timeout(job.patience):
                while self._open:
                    self._settled.clear()
                    await self._settled.wait()
        except TimeoutError:
            self._give_up()
        for task in self._dialling:
            task.cancel()
        for connection in list(self._connections):
            connection.close()
        await asyncio.sleep(0)

    def idle(self, connection: Connection) -> None:
        """Give an idle connection to the request that has waited longest."""
        if self._waiting:
            connection.send(*self._waiting.popleft())
        elif self._job.closed and not self._ending and self.began < math.inf:
            kind = connection.kind
            requests = self._requests[kind]
            number, self._next[kind] = self._next[kind], self._next[kind] + 1
            self._open += 1
            connection.send(kind, time.monotonic(), requests[number % len(requests)])
        else:
            self._idle.append(connection)

    def ended(self, connection: Connection, code: int) -> None:
        self._open -= 1
        self.tallies[connection.kind].add(connection.planned, time.monotonic(), code)
        if self._ending and not self._open:
            self._settled.set()

    def lost(self, connection: Connection) -> None:
        """Replace a closed connection while there are requests to send."""
        self._connections.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        if not self._ending or self._waiting:
            task = self._loop.create_task(self._connect(kind=connection.kind))
            self._dialling.add(task)
            task.add_done_callback(self._dialling.discard)

    async def _connect(self, kind: int | None = None) -> None:
        connection = Connection(self)
        connection.kind = len(self._connections) % len(self._job.kinds) if kind is None else kind
        self._connections.add(connection)
        while True:
            try:
                await self._loop.create_connection(lambda: connection, self._job.host, self._job.port)
            except OSError:
                await asyncio.sleep(RETRY_SECONDS)
            else:
                return

    async def _send_plan(self) -> None:
        finished = asyncio.Event()
        with Alarm() as alarm:

            def due() -> None:
                alarm.read()
                self._send_due()
                if self._position < len(self._plan):
                    alarm.set(self.began + self._plan[self._position][0])
                else:
                    finished.set()

            self._loop.add_reader(alarm.descriptor, due)
            alarm.set(self.began)
            await finished.wait()
            self._loop.remove_reader(alarm.descriptor)

    def _send_due(self) -> None:
        """Send the requests that are due, or queue them."""
        plan, elapsed = self._plan, time.monotonic() - self.began
        while self._position < len(plan) and plan[self._position][0] <= elapsed:
            offset, kind, number = plan[self._position]
            self._position += 1
            self._open += 1
            self.late.append(elapsed - offset)
            requests = self._requests[kind]
            request = kind, self.began + offset, requests[number % len(requests)]
            if self._idle:
                self._idle.popleft().send(*request)  # the one idle longest, so that none is closed for idleness
            else:
                self._waiting.append(request)

    def _give_up(self) -> None:
        now = time.monotonic()
        for kind, planned, _ in self._waiting:
            self.tallies[kind].add(planned, now, UNANSWERED)
        self._waiting.clear()
        for connection in self._connections:
            if connection.busy:
                connection.busy = False
                self.tallies[connection.kind].add(connection.planned, now, UNANSWERED)


class Alarm:
    """A descriptor that becomes readable at a time of the monotonic clock: the loop's own timers have ms only."""

    def __init__(self) -> None:
        self._c = ctypes.CDLL(None, use_errno=True)
        self.descriptor: int = self._c.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self.descriptor < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._setting = (ctypes.c_long * 4)()  # interval in s and ns, which stays zero, then the time in s and ns

    def set(self, at: float) -> None:
        """Become readable at this time, at once if it has passed."""
        whole = int(at)
        self._setting[2], self._setting[3] = whole, int((at - whole) * 1e9)
        if self._c.timerfd_settime(self.descriptor, 1, self._setting, None):  # 1: the time is absolute
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")

    def read(self) -> None:
        """Make it unreadable again."""
        os.read(self.descriptor, 8)

    def __enter__(self) -> Alarm:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)


def built(kind: Kind, host: str) -> list[bytes]:
    """The bytes of each request, built before the measurement."""
    bodies = [body.encode() for body in kind.bodies] or [b""] * len(kind.paths)
    about = "Content-Type: application/json\r\nContent-Length: "
    return [
        f"{kind.method} {path} HTTP/1.1\r\nHost: {host}\r\n".encode()
        + (f"{about}{len(body)}\r\n\r\n".encode() + body if body else b"\r\n")
        for path, body in zip(kind.paths, bodies, strict=True)
    ]


def planned(job: Job) -> list[tuple[float, int, int]]:
    """When each request is due, its kind and its number; kinds of equal rate are due at different times."""
    plan: list[tuple[float, int, int]] = []
    for index, kind in enumerate(job.kinds):
        first = index / len(job.kinds)
        count = round((job.warm_up + job.seconds) * kind.rate)
        plan += [((first + number) / kind.rate, index, number) for number in range(count)]
    return sorted(plan)


def measure(load: Load, job: Job, *, cpu_seconds: float) -> Result:
    """The figures of the requests planned for the measurement."""
    first = load.began + job.warm_up
    kinds = [
        kind_result(kind.name, tally, start=first, seconds=job.seconds)
        for kind, tally in zip(job.kinds, load.tallies, strict=True)
    ]
    late = quantile(sorted(load.late), 0.99)
    return Result(
        kinds=kinds,
        late_p99=None if late is None else 1000 * late,
        cpu_seconds=cpu_seconds,
        cpu_share=cpu_seconds / (time.monotonic() - load.began),
    )


def start(job: Job) -> subprocess.Popen[bytes]:
    """Start the generator in a process of its own; `finish` waits for its result."""
    with tempfile.TemporaryFile() as file:
        file.write(msgspec.json.encode(job))
        file.seek(0)
        return subprocess.Popen(
            [sys.executable, "-m", "bench.serving.load"],
            stdin=file,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )


def finish(child: subprocess.Popen[bytes]) -> Result:
    """Wait for the generator and return its result."""
    output, _ = child.communicate()
    if child.returncode:
        raise SystemExit(f"bench: the load generator failed with exit code {child.returncode}")
    return msgspec.json.decode(output, type=Result)


async def _run(job: Job) -> Result:
    load = Load(job)
    gc.collect()
    gc.disable()  # a collection would be measured as the server's
    used = time.process_time()
    await load.run()
    return measure(load, job, cpu_seconds=time.process_time() - used)


def main() -> None:
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    try:
        result = uvloop.run(_run(job))
    except TimeoutError:
        sys.exit(f"bench: nothing answers at {job.host}, port {job.port}; start the service first.")
    sys.stdout.buffer.write(msgspec.json.encode(result))


if __name__ == "__main__":
    main()
