"""Kill a server with kill -9 repeatedly while events are written; count acknowledged events that are lost or doubled.

Each writer posts events of its own, one or several at a time, with event ids. If the connection breaks, the writer
cannot know whether the events were stored, and posts them again with the same ids until the service answers.
"""

from __future__ import annotations

import argparse
import http.client
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from bench.serving.postgres import PostgresServer
from bench.serving.server import HOST, Server, ask, exchange, free_port
from bench.tables import publish
from segue import api
from segue.errors import InputError
from segue.serving.store.store import Row, open_store

KILLS = 25
WRITERS = 4
EVENTS_A_USER = 50  # of each writer
MAX_EVENTS_A_POST = 8
REPEAT_SHARE = 0.1  # of acknowledged posts that are sent again, which must add nothing
EARLY_SHARE = 0.2  # of kills at any time after the start of the process, ready or not
MAX_SECONDS_TO_KILL = 1.0  # from the first acknowledgement after a start
FIRST_TIME = 1_700_000_000
MAX_LISTED = 1000  # events of one GET /users/{id}/history
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
OK, BUSY = 200, 503
NOTES = (
    f"{WRITERS} writers post continuously, one event or up to {MAX_EVENTS_A_POST} at once. A post without an answer is "
    "repeated with the same event ids; every tenth answered one is repeated too.",
    "stored unanswered: events that a repeated post found stored: the kill came between commit and answer.",
    "missing, twice and unknown are counted in the store itself after a last kill -9, and through GET "
    "/users/{id}/history. split: posts of which the service stored only a part.",
)


class Posted(msgspec.Struct, frozen=True):
    """An event that the service has acknowledged."""

    user: str
    row: Row


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of one store."""

    kills: int
    writers: int
    acknowledged: int
    repeated: int
    """Posts sent again because they got no answer."""
    stored_unanswered: int
    split: int
    missing: int
    twice: int
    unknown: int
    """Stored rows that were never posted."""
    seconds: float

    @property
    def sound(self) -> bool:
        """Whether every acknowledged event is stored exactly once."""
        return not (self.missing or self.twice or self.unknown or self.split)


def survive(
    store: str,
    run: Path,
    *,
    folder: Path,
    kills: int = KILLS,
    writers: int = WRITERS,
    seed: int = 1,
    latest: float = MAX_SECONDS_TO_KILL,
) -> Outcome:
    """Serve `run` over an empty `store`, write, kill, restart, and count. The server's log is written to `folder`."""
    start = time.monotonic()
    service = _Service([str(run), "--store", store], log=folder / "server.log")
    stopping, over = threading.Event(), threading.Event()
    threads: list[Writer] = []
    try:
        service.server.wait_ready()
        items = [item["id"] for item in ask(service.port, "GET", "/items?limit=20")[1]["items"]]
        threads += [Writer(number, service.port, items, stopping, over, seed=seed) for number in range(writers)]
        for writer in threads:
            writer.start()
        _kill_repeatedly(service, threads, kills, random.Random(seed), latest=latest)
        _wait_for_answers(threads)
        stopping.set()
        for writer in threads:
            writer.join()
        posted = [event for writer in threads for event in writer.acknowledged]
        users = sorted({event.user for event in posted})
        over_http = _histories(service.port, users)
    finally:
        stopping.set()
        over.set()
        service.server.kill()
        for writer in threads:
            writer.join()
    counts = [count_faults(posted, over_http), count_faults(posted, stored(store, users))]
    return Outcome(
        kills=kills,
        writers=writers,
        acknowledged=len(posted),
        repeated=sum(writer.repeated for writer in threads),
        stored_unanswered=sum(writer.stored_unanswered for writer in threads),
        split=sum(writer.split for writer in threads),
        missing=max(each[0] for each in counts),
        twice=max(each[1] for each in counts),
        unknown=max(each[2] for each in counts),
        seconds=time.monotonic() - start,
    )


class _Service:
    """A server that is killed and restarted at the same address."""

    def __init__(self, arguments: Sequence[str], *, log: Path) -> None:
        self._arguments, self._log = arguments, log
        self.port = free_port()
        self.server = self._started()

    def kill_and_start(self) -> None:
        self.server.kill()
        self.server = self._started()

    def _started(self) -> Server:
        return Server(self._arguments, port=self.port, log=self._log)


def _kill_repeatedly(
    service: _Service, threads: Sequence[Writer], kills: int, chance: random.Random, *, latest: float
) -> None:
    starting = 0.5
    for _ in range(kills):
        if chance.random() < EARLY_SHARE:
            time.sleep(chance.uniform(0.0, 1.2 * starting))
        else:
            starting = max(service.server.wait_ready(), 0.1)
            _wait_for_answers(threads)
            time.sleep(chance.uniform(0.0, latest))
        service.kill_and_start()
    service.server.wait_ready()


def _wait_for_answers(threads: Sequence[Writer]) -> None:
    """Wait until every writer has got another answer, so that all of them are writing."""
    before = [writer.answers for writer in threads]
    deadline = time.monotonic() + 60
    while any(writer.answers <= count for writer, count in zip(threads, before, strict=True)):
        for writer in threads:
            if writer.problem:
                raise InputError(writer.problem)
        if time.monotonic() > deadline:
            raise InputError("Expected an answer to every writer, got none for a minute: read the server's log.")
        time.sleep(0.005)


class Writer(threading.Thread):
    """Posts events until it is stopped, each until it is answered, and collects those that were acknowledged."""

    def __init__(
        self,
        number: int,
        port: int,
        items: Sequence[str],
        stopping: threading.Event,
        over: threading.Event,
        *,
        seed: int,
    ) -> None:
        """`stopping`: begin no further post. `over`: the service will not be restarted."""
        super().__init__(name=f"writer {number}", daemon=True)
        self._number = number
        self._items = [*items, "an item no model knows"]
        self._stopping, self._over = stopping, over
        self._chance = random.Random(f"{seed} {number}")
        self._connection = http.client.HTTPConnection(HOST, port, timeout=10.0)
        self._count = 0
        self.acknowledged: list[Posted] = []
        self.answers = 0
        self.repeated = 0
        self.stored_unanswered = 0
        self.split = 0
        self.problem: str | None = None

    def run(self) -> None:
        try:
            while not self._stopping.is_set() and self.problem is None:
                events = self._next_events()
                if not self._post(events):
                    break
                self.acknowledged += [posted_event(event) for event in events]
                if self._chance.random() < REPEAT_SHARE:
                    self._post_again(events)
        finally:
            self._connection.close()

    def _next_events(self) -> list[dict[str, Any]]:
        return [
            self._event()
            for _ in range(1 if self._chance.random() < 0.5 else self._chance.randint(2, MAX_EVENTS_A_POST))
        ]

    def _event(self) -> dict[str, Any]:
        """An event with a time of its own; all writers write to the same user at about the same time."""
        number, self._count = self._count, self._count + 1
        return {
            "id": f"{self._number}-{number}",
            "user": f"user {number // EVENTS_A_USER}",
            "item": self._chance.choice(self._items),
            "time": FIRST_TIME + 1000 * number + self._number,
            "kind": f"writer {self._number}",
            "value": float(number),
        }

    def _post(self, events: list[dict[str, Any]]) -> bool:
        """Post until there is an answer. False if the answer is wrong or the service is gone."""
        resent = False
        while True:
            counts = self._answer(events)
            if counts is None:
                if self.problem or self._over.is_set():
                    return False
                self.repeated += 1
                resent = True
                time.sleep(0.01)
                continue
            accepted, duplicates = counts
            if accepted + duplicates != len(events) or (duplicates and not resent):
                self.problem = (
                    f"{len(events)} new events were answered with {accepted} accepted, {duplicates} duplicates."
                )
                return False
            self.stored_unanswered += duplicates
            self.split += bool(accepted and duplicates)
            self.answers += 1
            return True

    def _post_again(self, events: list[dict[str, Any]]) -> None:
        counts = self._answer(events)
        if counts is not None and counts != (0, len(events)):
            self.problem = f"{len(events)} acknowledged events, posted again, were answered with {counts[0]} accepted."

    def _answer(self, events: list[dict[str, Any]]) -> tuple[int, int] | None:
        """The numbers of accepted events and duplicates; None without an answer: the post may be repeated."""
        body = events[0] if len(events) == 1 else {"events": events}
        try:
            status, answer = exchange(self._connection, "POST", "/events", body)
        except (OSError, http.client.HTTPException):
            self._connection.close()  # the next request opens it anew
            return None
        if status == OK:
            return answer["accepted"], answer["duplicates"]
        if status != BUSY:
            self.problem = f"POST /events was answered with {status}: {answer}"
        return None


def posted_event(event: dict[str, Any]) -> Posted:
    """An event as it was posted, to be compared with what is stored."""
    return Posted(event["user"], (event["item"], event["time"] * 1_000_000, event["kind"], event["value"]))


def _histories(port: int, users: Iterable[str]) -> list[Posted]:
    """Every user's history as the service returns it."""
    events: list[Posted] = []
    connection = http.client.HTTPConnection(HOST, port, timeout=60.0)
    try:
        for user in users:
            status, answer = exchange(connection, "GET", f"/users/{quote(user, safe='')}/history?limit={MAX_LISTED}")
            if status != OK or answer["more"]:
                raise InputError(
                    f"The history of a user with fewer than {MAX_LISTED} events was answered with {status}."
                )
            for event in answer["events"]:
                time_us = (datetime.fromisoformat(event["time"]) - EPOCH) // timedelta(microseconds=1)
                events.append(Posted(user, (event["item"], time_us, event["kind"], event["value"])))
    finally:
        connection.close()
    return events


def stored(url: str, users: Sequence[str]) -> list[Posted]:
    """Every user's history in the store."""
    store = open_store(url)
    try:
        return [Posted(user, row) for user, rows in zip(users, store.newest(users, None), strict=True) for row in rows]
    finally:
        store.close()


def count_faults(acknowledged: Iterable[Posted], stored: Iterable[Posted]) -> tuple[int, int, int]:
    """Count acknowledged events that are missing, events stored more than once, and stored events never posted."""
    expected, actual = Counter(acknowledged), Counter(stored)
    missing = (expected - actual).total()
    twice = sum(count > 1 for count in actual.values())
    unknown = sum(event not in expected for event in actual)
    return missing, twice, unknown


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench durability", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--run", type=Path, help="a run folder to serve; otherwise a tiny one is trained")
    parser.add_argument("--kills", type=int, default=KILLS, help="of each store")
    parser.add_argument("--seed", type=int, default=1, help="of the times of the kills and of the events")
    parser.add_argument("--stores", nargs="+", choices=("sqlite", "postgresql"), default=["sqlite", "postgresql"])
    options = parser.parse_args(argv)
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="segue-bench-") as name:
        folder = Path(name)
        run = options.run or tiny_run(folder)
        for store in options.stores:
            print(f"{store}: {options.kills} kills …", file=sys.stderr, flush=True)
            if store == "sqlite":
                outcomes[store] = survive(
                    str(folder / "events.db"), run, folder=folder, kills=options.kills, seed=options.seed
                )
                continue
            server = PostgresServer(durable=True)
            try:
                url = server.new_database()
                outcomes[store] = survive(url, run, folder=folder, kills=options.kills, seed=options.seed)
            finally:
                server.close()
    title = "Acknowledged events after kill -9"
    rows = [_shown(store, outcome) for store, outcome in outcomes.items()]
    body = {"seed": options.seed, "stores": {store: msgspec.to_builtins(each) for store, each in outcomes.items()}}
    publish("durability", title=title, rows=rows, notes=NOTES, body=body)
    if not all(outcome.sound for outcome in outcomes.values()):
        raise InputError("Events were lost or doubled; the table above says how many.")


def _shown(store: str, outcome: Outcome) -> dict[str, Any]:
    return {
        "store": store,
        "kills": outcome.kills,
        "acknowledged": outcome.acknowledged,
        "posts repeated": outcome.repeated,
        "stored unanswered": outcome.stored_unanswered,
        "missing": outcome.missing,
        "twice": outcome.twice,
        "unknown": outcome.unknown,
        "split": outcome.split,
        "seconds": outcome.seconds,
    }


def tiny_run(folder: Path) -> Path:
    """A run of twelve items; its quality does not matter here."""
    rows = [f"u{user},i{(user + step) % 12},{FIRST_TIME + 60 * step}" for user in range(40) for step in range(10)]
    (folder / "log.csv").write_text("user,item,timestamp\n" + "\n".join(rows) + "\n")
    data = api.prepare(folder / "log.csv", out=folder / "data")
    api.train(data, out=folder / "run", overrides=["model.width=16", "model.length=20", "train.epochs=1"])
    return folder / "run"


if __name__ == "__main__":
    main(sys.argv[1:])
