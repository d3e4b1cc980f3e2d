"""Latency of `segue serve` under an open loop, with events beside it, after overload and while models are switched.

    python -m bench serve --data FOLDER [--seconds 5]

The command serves from a SQLite store of 20,000 users with 50 events each. The load generator is a process of its own
on the same machine; its CPU is part of the result.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from bench.serving import load
from bench.serving.latencies import OK, KindResult, Second
from bench.serving.server import SEGUE, Server, ask, free_port
from bench.serving.watch import Watch
from bench.tables import publish
from segue.config.recipes import read_recipe
from segue.errors import InputError
from segue.serving.store.store import Event, open_store

USERS = 20_000
EVENTS_A_USER = 50
EVENTS_A_COMMIT = 20_000
FIRST_TIME = 1_700_000_000_000_000
RATE, EVENT_RATE = 1000, 200
SECONDS, WARM_UP = 60.0, 10.0
CLOSED_CONNECTIONS = 256  # of the closed loop
SWITCHES = 3  # pairs of a switch and a rollback
LIMIT_P90, LIMIT_P99, LIMIT_EVENTS_P99 = 10.0, 25.0, 50.0  # ms
LIMIT_GROWTH, LIMIT_RECOVERY = 0.2, 10
IN_A_ROW = 3  # seconds under the limit that make a recovery
MEGABYTE = 1 << 20
LIBRARIES = ("litestar", "uvicorn", "uvloop", "httptools", "msgspec")
SHAPE = ("model.width=64", "model.depth=2", "train.epochs=1")  # of either recipe
NOTES = (
    "Open loop: requests are planned at a constant rate and latency counts from the planned time, waiting for a free "
    "connection included. failed: anything but a 200; in the closed loop a 503 is no failure and is counted apart.",
    "The run was trained for one epoch: the weights do not change the time of an answer. No answer is cached.",
    f"RSS is that of all of the server's processes. Recovered: the first of {IN_A_ROW} seconds in a row with a p90 "
    "under the limit and nothing failed.",
)


@dataclass
class PhaseResult:
    """The rows of one phase for the table, and its details for the file."""

    rows: list[dict[str, Any]]
    detail: dict[str, Any] = field(default_factory=dict)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench serve", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="folder with events.tsv.gz")
    parser.add_argument("--run", type=Path, help="a run folder to serve; otherwise one is trained for one epoch, once")
    parser.add_argument("--recipe", choices=["sasrec", "esasrec"], default="sasrec", help="of the run that is trained")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each measurement")
    parser.add_argument("--warm-up", type=float, help="seconds before it; default: a sixth of them")
    parser.add_argument("--users", type=int, default=USERS)
    parser.add_argument("--connections", type=int, default=128, help="of the open loop")
    parser.add_argument("--workers", type=int, default=1, help="of the server")
    options = parser.parse_args(argv)
    if options.warm_up is None:
        options.warm_up = options.seconds * WARM_UP / SECONDS
    run = options.run or trained(options.data, options.recipe)
    with tempfile.TemporaryDirectory(prefix="segue-bench-") as name:
        folder = Path(name)
        for copy in ("first", "second"):
            shutil.copytree(run, folder / "runs" / copy)
        items = item_ids(run)
        _log(f"filling a store with {options.users:,} users")
        fill(str(folder / "events.db"), items, users=options.users)
        with served(folder, workers=options.workers) as server:
            phases = measure(Bench(server, items, options))
            conditions = _conditions(server, options)
    show(phases, conditions, options)


def trained(data: Path, recipe: str) -> Path:
    """Train a run of width 64 and two blocks on this log; it is kept until the recipe changes."""
    log = data / "events.tsv.gz"
    with log.open("rb") as file:
        of_log = hashlib.file_digest(file, "sha256").hexdigest()[:12]
    of_recipe = hashlib.sha256(msgspec.json.encode(read_recipe(recipe), order="sorted")).hexdigest()[:8]
    cache = Path(tempfile.gettempdir()) / "segue-bench-runs"
    run = cache / f"{of_log}-{recipe}-{of_recipe}-64x2"
    if run.is_dir():
        _log(f"serving the run kept in {run}")
        return run
    cache.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="segue-bench-") as folder:
        _segue("prepare", log, "--out", f"{folder}/data")
        changes = [part for change in SHAPE for part in ("--set", change)]
        _segue("train", f"{folder}/data", "--out", run, "--recipe", recipe, *changes)
    return run


def _segue(*arguments: object) -> None:
    _log(f"segue {arguments[0]} …")
    process = subprocess.run([*SEGUE, *map(str, arguments)], stdout=sys.stderr, check=False)
    if process.returncode:
        raise InputError(f"segue {arguments[0]} failed, so there is no run to serve.")


def item_ids(run: Path) -> list[str]:
    """The ids of the items of a run."""
    from segue.recommend.recommender import Recommender

    ids: list[str] = Recommender.open(run).vocabulary.table["id"].to_list()
    return ids


def fill(url: str, items: Sequence[str], *, users: int) -> None:
    """Write random histories over the whole catalogue, a minute between two events."""
    chance = random.Random(1)
    store = open_store(url)
    try:
        users_a_commit = max(EVENTS_A_COMMIT // EVENTS_A_USER, 1)
        for first in range(0, users, users_a_commit):
            store.append(
                [
                    Event(user=f"user-{user}", item=item, time=FIRST_TIME + 60_000_000 * step)
                    for user in range(first, min(first + users_a_commit, users))
                    for step, item in enumerate(chance.choices(items, k=EVENTS_A_USER))
                ]
            )
    finally:
        store.close()


@contextmanager
def served(folder: Path, *, workers: int) -> Iterator[Server]:
    """The running service over the filled store."""
    runs = folder / "runs"
    arguments = [str(runs / "first"), "--store", str(folder / "events.db"), "--runs", str(runs)]
    server = Server([*arguments, "--workers", str(workers)], port=free_port(), log=folder / "server.log")
    try:
        _log(f"ready after {server.wait_ready():.1f} s")
        yield server
    finally:
        if not server.stop():
            _log("the server did not stop by itself and was killed")


class Bench:
    """The requests of every phase, and the server they go to."""

    def __init__(self, server: Server, items: Sequence[str], options: argparse.Namespace) -> None:
        self.server = server
        self.seconds: float = options.seconds
        self.warm_up: float = options.warm_up
        self._items = items
        self._users: int = options.users
        self._connections: int = options.connections
        self._chance = random.Random(2)
        self._posts = 0

    def gets(self) -> load.Kind:
        count = round(RATE * (self.seconds + self.warm_up))
        paths = [f"/users/user-{self._chance.randrange(self._users)}/recommendations" for _ in range(count)]
        return load.Kind(name="GET", paths=paths, rate=RATE)

    def events(self) -> load.Kind:
        count = round(EVENT_RATE * (self.seconds + self.warm_up))
        bodies = [json.dumps(self._event()) for _ in range(count)]
        return load.Kind(name="POST", method="POST", paths=["/events"] * count, bodies=bodies, rate=EVENT_RATE)

    def _event(self) -> dict[str, str]:
        self._posts += 1
        user = f"user-{self._chance.randrange(self._users)}"
        return {"user": user, "item": self._chance.choice(self._items), "id": f"event-{self._posts}"}

    def open_job(self, *kinds: load.Kind, warm_up: float | None = None) -> load.Job:
        return load.Job(
            port=self.server.port,
            kinds=list(kinds),
            seconds=self.seconds,
            warm_up=self.warm_up if warm_up is None else warm_up,
            connections=self._connections,
        )

    def closed_job(self) -> load.Job:
        kinds = [self.gets()]
        return load.Job(
            port=self.server.port, kinds=kinds, seconds=self.seconds, connections=CLOSED_CONNECTIONS, closed=True
        )


def measure(bench: Bench) -> dict[str, PhaseResult]:
    """The five phases, one after the other, on one server."""
    return {
        "gets": _watched(bench, f"{RATE:,} answers a second", gets_alone),
        "events": _watched(bench, f"with {EVENT_RATE} events a second", gets_and_events),
        "crowd": _watched(bench, f"{CLOSED_CONNECTIONS} in a closed loop", crowd),
        "recovery": _watched(bench, f"right after it, {RATE:,}/s", recovery),
        "swaps": _watched(bench, "while models are switched", swaps),
    }


def _watched(bench: Bench, title: str, phase: Phase) -> PhaseResult:
    """Run a phase and record the CPU and memory of the server's processes."""
    _log(f"{title}, {bench.seconds:g} s …")
    with Watch(bench.server.pid) as watch:
        result = phase(bench, title, watch)
    result.detail |= {"server": watch.usage(), "batch_size": _batch_sizes(bench.server.port)}
    return result


def gets_alone(bench: Bench, title: str, _: Watch) -> PhaseResult:
    result = load.finish(load.start(bench.open_job(bench.gets())))
    return PhaseResult([_row(title, result.kind("GET"))], {"load": _plain(result)})


def gets_and_events(bench: Bench, title: str, _: Watch) -> PhaseResult:
    result = load.finish(load.start(bench.open_job(bench.gets(), bench.events())))
    events = _row("the events themselves", result.kind("POST"), p90=None, p99=LIMIT_EVENTS_P99)
    return PhaseResult([_row(title, result.kind("GET")), events], {"load": _plain(result)})


def crowd(bench: Bench, title: str, watch: Watch) -> PhaseResult:
    """Send more than can be answered: the rest is refused with 503, and memory does not grow."""
    result = load.finish(load.start(bench.closed_job()))
    gets = result.kind("GET")
    busy = gets.statuses.get("503", 0)
    growth = max(watch.peak, watch.rss()) / watch.before - 1
    row = _row(title, gets, p90=None, p99=None)
    row |= {
        "failed": gets.failed - busy,
        "limit": f"RSS ≤ +{LIMIT_GROWTH:.0%}",
        "holds": _held(gets.failed == busy and growth <= LIMIT_GROWTH, f"{growth:+.1%}, {busy:,} × 503"),
    }
    return PhaseResult([row], {"load": _plain(result)})


def recovery(bench: Bench, title: str, _: Watch) -> PhaseResult:
    result = load.finish(load.start(bench.open_job(bench.gets(), warm_up=0.0)))
    gets = result.kind("GET")
    after = recovered(gets.per_second)
    row = _row(title, gets, p90=None, p99=None)
    row |= {
        "limit": f"p90 ≤ {LIMIT_P90:g} in {LIMIT_RECOVERY} s",
        "holds": _held(after is not None and after <= LIMIT_RECOVERY, "never" if after is None else f"in {after} s"),
    }
    return PhaseResult([row], {"load": _plain(result)})


def recovered(seconds: Sequence[Second], *, in_a_row: int = IN_A_ROW) -> int | None:
    """Seconds until the p90 was under the limit and stayed there for `in_a_row` seconds; None if never."""
    good = [each.p90 is not None and each.p90 <= LIMIT_P90 and not each.failed for each in seconds]
    for first in range(len(good)):
        if all(good[first : first + in_a_row]):
            return first
    return None


def swaps(bench: Bench, title: str, _: Watch) -> PhaseResult:
    """Switch to another run and back several times under load: no request may fail."""
    child = load.start(bench.open_job(bench.gets()))
    time.sleep(bench.warm_up + 1.0)  # the generator's own start included
    pause = (bench.seconds - 2.0) / (2 * SWITCHES)
    switches = []
    for number in range(2 * SWITCHES):
        start = time.monotonic()
        if number % 2:
            status, answer = ask(bench.server.port, "POST", "/model/rollback")
        else:
            status, answer = ask(bench.server.port, "PUT", "/model", {"run": "second"})
        seconds = time.monotonic() - start
        switches.append({"status": status, "active": (answer or {}).get("active"), "seconds": seconds})
        time.sleep(max(pause - seconds, 0.0))
    result = load.finish(child)
    expected = ["second", "first"] * SWITCHES
    as_expected = [each["active"] for each in switches] == expected
    row = _row(title, result.kind("GET"), p90=None, p99=None)
    process = sum(each["status"] == OK for each in switches)
    row |= {
        "limit": "none failed",
        "holds": _held(as_expected and result.kind("GET").failed == 0, f"{process} of {len(switches)} done"),
    }
    return PhaseResult([row], {"load": _plain(result), "switches": switches})


def _row(
    title: str, kind: KindResult, *, p90: float | None = LIMIT_P90, p99: float | None = LIMIT_P99
) -> dict[str, Any]:
    limits = [(name, limit) for name, limit in (("p90", p90), ("p99", p99)) if limit is not None]
    latencies = _latencies(kind)
    within_limits = kind.failed == 0 and all((latencies[name] or 0.0) <= limit for name, limit in limits)
    return {
        "measurement": title,
        "/s": round(kind.answered_a_second),
        "failed": kind.failed,
        **{name: "–" if value is None else value for name, value in latencies.items()},
        "limit": ", ".join(f"{name} ≤ {limit:g}" for name, limit in limits),
        "holds": _held(within_limits),
    }


def _latencies(kind: KindResult) -> dict[str, float | None]:
    return {"p50": kind.p50, "p90": kind.p90, "p99": kind.p99, "max": kind.max}


def _held(passed: bool, detail: str = "") -> str:  # noqa: FBT001
    return ("yes" if passed else "NO") + (f": {detail}" if detail else "")


def _plain(result: load.Result) -> Any:
    return msgspec.to_builtins(result)


Phase = Callable[[Bench, str, Watch], PhaseResult]


def _batch_sizes(port: int) -> dict[str, float]:
    """The mean batch size of each queue so far, from the service's own metrics."""
    from prometheus_client.parser import text_string_to_metric_families

    status, text = ask(port, "GET", "/metrics")
    sums: dict[str, dict[str, float]] = {}
    if status == OK:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name in ("segue_batch_size_sum", "segue_batch_size_count"):
                    sums.setdefault(sample.labels["queue"], {})[sample.name[17:]] = sample.value
    return {queue: each["sum"] / each["count"] for queue, each in sums.items() if each["count"]}


def _conditions(server: Server, options: argparse.Namespace) -> dict[str, Any]:
    """The conditions of the measurement."""
    return {
        "users": options.users,
        "events a user": EVENTS_A_USER,
        "workers": options.workers,
        "connections": options.connections,
        "seconds": options.seconds,
        "warm-up": options.warm_up,
        "server threads": Watch(server.pid).threads(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        "versions": {name: version(name) for name in LIBRARIES},
    }


def show(phases: dict[str, PhaseResult], conditions: dict[str, Any], options: argparse.Namespace) -> None:
    rows = [row for phase in phases.values() for row in phase.rows]
    generator = {name: phase.detail["load"]["cpu_share"] for name, phase in phases.items()}
    server = {name: phase.detail["server"]["cpu_share"] for name, phase in phases.items()}
    memory = phases["crowd"].detail["server"]
    notes = [
        *NOTES,
        f"{options.workers} worker(s); CPU of the generator and of the server, in cores: "
        + "; ".join(f"{name} {generator[name]:.2f} and {server[name]:.2f}" for name in phases)
        + ".",
        "RSS around the closed loop, MB: "
        + ", ".join(f"{name[4:]} {memory[name] / MEGABYTE:,.0f}" for name in ("rss_before", "rss_peak", "rss_after"))
        + ".",
    ]
    title = f"segue serve, {options.users:,} users of {EVENTS_A_USER} events in SQLite, {options.seconds:g} s each, ms"
    body = {"conditions": conditions, "phases": {name: phase.detail for name, phase in phases.items()}}
    publish("serve", title=title, rows=rows, notes=notes, body=body)


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
