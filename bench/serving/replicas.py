"""Three replicas over one PostgreSQL under an open loop, one killed with kill -9 → lost events, failed requests.

    python -m bench replicas --data FOLDER [--seconds 20]

Every client repeats a cycle: three recommendations, an event, then the history of that event's user from another
replica. It uses the replicas in rotation; one that does not answer is left out from then on, and the request goes to
the next.
"""

from __future__ import annotations

import argparse
import http.client
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from bench.serving.durability import OK, Posted, count_faults, posted_event, stored
from bench.serving.postgres import PostgresServer
from bench.serving.serve import fill, item_ids, trained
from bench.serving.server import HOST, Server, ask, exchange, free_port
from bench.tables import publish
from segue.errors import InputError

REPLICAS = 3
RATE = 200  # requests a second, to all of them together
SECONDS = 60.0
CLIENTS = 24
USERS = 2000
COMPARED = 200  # users whose answers are compared afterwards
TOLERANCE = 1e-5  # between the scores of two replicas
KIND = "bench"  # of the events posted here
FIRST_TIME = 1_750_000_000  # after every event that the users had before
NOTES = (
    "Open loop: each request is planned, and its latency counts from the planned time to the answer, failed attempts "
    "included. A fifth of the requests post an event, a fifth read it from another replica right after.",
    "failed: requests that a surviving replica did not answer with a 200. at the killed one: requests that failed "
    "there and were then answered by another.",
    "missing and twice: acknowledged events, counted in the database. stale: events that another replica did not "
    f"return right after. differing: of {COMPARED} users, those with different answers of the surviving replicas.",
)

Request = Literal["recommend", "post", "read"]
CYCLE: tuple[Request, ...] = ("recommend", "recommend", "recommend", "post", "read")


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of one run."""

    replicas: int
    rate: float
    seconds: float
    requests: int
    failed: list[str]
    """Failures at replicas that were not killed."""
    at_the_killed: int
    """Requests that were repeated at another replica."""
    acknowledged: int
    missing: int
    twice: int
    unknown: int
    stale: int
    differing: int
    p50: float
    p90: float
    p99: float
    slowest: float
    """In milliseconds, like the other latencies."""

    @property
    def sound(self) -> bool:
        """Whether nothing was lost, no other request failed, and all replicas agree."""
        return not (self.failed or self.missing or self.twice or self.unknown or self.stale or self.differing)


class Client(threading.Thread):
    """Sends its requests at their times and collects the acknowledged events."""

    def __init__(self, number: int, ports: Sequence[int], times: Sequence[float], world: World) -> None:
        """`times`: seconds of the monotonic clock."""
        super().__init__(name=f"client {number}", daemon=True)
        self._number, self._times, self._world = number, times, world
        self._chance = random.Random(number)
        self._connections = {port: http.client.HTTPConnection(HOST, port, timeout=30.0) for port in ports}
        first = number % len(ports)
        self._rotation = [*ports[first:], *ports[:first]]
        self._count = 0
        self._event: dict[str, Any] = {}
        self.acknowledged: list[Posted] = []
        self.latencies: list[float] = []
        self.broken: list[tuple[int, float, str]] = []  # port, time, what happened
        self.stale = 0
        self.problem: str | None = None

    def run(self) -> None:
        try:
            for number, due in enumerate(self._times):
                time.sleep(max(0.0, due - time.monotonic()))
                self._send(CYCLE[number % len(CYCLE)])
                self.latencies.append(1000 * (time.monotonic() - due))
        except Exception as error:  # noqa: BLE001  # the caller of `join` raises it
            self.problem = f"{type(error).__name__}: {error}"
        finally:
            for connection in self._connections.values():
                connection.close()

    def _send(self, request: Request) -> None:
        if request == "recommend":
            self._answered("GET", f"/users/{self._chance.choice(self._world.users)}/recommendations")
        elif request == "post":
            self._event = self._next_event()
            answer = self._answered("POST", "/events", self._event)
            if answer["accepted"] + answer["duplicates"] != 1:
                raise InputError(f"Expected one event accepted or known, got {answer}.")
            self.acknowledged.append(posted_event(self._event))
        else:
            events = self._answered("GET", f"/users/{self._event['user']}/history?limit=1000")["events"]
            self.stale += self._event["value"] not in [event["value"] for event in events]

    def _next_event(self) -> dict[str, Any]:
        """An event with a value of its own."""
        number, self._count = 1000 * self._count + self._number, self._count + 1
        return {
            "id": f"replicas-{number}",
            "user": self._chance.choice(self._world.users),
            "item": self._chance.choice(self._world.items),
            "time": FIRST_TIME + number,
            "kind": KIND,
            "value": float(number),
        }

    def _answered(self, method: str, path: str, body: Any = None) -> Any:
        """The answer of the next replica in the rotation, or of the first one after it that answers."""
        while self._rotation:
            port = self._rotation.pop(0)
            try:
                status, answer = exchange(self._connections[port], method, path, body)
            except (OSError, http.client.HTTPException) as error:
                self.broken.append((port, time.monotonic(), f"{method}: {type(error).__name__}"))
                continue
            self._rotation.append(port)
            if status == OK:
                return answer
            self.broken.append((port, time.monotonic(), f"{method}: {status} {answer}"))
        raise InputError("No replica is left that answers.")


class World(msgspec.Struct, frozen=True):
    """The users and items of the requests."""

    users: list[str]
    items: list[str]


def endure(
    servers: Sequence[Server],
    world: World,
    *,
    store: str,
    rate: float = RATE,
    seconds: float = SECONDS,
    clients: int = CLIENTS,
) -> Outcome:
    """Send requests to all replicas over `store`, kill the last one half-way, and count."""
    ports = [server.port for server in servers]
    start = time.monotonic() + 0.5
    times = [start + number / rate for number in range(round(rate * seconds))]
    threads = [Client(number, ports, times[number::clients], world) for number in range(clients)]
    for client in threads:
        client.start()
    time.sleep(max(0.0, start + seconds / 2 - time.monotonic()))
    killed_at = time.monotonic()
    servers[-1].kill()
    for client in threads:
        client.join()
    if problem := next((client.problem for client in threads if client.problem), None):
        raise InputError(problem)
    failures = [each for client in threads for each in client.broken]
    failed_requests = [what for port, at, what in failures if port != ports[-1] or at < killed_at]
    acknowledged = [event for client in threads for event in client.acknowledged]
    rows = [event for event in stored(store, world.users) if event.row[2] == KIND]
    missing, twice, unknown = count_faults(acknowledged, rows)
    p50, p90, p99, slowest = np.percentile([each for client in threads for each in client.latencies], [50, 90, 99, 100])
    return Outcome(
        replicas=len(servers),
        rate=rate,
        seconds=seconds,
        requests=len(times),
        failed=failed_requests,
        at_the_killed=len(failures) - len(failed_requests),
        acknowledged=len(acknowledged),
        missing=missing,
        twice=twice,
        unknown=unknown,
        stale=sum(client.stale for client in threads),
        differing=differing(ports[:-1], world.users[:COMPARED]),
        p50=float(p50),
        p90=float(p90),
        p99=float(p99),
        slowest=float(slowest),
    )


def differing(ports: Sequence[int], users: Sequence[str]) -> int:
    """Count the users whose answers differ between replicas."""
    return sum(not _alike([_answer(port, user) for port in ports]) for user in users)


def _answer(port: int, user: str) -> list[tuple[str, float]]:
    status, answer = ask(port, "GET", f"/users/{user}/recommendations?k=50")
    if status != OK:
        raise InputError(f"Expected status 200, got {status}: {answer}")
    return [(item["id"], item["score"]) for item in answer["items"]]


def _alike(answers: Sequence[list[tuple[str, float]]]) -> bool:
    first = dict(answers[0])
    return all(
        [name for name, _ in each] == list(first) and all(abs(score - first[name]) <= TOLERANCE for name, score in each)
        for each in answers
    )


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench replicas", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="folder with events.tsv.gz")
    parser.add_argument("--run", type=Path, help="a run folder to serve; otherwise one is trained for one epoch, once")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--rate", type=float, default=RATE, help="requests a second, to all replicas together")
    parser.add_argument("--replicas", type=int, default=REPLICAS)
    arguments = parser.parse_args(argv)
    run = arguments.run or trained(arguments.data, "sasrec")
    world = World(users=[f"user-{number}" for number in range(USERS)], items=item_ids(run))
    database = PostgresServer(durable=True)
    try:
        store = database.new_database()
        _log(f"filling a store with {USERS:,} users")
        fill(store, world.items, users=USERS)
        with tempfile.TemporaryDirectory(prefix="segue-bench-") as folder:
            servers = started(run, store, Path(folder), replicas=arguments.replicas)
            try:
                _log(f"{arguments.rate:g} requests a second for {arguments.seconds:g} s …")
                outcome = endure(servers, world, store=store, rate=arguments.rate, seconds=arguments.seconds)
            finally:
                for server in servers:
                    server.kill()
    finally:
        database.close()
    publish("replicas", title=_title(outcome), rows=[_shown(outcome)], notes=NOTES, body=msgspec.to_builtins(outcome))
    if not outcome.sound:
        raise InputError(f"Requests failed or events were lost: see the table above. {'; '.join(outcome.failed[:3])}")


def started(run: Path, store: str, folder: Path, *options: str, replicas: int = REPLICAS) -> list[Server]:
    """Start replicas, wait until they are ready, and write their logs to `folder`."""
    servers = [
        Server([str(run), "--store", store, *options], port=free_port(), log=folder / f"replica-{number}.log")
        for number in range(replicas)
    ]
    try:
        for server in servers:
            server.wait_ready()
    except BaseException:
        for server in servers:
            server.kill()
        raise
    return servers


def _title(outcome: Outcome) -> str:
    return (
        f"{outcome.replicas} replicas over one PostgreSQL, {outcome.rate:g} requests a second in all for "
        f"{outcome.seconds:g} s, one killed half-way"
    )


def _shown(outcome: Outcome) -> dict[str, Any]:
    return {
        "requests": outcome.requests,
        "failed": len(outcome.failed),
        "at the killed one": outcome.at_the_killed,
        "acknowledged": outcome.acknowledged,
        "missing": outcome.missing,
        "twice": outcome.twice,
        "stale": outcome.stale,
        "differing": outcome.differing,
        "p50 ms": outcome.p50,
        "p90 ms": outcome.p90,
        "p99 ms": outcome.p99,
        "slowest ms": outcome.slowest,
    }


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
