"""Three real services over one real PostgreSQL: what one is told all of them know, and one that dies loses nothing."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.postgres import PostgresServer
from bench.replicas import World, differing, endure, started
from bench.serving import Server, ask
from segue.recommend.recommender import Recommender

ITEMS = [f"i{number:02}" for number in range(12)]
LONG = [ITEMS[7 * step % 12] for step in range(18)]  # long enough for a replica to remember what it encoded
FOLLOWED = 3.0  # seconds; the design says one, and a busy machine may stand still for as long again

# PostgreSQL and the services are started once for both tests, in this order: the second one kills a replica.
pytestmark = pytest.mark.xdist_group("replicas")


@pytest.fixture(name="store", scope="module")
def store_fixture(postgres_server: PostgresServer) -> str:
    return postgres_server.new_database()


@pytest.fixture(name="replicas", scope="module")
def replicas_fixture(
    store: str, content_run: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sequence[Server]]:
    folder = tmp_path_factory.mktemp("replicas")
    for name in ("one", "two"):
        shutil.copytree(content_run, folder / "runs" / name)
    servers = started(folder / "runs" / "one", store, folder, "--runs", str(folder / "runs"))
    yield servers
    for server in servers:
        server.kill()


def told(server: Server, method: str, path: str, body: Any = None) -> Any:
    status, said = ask(server.port, method, path, body)
    assert status == 200, said
    return said


def answer(server: Server, user: str) -> list[tuple[str, float]]:
    return [(item["id"], item["score"]) for item in told(server, "GET", f"/users/{user}/recommendations?k=50")["items"]]


def everywhere(servers: Sequence[Server], holds: Callable[[Server], bool]) -> None:
    """Within a moment it is so on every replica."""
    limit = time.monotonic() + FOLLOWED
    while not all(holds(server) for server in servers):
        assert time.monotonic() < limit, "not every replica followed"
        time.sleep(0.02)


def test_what_one_is_told_all_of_them_know(replicas: Sequence[Server], content_run: Path) -> None:
    recommender = Recommender.open(content_run)
    history = list(zip(range(1000, 1000 + len(LONG)), LONG, strict=True))  # (time, item)

    def agree() -> None:
        expected = recommender.recommend([item for _, item in sorted(history)], k=50)
        for server in replicas:
            found = answer(server, "ann")
            assert [name for name, _ in found] == expected.ids
            assert [score for _, score in found] == pytest.approx([item.score for item in expected.items], abs=1e-4)

    told(replicas[0], "POST", "/events", {"events": [{"user": "ann", "item": i, "time": t} for t, i in history]})
    for _ in range(3):  # from the second question on each of them remembers what it encoded
        agree()
    for number, (moment, item) in enumerate([(2000, "i03"), (3000, "i05"), (1004.5, "i08"), (4000, "i00")]):
        event = {"user": "ann", "item": item, "time": moment, "id": f"event {number}"}
        assert told(replicas[number % 3], "POST", "/events", event)["accepted"] == 1
        again = told(replicas[(number + 1) % 3], "POST", "/events", event)
        assert (again["accepted"], again["duplicates"]) == (0, 1), "an id is one event, whoever is told it"
        history.append((moment, item))  # type: ignore[arg-type]
        agree()

    assert told(replicas[1], "DELETE", "/users/ann") == {"removed": len(history)}
    for server in replicas:
        assert told(server, "GET", "/users/ann/recommendations")["fallback"] == "popularity"
        assert told(server, "GET", "/users/ann/history")["events"] == []

    told(replicas[0], "POST", "/events", {"user": "bob", "item": "i02"})
    added = told(replicas[2], "POST", "/items", {"id": "kettle", "title": "a wholly new kettle"})
    assert (added["accepted"], added["served"]) == (1, 1)
    everywhere(replicas, lambda server: "kettle" in [name for name, _ in answer(server, "bob")])

    for server, method, path, body, name in (
        (replicas[0], "PUT", "/model", {"run": "two"}, "two"),
        (replicas[1], "POST", "/model/rollback", None, "one"),
        (replicas[2], "PUT", "/model", {"run": "two"}, "two"),
    ):
        assert told(server, method, path, body)["active"] == name
        everywhere(replicas, lambda one, now=name: told(one, "GET", "/users/bob/recommendations?k=50")["model"] == now)
        assert all("kettle" in [item for item, _ in answer(one, "bob")] for one in replicas), "a switch keeps new items"


def test_one_that_is_killed_takes_nothing_along(replicas: Sequence[Server], store: str) -> None:
    world = World(users=[f"user-{number}" for number in range(30)], items=ITEMS)
    outcome = endure(replicas, world, store=store, rate=60, seconds=4, clients=8)
    assert outcome.failed == [], "the others never failed"
    assert outcome.at_the_killed >= 1, "it was killed in the middle of its work"
    assert outcome.acknowledged == 240 // 5
    assert (outcome.missing, outcome.twice, outcome.strange, outcome.stale, outcome.differing) == (0, 0, 0, 0, 0)


def test_a_difference_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = (1, 2)
    answers = {ports[0]: [("a", 0.5), ("b", 0.25)], ports[1]: [("a", 0.5), ("b", 0.25)]}
    monkeypatch.setattr("bench.replicas._answer", lambda port, _: answers[port])
    assert differing(ports, ["ann", "bob"]) == 0
    answers[ports[1]] = [("b", 0.25), ("a", 0.5)]
    assert differing(ports, ["ann", "bob"]) == 2
    answers[ports[1]] = [("a", 0.5), ("b", 0.2501)]
    assert differing(ports, ["ann"]) == 1
