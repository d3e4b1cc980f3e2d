"""Three replicas over one PostgreSQL under an open loop, one killed with kill -9 → what was lost, and who noticed it.

    python -m bench replicas --data FOLDER [--seconds 20]

Every client has a plan of its own: three answers, an event, then a look at another replica for that event. It takes the
replicas in turn; one that does not answer it leaves out from then on, and asks the next the same again.
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

from bench.serving.durability import OK, Posted, as_kept, judged, stored
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
LIKE = 1e-5  # between the scores of two replicas
KIND = "bench"  # of the events posted here
FIRST_TIME = 1_750_000_000  # after every event that the users had before
NOTES = (
    "Open loop: each request is planned, and its latency counts from the planned moment to the answer, with all that "
    "was tried before. A fifth of the requests post an event, a fifth look for it at another replica right after.",
    "failed: whatever a replica that was not killed did not answer with a 200. at the killed one: requests that met "
    "its death, and were then answered by another.",
    "missing and twice: acknowledged events, counted in the database. stale: events that another replica did not know "
    f"right after. differing: of {COMPARED} users, those whose answers are not the same on all survivors.",
)

Errand = Literal["answer", "event", "look"]
ROUND: tuple[Errand, ...] = ("answer", "answer", "answer", "event", "look")


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    replicas: int
    rate: float
    seconds: float
    asked: int
    failed: list[str]
    """What went wrong at replicas that were not killed."""
    at_the_killed: int
    """Requests that had to go on to another replica."""
    acknowledged: int
    missing: int
    twice: int
    strange: int
    stale: int
    differing: int
    p50: float
    p90: float
    p99: float
    slowest: float
    """Milliseconds, as the others."""

    @property
    def sound(self) -> bool:
        """Nothing was lost, nobody else noticed, and all of them agree."""
        return not (self.failed or self.missing or self.twice or self.strange or self.stale or self.differing)


class Client(threading.Thread):
    """Does its errands at their moments, and remembers what it was told."""

    def __init__(self, number: int, ports: Sequence[int], moments: Sequence[float], world: World) -> None:
        """`moments`: seconds of the monotonic clock."""
        super().__init__(name=f"client {number}", daemon=True)
        self._number, self._moments, self._world = number, moments, world
        self._chance = random.Random(number)
        self._connections = {port: http.client.HTTPConnection(HOST, port, timeout=30.0) for port in ports}
        first = number % len(ports)
        self._turn = [*ports[first:], *ports[:first]]
        self._made = 0
        self._event: dict[str, Any] = {}
        self.acknowledged: list[Posted] = []
        self.latencies: list[float] = []
        self.broken: list[tuple[int, float, str]] = []  # port, moment, what happened
        self.stale = 0
        self.problem: str | None = None

    def run(self) -> None:
        try:
            for place, moment in enumerate(self._moments):
                time.sleep(max(0.0, moment - time.monotonic()))
                self._go(ROUND[place % len(ROUND)])
                self.latencies.append(1000 * (time.monotonic() - moment))
        except Exception as error:  # noqa: BLE001  # it is told by whoever waits for this thread
            self.problem = f"{type(error).__name__}: {error}"
        finally:
            for connection in self._connections.values():
                connection.close()

    def _go(self, errand: Errand) -> None:
        if errand == "answer":
            self._asked("GET", f"/users/{self._chance.choice(self._world.users)}/recommendations")
        elif errand == "event":
            self._event = self._next_event()
            said = self._asked("POST", "/events", self._event)
            if said["accepted"] + said["duplicates"] != 1:
                raise InputError(f"One event was answered with {said}.")
            self.acknowledged.append(as_kept(self._event))
        else:
            found = self._asked("GET", f"/users/{self._event['user']}/history?limit=1000")["events"]
            self.stale += self._event["value"] not in [event["value"] for event in found]

    def _next_event(self) -> dict[str, Any]:
        """An event unlike any other by its value."""
        number, self._made = 1000 * self._made + self._number, self._made + 1
        return {
            "id": f"replicas-{number}",
            "user": self._chance.choice(self._world.users),
            "item": self._chance.choice(self._world.items),
            "time": FIRST_TIME + number,
            "kind": KIND,
            "value": float(number),
        }

    def _asked(self, method: str, path: str, body: Any = None) -> Any:
        """The answer of the replica whose turn it is, or of the next one that gives any."""
        while self._turn:
            port = self._turn.pop(0)
            try:
                status, said = exchange(self._connections[port], method, path, body)
            except (OSError, http.client.HTTPException) as error:
                self.broken.append((port, time.monotonic(), f"{method}: {type(error).__name__}"))
                continue
            self._turn.append(port)
            if status == OK:
                return said
            self.broken.append((port, time.monotonic(), f"{method}: {status} {said}"))
        raise InputError("No replica is left that answers.")


class World(msgspec.Struct, frozen=True):
    """Whom and what the requests are about."""

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
    """Ask all of the replicas, which run and share `store`; kill the last of them half-way, and count."""
    ports = [server.port for server in servers]
    began = time.monotonic() + 0.5
    moments = [began + place / rate for place in range(round(rate * seconds))]
    crowd = [Client(number, ports, moments[number::clients], world) for number in range(clients)]
    for client in crowd:
        client.start()
    time.sleep(max(0.0, began + seconds / 2 - time.monotonic()))
    killed_at = time.monotonic()
    servers[-1].kill()
    for client in crowd:
        client.join()
    if problem := next((client.problem for client in crowd if client.problem), None):
        raise InputError(problem)
    broken = [each for client in crowd for each in client.broken]
    failed = [what for port, moment, what in broken if port != ports[-1] or moment < killed_at]
    wanted = [event for client in crowd for event in client.acknowledged]
    found = [event for event in stored(store, world.users) if event.row[2] == KIND]
    missing, twice, strange = judged(wanted, found)
    p50, p90, p99, slowest = np.percentile([each for client in crowd for each in client.latencies], [50, 90, 99, 100])
    return Outcome(
        replicas=len(servers),
        rate=rate,
        seconds=seconds,
        asked=len(moments),
        failed=failed,
        at_the_killed=len(broken) - len(failed),
        acknowledged=len(wanted),
        missing=missing,
        twice=twice,
        strange=strange,
        stale=sum(client.stale for client in crowd),
        differing=differing(ports[:-1], world.users[:COMPARED]),
        p50=float(p50),
        p90=float(p90),
        p99=float(p99),
        slowest=float(slowest),
    )


def differing(ports: Sequence[int], users: Sequence[str]) -> int:
    """Of how many users the replicas give different answers."""
    return sum(not _alike([_answer(port, user) for port in ports]) for user in users)


def _answer(port: int, user: str) -> list[tuple[str, float]]:
    status, said = ask(port, "GET", f"/users/{user}/recommendations?k=50")
    if status != OK:
        raise InputError(f"An answer has the status {status}: {said}")
    return [(item["id"], item["score"]) for item in said["items"]]


def _alike(answers: Sequence[list[tuple[str, float]]]) -> bool:
    first = dict(answers[0])
    return all(
        [name for name, _ in each] == list(first) and all(abs(score - first[name]) <= LIKE for name, score in each)
        for each in answers
    )


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench replicas", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="folder with events.tsv.gz")
    parser.add_argument("--run", type=Path, help="a run folder to serve; otherwise one is trained for one epoch, once")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--rate", type=float, default=RATE, help="requests a second, to all replicas together")
    parser.add_argument("--replicas", type=int, default=REPLICAS)
    chosen = parser.parse_args(argv)
    run = chosen.run or trained(chosen.data, "sasrec")
    world = World(users=[f"user-{number}" for number in range(USERS)], items=item_ids(run))
    database = PostgresServer(durable=True)
    try:
        store = database.new_database()
        _say(f"filling a store with {USERS:,} users")
        fill(store, world.items, users=USERS)
        with tempfile.TemporaryDirectory(prefix="segue-bench-") as folder:
            servers = started(run, store, Path(folder), replicas=chosen.replicas)
            try:
                _say(f"{chosen.rate:g} requests a second for {chosen.seconds:g} s …")
                outcome = endure(servers, world, store=store, rate=chosen.rate, seconds=chosen.seconds)
            finally:
                for server in servers:
                    server.kill()
    finally:
        database.close()
    publish("replicas", title=_title(outcome), rows=[_shown(outcome)], notes=NOTES, body=msgspec.to_builtins(outcome))
    if not outcome.sound:
        raise InputError(f"The replicas did not hold: see the table above. {'; '.join(outcome.failed[:3])}")


def started(run: Path, store: str, folder: Path, *options: str, replicas: int = REPLICAS) -> list[Server]:
    """Replicas that are ready, started side by side; `folder` takes their logs."""
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
        "asked": outcome.asked,
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


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
