"""Three real services over one real PostgreSQL: what one is told all of them know, and one that dies loses nothing."""

from __future__ import annotations

import functools
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.serving.postgres import PostgresServer
from bench.serving.replicas import World, differing, endure, started
from bench.serving.server import Server, ask
from segue.recommend.recommender import Recommender

ITEMS = [f"i{number:02}" for number in range(12)]
LONG = [ITEMS[7 * step % 12] for step in range(18)]  # long enough for a replica to remember what it encoded
FOLLOWED = 10.0  # seconds; the design says one, but a busy machine may stand still for some

# The services are started once for all of these tests, which are in this order: the last but one kills a replica.


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


def history_of(user: str, *items: str, times: Sequence[float]) -> dict[str, Any]:
    return {"events": [{"user": user, "item": i, "time": t} for i, t in zip(items, times, strict=True)]}


def test_an_event_told_to_one_is_in_the_next_answer_of_all(replicas: Sequence[Server], content_run: Path) -> None:
    recommender = Recommender.open(content_run)
    history: list[tuple[float, str]] = [(1000.0 + place, item) for place, item in enumerate(LONG)]

    def agree() -> None:
        expected = recommender.recommend([item for _, item in sorted(history)], k=50)
        for server in replicas:
            found = answer(server, "ann")
            assert [name for name, _ in found] == expected.ids
            assert [score for _, score in found] == pytest.approx([item.score for item in expected.items], abs=1e-4)

    told(replicas[0], "POST", "/events", history_of("ann", *LONG, times=[moment for moment, _ in history]))
    for _ in range(3):  # from the second question on each of them remembers what it encoded
        agree()
    late = (1004.5, "i08")
    for number, (moment, item) in enumerate([(2000.0, "i03"), (3000.0, "i05"), late, (4000.0, "i00")]):
        event = {"user": "ann", "item": item, "time": moment, "id": f"event {number}"}
        assert told(replicas[number % 3], "POST", "/events", event)["accepted"] == 1
        again = told(replicas[(number + 1) % 3], "POST", "/events", event)
        assert (again["accepted"], again["duplicates"]) == (0, 1), "an id is one event, whoever is told it"
        history.append((moment, item))
        agree()
    everywhere(replicas, lambda server: remembering(server) > 0)


def remembering(server: Server) -> float:
    """For how many questions a replica only encoded what was new."""
    (line,) = (
        line for line in told(server, "GET", "/metrics").splitlines() if 'segue_encodings_total{extent="new"' in line
    )
    return float(line.split()[-1])


def test_who_is_forgotten_by_one_is_forgotten_by_all(replicas: Sequence[Server]) -> None:
    told(replicas[0], "POST", "/events", history_of("eve", *LONG, times=range(len(LONG))))
    for server in (*replicas, *replicas):
        assert told(server, "GET", "/users/eve/recommendations")["fallback"] is None
    assert told(replicas[1], "DELETE", "/users/eve") == {"removed": len(LONG)}
    for server in replicas:
        assert told(server, "GET", "/users/eve/recommendations")["fallback"] == "popularity"
        assert told(server, "GET", "/users/eve/history")["events"] == []


def serves(name: str, server: Server) -> bool:
    return bool(told(server, "GET", "/users/bob/recommendations")["model"] == name)


def test_new_items_and_switches_reach_all(replicas: Sequence[Server]) -> None:
    told(replicas[0], "POST", "/events", {"user": "bob", "item": "i02"})
    added = told(replicas[2], "POST", "/items", {"id": "kettle", "title": "a wholly new kettle"})
    assert (added["accepted"], added["served"]) == (1, 1)
    everywhere(replicas, lambda server: "kettle" in dict(answer(server, "bob")))
    for server, method, path, body, name in (
        (replicas[0], "PUT", "/model", {"run": "two"}, "two"),
        (replicas[1], "POST", "/model/rollback", None, "one"),
        (replicas[2], "PUT", "/model", {"run": "two"}, "two"),
    ):
        assert told(server, method, path, body)["active"] == name
        everywhere(replicas, functools.partial(serves, name))
        assert all("kettle" in dict(answer(one, "bob")) for one in replicas), "a switch keeps new items"


def test_one_that_is_killed_takes_nothing_along(replicas: Sequence[Server], store: str) -> None:
    world = World(users=[f"user-{number}" for number in range(30)], items=ITEMS)
    outcome = endure(replicas, world, store=store, rate=80, seconds=3, clients=8)
    assert outcome.failed == [], "the others never failed"
    assert outcome.at_the_killed >= 1, "it was killed in the middle of its work"
    assert outcome.acknowledged == 240 // 5
    assert (outcome.missing, outcome.twice, outcome.unknown, outcome.stale, outcome.differing) == (0, 0, 0, 0, 0)


def test_a_difference_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = (1, 2)
    answers = {ports[0]: [("a", 0.5), ("b", 0.25)], ports[1]: [("a", 0.5), ("b", 0.25)]}
    monkeypatch.setattr("bench.serving.replicas._answer", lambda port, _: answers[port])
    assert differing(ports, ["ann", "bob"]) == 0
    answers[ports[1]] = [("b", 0.25), ("a", 0.5)]
    assert differing(ports, ["ann", "bob"]) == 2
    answers[ports[1]] = [("a", 0.5), ("b", 0.2501)]
    assert differing(ports, ["ann"]) == 1
