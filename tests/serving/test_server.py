"""The real `segue serve`: filled from a log, stopped under load, restarted, with workers and keys."""

from __future__ import annotations

import json
import pickle
import shutil
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from command_line import CommandLine
from running_service import WAIT, Served, serving
from small_service import assert_problem, ids

from segue.errors import StoreError
from segue.recommend.recommender import Recommender
from segue.serving.engine.channel import _framed, _serve_channel
from segue.serving.http import server
from segue.serving.settings import ServiceSettings

SECRET_USER = "nobody-may-read-me"


def in_flight(service: Served, requests: list[tuple[str, dict[str, Any]]]) -> list[socket.socket]:
    """Send requests, each on an accepted connection of its own, and read no answer."""
    host, port = service.url.removeprefix("http://").split(":")
    sockets = []
    for _ in requests:
        connection = socket.create_connection((host, int(port)), timeout=WAIT)
        connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert b"200 OK" in connection.recv(65536)
        sockets.append(connection)
    for connection, (path, body) in zip(sockets, requests, strict=True):
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return sockets


def answer_of(connection: socket.socket) -> bytes:
    with connection:
        answer = b""
        while part := connection.recv(65536):
            answer += part
        return answer


def check_sites(client: httpx.Client) -> None:
    """Only the origin of --cors may send requests."""
    shop = {"origin": "https://shop.example"}
    preflight = {"access-control-request-method": "POST"}
    assert client.options("/events", headers={**shop, **preflight}).status_code == 204
    headers = client.get("/health/live", headers=shop).headers
    assert headers["access-control-allow-origin"] == "https://shop.example"
    elsewhere = {"origin": "https://other.example"}
    assert "access-control-allow-origin" not in client.get("/health/live", headers=elsewhere).headers
    assert_problem(client.post("/events", json={"user": "u", "item": "i01"}, headers=elsewhere), 403, "another site")


def check_limit(client: httpx.Client) -> None:
    """A client above --rate-limit is refused with Retry-After."""
    flood = (client.get("/items?limit=1") for _ in range(500))
    refusal = next(answer for answer in flood if answer.status_code != 200)
    assert_problem(refusal, 429, "wait the seconds in Retry-After")
    assert refusal.headers["retry-after"] == "1"
    assert client.get("/health/live").status_code == 200, "a probe has no rate limit"


# --- two servers over one store: the second resumes where the first ended -------------------------------------------


def test_two_servers_over_one_store(cycle_run: Path, cycle_data: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        shutil.copytree(cycle_run, tmp_path / "runs" / name)
    serve_in_one_process(tmp_path, cycle_run, cycle_data)
    serve_with_two_workers(tmp_path, cycle_data)


def serve_in_one_process(folder: Path, cycle_run: Path, cycle_data: Path) -> None:
    """Fill the store, query, add events, switch, reach the limit, and stop with requests in flight."""
    recommender = Recommender.open(cycle_run)
    options = ("--store", "events.sqlite", "--data", cycle_data, "--runs", folder / "runs")
    limits = ("--cors", "https://shop.example", "--rate-limit", "60")
    with serving(folder / "runs" / "one", *options, *limits, cwd=folder) as service:
        client = service.client
        history = client.get("/users/u007/history").json()["events"]
        assert len(history) == 14, "known users are known"
        expected = recommender.recommend([event["item"] for event in history], k=5).ids
        assert ids(client.get("/users/u007/recommendations?k=5")) == expected

        assert client.get(f"/users/{SECRET_USER}/recommendations").json()["fallback"] == "popularity"
        event = {"user": SECRET_USER, "item": "i03", "id": "first"}
        assert client.post("/events", json=event).json() == {"accepted": 1, "duplicates": 0, "unknown": []}
        new = recommender.recommend(["i03"], k=5).ids
        assert ids(client.get(f"/users/{SECRET_USER}/recommendations?k=5")) == new
        explanation = client.post("/explanations", json={"user": SECRET_USER}).json()
        assert explanation["item"]["id"] == new[0]
        assert_problem(client.get(f"/users/{SECRET_USER}/recommendations?where=x:y"), 400, "no column 'x'")

        assert client.put("/model", json={"run": "two"}).json() == {"active": "two", "previous": "one"}
        assert client.get("/users/u007/recommendations").json()["model"] == "two"
        assert_problem(client.put("/model", json={"run": "../runs/one"}), 409, "no run called")

        check_sites(client)
        response = client.get("/items", headers={"x-request-id": "trace-me"})
        assert response.headers["x-request-id"] == "trace-me"

        check_limit(client)
        time.sleep(1)  # refills the rate limit
        waiting = in_flight(
            service,
            [("/explanations", {"history": [f"i{n % 12:02}" for n in range(9000)]})] * 12
            + [("/events", {"user": SECRET_USER, "item": "i05", "id": f"late {n}"}) for n in range(5)]
            + [("/recommendations", {"history": ["i01"]})] * 5,
        )
        time.sleep(0.05)
        family = service.family()
        service.process.send_signal(signal.SIGTERM)
        answers = [answer_of(connection) for connection in waiting]
        assert [answer.split(b" ")[1] for answer in answers] == [b"200"] * len(waiting)
        service.ended(family)
    lines = service.lines()
    requests = [line for line in lines if line["logger"] == "segue.serving.requests"]
    assert len(requests) > 40
    stopping = next(index for index, line in enumerate(lines) if line["message"] == "Shutting down")
    assert any(line in requests for line in lines[stopping:]), "it was stopped with requests in flight"
    assert all(line["request_id"] and line["route"] and "milliseconds" in line for line in requests)
    assert any(line["request_id"] == "trace-me" and line["route"] == "/items" for line in requests)
    for secret in (SECRET_USER, "u007"):
        assert secret.encode() not in service.errors, "no user's id in the log"
    assert b"840 events of 60 users" in service.errors


def serve_with_two_workers(folder: Path, cycle_data: Path) -> None:
    """The state of the first server is still there; both workers share events, switches and metrics."""
    options = ("--store", "events.sqlite", "--data", cycle_data, "--runs", folder / "runs", "--workers", "2")
    with serving(folder / "runs" / "one", *options, cwd=folder) as service:

        def fresh(method: str, path: str, **body: Any) -> httpx.Response:
            """On a connection of its own, which either worker may take."""
            options: Any = {"trust_env": False, "timeout": WAIT, "verify": False}  # certificates take 50 ms to load
            return httpx.request(method, f"{service.url}{path}", json=body or None, **options)

        ready = fresh("GET", "/health/ready")
        assert ready.status_code == 200
        history = fresh("GET", f"/users/{SECRET_USER}/history").json()["events"]
        assert [event["item"] for event in history] == ["i03"] + ["i05"] * 5, "those acknowledged in the shutdown too"
        assert fresh("GET", "/model").json()["active"] == "two", "the switch is stored"

        with ThreadPoolExecutor(8) as pool:
            new = list(pool.map(lambda n: fresh("POST", "/events", user="shared", item=f"x{n % 10}", id=n), range(40)))
            assert {answer.status_code for answer in new} == {200}
            answers = list(pool.map(lambda _: fresh("GET", "/users/shared/history"), range(20)))
            assert {len(answer.json()["events"]) for answer in answers} == {40}
            again = list(pool.map(lambda n: fresh("POST", "/events", user="shared", item="x", id=n), range(40)))
            assert sum(answer.json()["duplicates"] for answer in again) == 40

            assert fresh("POST", "/model/rollback").json()["active"] == "one"
            limit = time.monotonic() + 5
            while 'name="one"} 2.0' not in (text := fresh("GET", "/metrics").text):
                assert time.monotonic() < limit, f"both workers serve it: {text}"
            answers = list(pool.map(lambda _: fresh("GET", "/users/u/recommendations"), range(8)))
            assert {answer.json()["model"] for answer in answers} == {"one"}
            assert 'segue_events_total{outcome="accepted"} 40.0' in text
            assert 'segue_events_total{outcome="duplicate"} 40.0' in text
        service.stop()
    assert b"has the histories" in service.errors, "the store is filled once"
    assert SECRET_USER.encode() not in service.errors
    assert all(line["level"] != "error" for line in service.lines())


# --- refusals -------------------------------------------------------------------------------------------------------


def test_refusals(line: CommandLine, cycle_run: Path, tmp_path: Path) -> None:
    shutil.copytree(cycle_run, tmp_path / "elsewhere" / cycle_run.name)
    (tmp_path / "empty.toml").write_text("read = []\n")
    line.refuses("serve", cycle_run, "--host", "0.0.0.0", "--port", "0", says=("Without keys", "'0.0.0.0'", "--keys"))
    line.refuses("serve", cycle_run, "--host", "::", "--port", "0", says=("Without keys", "'::'"))
    line.refuses("serve", cycle_run, "--keys", "empty.toml", "--port", "0", says=("empty.toml has no key",))
    line.refuses("serve", cycle_run, "--keys", "none.toml", "--port", "0", says=("none.toml cannot be read",))
    line.refuses("serve", cycle_run, "--runs", "nowhere", "--port", "0", says=("--runs must be a folder",))
    three = [cycle_run] * 3
    line.refuses("serve", *three, "--port", "0", says=("one run to serve, or two", "got 3"))
    for workers in ("1", "2"):
        arguments = ("serve", cycle_run, "--port", "0", "--workers", workers)
        line.refuses(*arguments, "--rate-limit", "0", says=("--rate-limit must be a number", "above 0, got 0"))
        line.refuses(*arguments, "--cors", "shop.example", says=("--cors is a scheme and a host", "'shop.example'"))
        line.refuses(
            *arguments,
            "--log-level",
            "loud",
            says=("--log-level must be one of debug, info, warning, error, got 'loud'",),
        )
    line.refuses("serve", cycle_run, "--data", "nowhere", "--port", "0", says=("nowhere does not exist",))


def test_no_worker_is_started_with_invalid_settings(cycle_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that end are replaced, so one that cannot start would be restarted for ever."""

    def refuse(_: object) -> None:
        raise StoreError("The folder nowhere does not exist.")

    def never(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(server, "EngineProcess", refuse)
    monkeypatch.setattr(server, "Multiprocess", never)
    settings = ServiceSettings(runs=(cycle_run,), store="nowhere/events.sqlite", workers=2)
    with pytest.raises(StoreError, match="nowhere does not exist"):
        server.serve(settings, port=0, started=never)


class UnsendableError(Exception):
    """An error that cannot be sent to another process."""

    def __init__(self) -> None:
        super().__init__("odd")
        self.lock = threading.Lock()


class OddEngine:
    """Its errors and results cannot be pickled."""

    def fails(self) -> None:
        raise UnsendableError

    def gives(self) -> object:
        return threading.Lock()

    def works(self) -> int:
        return 7


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("method", ["fails", "gives"])
def test_an_engine_answers_with_an_error_if_it_cannot_send_a_result(method: str) -> None:
    """Without an answer the caller would wait forever."""
    near, far = socket.socketpair(socket.AF_UNIX)
    near.settimeout(2)
    engine: Any = OddEngine()
    thread = threading.Thread(target=_serve_channel, args=(engine, far, "control"), daemon=True)
    thread.start()

    def call(method: str) -> object:
        near.sendall(_framed(pickle.dumps((method, ()))))
        length = int.from_bytes(near.recv(4, socket.MSG_WAITALL), "big")
        return pickle.loads(near.recv(length, socket.MSG_WAITALL))

    try:
        assert call(method) is not None
        assert call("works") == 7, "the channel still works"
    finally:
        near.close()
        thread.join(5)
        assert not thread.is_alive(), "it ends with its channel"
