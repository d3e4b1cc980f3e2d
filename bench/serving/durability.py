"""Writers and a server killed with kill -9 again and again → whether every acknowledged event is there exactly once.

Each writer posts events of its own, one or several at a time, with event ids. Where the connection breaks it cannot
know whether the events were kept, and posts them again with the same ids, until the service answers.
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
MOST_TOGETHER = 8  # events of one post
AGAIN_SHARE = 0.1  # of acknowledged posts that are sent once more, which must add nothing
EARLY_SHARE = 0.2  # of kills that come at any moment from the start of the process on, ready or not
LATEST = 1.0  # seconds from the first acknowledgement after a start to the kill, at most
FIRST_TIME = 1_700_000_000
MOST_LISTED = 1000  # events of one GET /users/{id}/history
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
OK, BUSY = 200, 503
NOTES = (
    f"{WRITERS} writers post all the time, one event or up to {MOST_TOGETHER} at once. A post that was not answered is "
    "repeated with the same event ids; every tenth answered one is repeated too.",
    "kept unanswered: events that a repeated post found already there, for the kill came between commit and answer.",
    "missing, twice and strange are counted in the store itself after a last kill -9, and through GET "
    "/users/{id}/history. split: posts of which the service kept one part only.",
)


class Posted(msgspec.Struct, frozen=True):
    """An event that the service has acknowledged."""

    user: str
    row: Row


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one store."""

    kills: int
    writers: int
    acknowledged: int
    repeated: int
    """Posts sent again because no answer came."""
    kept_unanswered: int
    split: int
    missing: int
    twice: int
    strange: int
    """Rows that nobody posted so."""
    seconds: float

    @property
    def sound(self) -> bool:
        """Every acknowledged event is there, and once."""
        return not (self.missing or self.twice or self.strange or self.split)


def survive(
    store: str,
    run: Path,
    *,
    folder: Path,
    kills: int = KILLS,
    writers: int = WRITERS,
    seed: int = 1,
    latest: float = LATEST,
) -> Outcome:
    """Serve `run` over an empty `store`, write, kill, start again, and count. `folder` takes the server's log."""
    began = time.monotonic()
    service = _Service([str(run), "--store", store], log=folder / "server.log")
    stopping, over = threading.Event(), threading.Event()
    hands: list[Writer] = []
    try:
        service.server.wait_ready()
        items = [item["id"] for item in ask(service.port, "GET", "/items?limit=20")[1]["items"]]
        hands += [Writer(number, service.port, items, stopping, over, seed=seed) for number in range(writers)]
        for hand in hands:
            hand.start()
        _kill_again_and_again(service, hands, kills, random.Random(seed), latest=latest)
        _until_heard(hands)
        stopping.set()
        for hand in hands:
            hand.join()
        posted = [event for hand in hands for event in hand.acknowledged]
        users = sorted({event.user for event in posted})
        over_http = _histories(service.port, users)
    finally:
        stopping.set()
        over.set()
        service.server.kill()
        for hand in hands:
            hand.join()
    found = [judged(posted, over_http), judged(posted, stored(store, users))]
    return Outcome(
        kills=kills,
        writers=writers,
        acknowledged=len(posted),
        repeated=sum(hand.repeated for hand in hands),
        kept_unanswered=sum(hand.kept_unanswered for hand in hands),
        split=sum(hand.split for hand in hands),
        missing=max(each[0] for each in found),
        twice=max(each[1] for each in found),
        strange=max(each[2] for each in found),
        seconds=time.monotonic() - began,
    )


class _Service:
    """A server that is killed and started again at the same address."""

    def __init__(self, arguments: Sequence[str], *, log: Path) -> None:
        self._arguments, self._log = arguments, log
        self.port = free_port()
        self.server = self._started()

    def kill_and_start(self) -> None:
        self.server.kill()
        self.server = self._started()

    def _started(self) -> Server:
        return Server(self._arguments, port=self.port, log=self._log)


def _kill_again_and_again(
    service: _Service, hands: Sequence[Writer], kills: int, chance: random.Random, *, latest: float
) -> None:
    starting = 0.5
    for _ in range(kills):
        if chance.random() < EARLY_SHARE:
            time.sleep(chance.uniform(0.0, 1.2 * starting))
        else:
            starting = max(service.server.wait_ready(), 0.1)
            _until_heard(hands)
            time.sleep(chance.uniform(0.0, latest))
        service.kill_and_start()
    service.server.wait_ready()


def _until_heard(hands: Sequence[Writer]) -> None:
    """Wait until every writer has had an answer from now on, so that all of them are writing."""
    before = [hand.answers for hand in hands]
    deadline = time.monotonic() + 60
    while any(hand.answers <= count for hand, count in zip(hands, before, strict=True)):
        for hand in hands:
            if hand.problem:
                raise InputError(hand.problem)
        if time.monotonic() > deadline:
            raise InputError("A writer had no answer for a minute.")
        time.sleep(0.005)


class Writer(threading.Thread):
    """Posts events until told to stop, and remembers what was acknowledged. It leaves no post without an answer."""

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
        """`stopping`: begin no further post. `over`: the service will not come back."""
        super().__init__(name=f"writer {number}", daemon=True)
        self._number = number
        self._items = [*items, "an item no model knows"]
        self._stopping, self._over = stopping, over
        self._chance = random.Random(f"{seed} {number}")
        self._connection = http.client.HTTPConnection(HOST, port, timeout=10.0)
        self._made = 0
        self.acknowledged: list[Posted] = []
        self.answers = 0
        self.repeated = 0
        self.kept_unanswered = 0
        self.split = 0
        self.problem: str | None = None

    def run(self) -> None:
        try:
            while not self._stopping.is_set() and self.problem is None:
                events = self._next_events()
                if not self._post(events):
                    break
                self.acknowledged += [as_kept(event) for event in events]
                if self._chance.random() < AGAIN_SHARE:
                    self._post_again(events)
        finally:
            self._connection.close()

    def _next_events(self) -> list[dict[str, Any]]:
        return [
            self._event() for _ in range(1 if self._chance.random() < 0.5 else self._chance.randint(2, MOST_TOGETHER))
        ]

    def _event(self) -> dict[str, Any]:
        """An event unlike any other by its time; all writers write to the same user at about the same moment."""
        made, self._made = self._made, self._made + 1
        return {
            "id": f"{self._number}-{made}",
            "user": f"user {made // EVENTS_A_USER}",
            "item": self._chance.choice(self._items),
            "time": FIRST_TIME + 1000 * made + self._number,
            "kind": f"writer {self._number}",
            "value": float(made),
        }

    def _post(self, events: list[dict[str, Any]]) -> bool:
        """Post until there is an answer; False where it makes no sense, or nobody is there to give one any more."""
        broken = False
        while True:
            said = self._answer(events)
            if said is None:
                if self.problem or self._over.is_set():
                    return False
                self.repeated += 1
                broken = True
                time.sleep(0.01)
                continue
            accepted, duplicates = said
            if accepted + duplicates != len(events) or (duplicates and not broken):
                self.problem = (
                    f"{len(events)} new events were answered with {accepted} accepted, {duplicates} there already."
                )
                return False
            self.kept_unanswered += duplicates
            self.split += bool(accepted and duplicates)
            self.answers += 1
            return True

    def _post_again(self, events: list[dict[str, Any]]) -> None:
        said = self._answer(events)
        if said is not None and said != (0, len(events)):
            self.problem = f"{len(events)} acknowledged events, posted again, were answered with {said[0]} accepted."

    def _answer(self, events: list[dict[str, Any]]) -> tuple[int, int] | None:
        """Accepted and there already; None where no answer came and the post may be repeated."""
        body = events[0] if len(events) == 1 else {"events": events}
        try:
            status, said = exchange(self._connection, "POST", "/events", body)
        except (OSError, http.client.HTTPException):
            self._connection.close()  # the next request opens it anew
            return None
        if status == OK:
            return said["accepted"], said["duplicates"]
        if status != BUSY:
            self.problem = f"POST /events was answered with {status}: {said}"
        return None


def as_kept(event: dict[str, Any]) -> Posted:
    """An event as it was sent, to be compared with what is kept."""
    return Posted(event["user"], (event["item"], event["time"] * 1_000_000, event["kind"], event["value"]))


def _histories(port: int, users: Iterable[str]) -> list[Posted]:
    """Every user's history as the service tells it."""
    found: list[Posted] = []
    connection = http.client.HTTPConnection(HOST, port, timeout=60.0)
    try:
        for user in users:
            status, said = exchange(connection, "GET", f"/users/{quote(user, safe='')}/history?limit={MOST_LISTED}")
            if status != OK or said["more"]:
                raise InputError(
                    f"The history of a user with fewer than {MOST_LISTED} events was answered with {status}."
                )
            for event in said["events"]:
                moment = (datetime.fromisoformat(event["time"]) - EPOCH) // timedelta(microseconds=1)
                found.append(Posted(user, (event["item"], moment, event["kind"], event["value"])))
    finally:
        connection.close()
    return found


def stored(url: str, users: Sequence[str]) -> list[Posted]:
    """Every user's history as it is in the store."""
    store = open_store(url)
    try:
        return [Posted(user, row) for user, rows in zip(users, store.newest(users, None), strict=True) for row in rows]
    finally:
        store.close()


def judged(posted: Iterable[Posted], found: Iterable[Posted]) -> tuple[int, int, int]:
    """How many acknowledged events are missing, how many are there more than once, how many rows nobody posted."""
    wanted, there = Counter(posted), Counter(found)
    missing = (wanted - there).total()
    twice = sum(count > 1 for count in there.values())
    strange = sum(event not in wanted for event in there)
    return missing, twice, strange


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench durability", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--run", type=Path, help="a run folder to serve; otherwise a tiny one is trained")
    parser.add_argument("--kills", type=int, default=KILLS, help="of each store")
    parser.add_argument("--seed", type=int, default=1, help="of the kills' moments and the events")
    parser.add_argument("--stores", nargs="+", choices=("sqlite", "postgresql"), default=["sqlite", "postgresql"])
    chosen = parser.parse_args(argv)
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="segue-bench-") as name:
        folder = Path(name)
        run = chosen.run or tiny_run(folder)
        for store in chosen.stores:
            print(f"{store}: {chosen.kills} kills …", file=sys.stderr, flush=True)
            if store == "sqlite":
                outcomes[store] = survive(
                    str(folder / "events.db"), run, folder=folder, kills=chosen.kills, seed=chosen.seed
                )
                continue
            server = PostgresServer(durable=True)
            try:
                url = server.new_database()
                outcomes[store] = survive(url, run, folder=folder, kills=chosen.kills, seed=chosen.seed)
            finally:
                server.close()
    title = "Acknowledged events after kill -9"
    rows = [_shown(store, outcome) for store, outcome in outcomes.items()]
    body = {"seed": chosen.seed, "stores": {store: msgspec.to_builtins(each) for store, each in outcomes.items()}}
    publish("durability", title=title, rows=rows, notes=NOTES, body=body)
    if not all(outcome.sound for outcome in outcomes.values()):
        raise InputError("Events were lost or doubled; the table above says how many.")


def _shown(store: str, outcome: Outcome) -> dict[str, Any]:
    return {
        "store": store,
        "kills": outcome.kills,
        "acknowledged": outcome.acknowledged,
        "posts repeated": outcome.repeated,
        "kept unanswered": outcome.kept_unanswered,
        "missing": outcome.missing,
        "twice": outcome.twice,
        "strange": outcome.strange,
        "split": outcome.split,
        "seconds": outcome.seconds,
    }


def tiny_run(folder: Path) -> Path:
    """A run that knows twelve items: what is served does not matter here, that it is served does."""
    rows = [f"u{user},i{(user + step) % 12},{FIRST_TIME + 60 * step}" for user in range(40) for step in range(10)]
    (folder / "log.csv").write_text("user,item,timestamp\n" + "\n".join(rows) + "\n")
    data = api.prepare(folder / "log.csv", out=folder / "data")
    api.train(data, out=folder / "run", overrides=["model.width=16", "model.length=20", "train.epochs=1"])
    return folder / "run"


if __name__ == "__main__":
    main(sys.argv[1:])
