from __future__ import annotations

import asyncio
import io
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import msgspec
import pytest

from bench.serving.latencies import quantile
from bench.serving.load import Job, Kind, Result, content_length, finish, main, planned, start

STALL = 0.5
ANSWERS = {
    "/busy": b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n",
    "/last": b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n",
    "/pieces": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
}


class KnownServer:
    """An HTTP server whose answers depend on the path."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.bodies: list[bytes] = []
        self.arrivals: list[float] = []
        self.connections = 0
        self.most_at_once = 0
        self._at_once = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await self._answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the generator closed the connection
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split(" ")[1]
        self.seen[path] += 1
        self.arrivals.append(time.monotonic())
        if "Content-Length: " in head:
            self.bodies.append(await reader.readexactly(int(head.split("Content-Length: ")[1].split("\r\n")[0])))
        if path == "/stall" and self.seen[path] == 100:
            time.sleep(STALL)  # blocks every answer
        if path == "/slow":
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            await asyncio.sleep(0.05)
            self._at_once -= 1
        if path == "/lost":
            return False
        if path == "/never":
            await asyncio.sleep(60)
        if path in ANSWERS:
            writer.write(ANSWERS[path])
            return path != "/last"
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Le")  # in pieces, as a network may deliver it
        await asyncio.sleep(0.001)
        writer.write(b"ngth: 4\r\n\r\nab")
        await asyncio.sleep(0.001)
        writer.write(b"cd")
        return True


@contextmanager
def listening() -> Iterator[tuple[KnownServer, int]]:
    """A server in its own thread, and its port."""
    known = KnownServer()
    ports: list[int] = []
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    over = asyncio.Event()

    async def serve() -> None:
        server = await asyncio.start_server(known, "127.0.0.1", 0)
        ports.append(server.sockets[0].getsockname()[1])
        ready.set()
        await over.wait()
        server.close()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    ready.wait()
    try:
        yield known, ports[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()


@dataclass(frozen=True)
class Measurement:
    """A job's result and its server."""

    result: Result
    server: KnownServer


def stall(port: int) -> Job:
    return Job(port=port, kinds=[Kind(name="get", paths=["/stall"], rate=200)], seconds=1.5, connections=4)


def mixed(port: int) -> Job:
    kinds = [
        Kind(name="get", paths=["/1", "/busy", "/2"], rate=120),
        Kind(name="post", method="POST", paths=["/events"] * 2, bodies=['{"a": 1}', '{"b": "é"}'], rate=40),
        Kind(name="lost", paths=["/lost"], rate=20),
        Kind(name="last", paths=["/last"], rate=20),
        Kind(name="pieces", paths=["/pieces"], rate=10),
    ]
    return Job(port=port, kinds=kinds, seconds=1.0, warm_up=0.5, connections=16)


def closed(port: int) -> Job:
    return Job(
        port=port, kinds=[Kind(name="get", paths=["/slow"])], seconds=0.8, warm_up=0.2, connections=8, closed=True
    )


def never(port: int) -> Job:
    return Job(port=port, kinds=[Kind(name="get", paths=["/never"], rate=20)], seconds=0.5, connections=2, patience=0.3)


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, Measurement]]:
    """All jobs, concurrently: each has its own generator and server."""
    with ExitStack() as stack:
        jobs = {}
        for make in (stall, mixed, closed, never):
            server, port = stack.enter_context(listening())
            jobs[make.__name__] = start(make(port)), server
        yield {name: Measurement(finish(child), server) for name, (child, server) in jobs.items()}


def test_a_stall_counts_for_every_request_planned_during_it(runs: dict[str, Measurement]) -> None:
    (get,) = runs["stall"].result.kinds
    assert get.requests == 300 and get.statuses == {"200": 300} and get.failed == 0
    assert get.p99 is not None and get.p90 is not None and get.max is not None
    # 100 requests were planned during the stall and waited for its end, 500 ms the first and 5 ms the last;
    # measured from the time of sending, it would be only the four in flight
    assert get.max >= 1000 * STALL * 0.98
    assert get.p99 >= 450
    assert get.p90 >= 330


def test_each_second_is_reported(runs: dict[str, Measurement]) -> None:
    first, second = runs["stall"].result.kinds[0].per_second
    assert (first.ok, second.ok) == (200, 100) and first.failed == second.failed == 0
    assert first.p90 is not None and second.p90 is not None
    assert first.p90 > 200 and first.p90 > second.p90


def test_each_kind_keeps_its_rate_and_the_warm_up_is_left_out(runs: dict[str, Measurement]) -> None:
    result, server = runs["mixed"].result, runs["mixed"].server
    assert {kind.name: kind.requests for kind in result.kinds} == {
        "get": 120,
        "post": 40,
        "lost": 20,
        "last": 20,
        "pieces": 10,
    }
    assert server.arrivals[-1] - server.arrivals[0] >= 0.9 * 1.5  # nothing is sent ahead of its time
    assert server.seen["/1"] == server.seen["/busy"] == server.seen["/2"] == 60  # 1.5 s of 120 a second
    assert Counter(server.bodies) == {b'{"a": 1}': 30, '{"b": "é"}'.encode(): 30}


def test_answers_are_counted_by_status_and_failures_by_reason(runs: dict[str, Measurement]) -> None:
    result, server = runs["mixed"].result, runs["mixed"].server
    get = result.kind("get")
    assert get.statuses == {"200": 80, "503": 40} and get.errors == {} and get.failed == 40
    assert get.per_second[0].ok == 80 and get.per_second[0].failed == 40
    assert result.kind("lost").errors == {"connection lost": 20}
    assert result.kind("lost").p50 is None and result.kind("lost").failed == 20
    assert result.kind("last").statuses == {"200": 20} and result.kind("last").errors == {}
    assert result.kind("pieces").errors == {"unreadable answer": 10}
    assert server.connections == pytest.approx(16 + 30 + 30 + 15, abs=16)  # those closed are replaced


def test_the_generator_reports_its_own_cost(runs: dict[str, Measurement]) -> None:
    result = runs["mixed"].result
    assert 0 < result.cpu_seconds < 1.5
    assert 0 < result.cpu_share <= result.cpu_seconds / 1.4
    assert result.late_p99 is not None and result.late_p99 >= 0


def test_a_closed_loop_sends_a_request_after_each_answer(runs: dict[str, Measurement]) -> None:
    (get,), server = runs["closed"].result.kinds, runs["closed"].server
    assert server.most_at_once == 8
    assert get.p50 is not None and get.p50 >= 50
    assert get.statuses == {"200": get.requests}
    assert 2 * 8 <= get.requests <= 8 * (0.8 / 0.05 + 1)  # an answer takes 50 ms at least
    assert get.answered_a_second == pytest.approx(get.requests / 0.8, abs=8 / 0.8)  # eight cross each end of the window
    assert runs["closed"].result.late_p99 is None


def test_a_request_without_an_answer_is_a_failure(runs: dict[str, Measurement]) -> None:
    (get,), server = runs["never"].result.kinds, runs["never"].server
    assert get.requests == 10 and get.errors == {"unanswered": 10} and get.statuses == {}
    assert server.seen["/never"] == 2  # the other eight got no connection


def test_a_missing_server_is_a_sentence(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as (_, port):
        pass  # closed again
    job = Job(port=port, kinds=[Kind(name="get", paths=["/"], rate=1)], seconds=1)
    monkeypatch.setattr("bench.serving.load.CONNECT_SECONDS", 0.05)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(msgspec.json.encode(job))))
    with pytest.raises(SystemExit, match=f"nothing answers at 127.0.0.1, port {port}"):
        main()
    assert capfd.readouterr().out == ""


def test_the_plan_has_a_constant_rate_and_kinds_alternate() -> None:
    job = Job(port=1, seconds=1, kinds=[Kind(name="a", paths=["/"], rate=4), Kind(name="b", paths=["/"], rate=2)])
    assert planned(job) == [(0.0, 0, 0), (0.25, 0, 1), (0.25, 1, 0), (0.5, 0, 2), (0.75, 0, 3), (0.75, 1, 1)]


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([1.0, 2.0, 3.0, 4.0], 0.5, 2.0), (list(range(1, 101)), 0.99, 99), ([7.0], 0.9, 7.0), ([1.0, 2.0], 1.0, 2.0)],
)
def test_quantiles_are_values_that_occurred(values: list[float], share: float, expected: float) -> None:
    assert quantile(values, share) == expected


def test_no_value_has_no_quantile() -> None:
    assert quantile([], 0.5) is None


@pytest.mark.parametrize(
    ("head", "length"),
    [
        (b"http/1.1 200 ok\r\ncontent-length: 12\r\nserver: x", 12),
        (b"http/1.1 200 ok\r\ncontent-length:7", 7),
        (b"http/1.1 204 no content", 0),
        (b"http/1.1 200 ok\r\ntransfer-encoding: chunked", -1),
    ],
)
def test_the_length_of_an_answer(head: bytes, length: int) -> None:
    assert content_length(head) == length
