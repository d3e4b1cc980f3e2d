"""Three real services over one real PostgreSQL: shared events, users, items and switches; a kill loses nothing."""

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
LONG = [ITEMS[7 * step % 12] for step in range(18)]  # long enough for a KV cache
FOLLOW_SECONDS = 10.0  # the design says one, but a busy machine may pause for longer

# The services are started once for these tests, whose order matters: the last but one kills a replica.


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


def request(server: Server, method: str, path: str, body: Any = None) -> Any:
    status, result = ask(server.port, method, path, body)
    assert status == 200, result
    return result


def answer(server: Server, user: str) -> list[tuple[str, float]]:
    return [
        (item["id"], item["score"]) for item in request(server, "GET", f"/users/{user}/recommendations?k=50")["items"]
    ]


def wait_for_all(servers: Sequence[Server], holds: Callable[[Server], bool]) -> None:
    """Wait until the condition holds on every replica."""
    limit = time.monotonic() + FOLLOW_SECONDS
    while not all(holds(server) for server in servers):
        assert time.monotonic() < limit, "not every replica followed"
        time.sleep(0.02)


def history_of(user: str, *items: str, times: Sequence[float]) -> dict[str, Any]:
    return {"events": [{"user": user, "item": i, "time": t} for i, t in zip(items, times, strict=True)]}


def test_an_event_sent_to_one_is_in_the_next_answer_of_all(replicas: Sequence[Server], content_run: Path) -> None:
    recommender = Recommender.open(content_run)
    history: list[tuple[float, str]] = [(1000.0 + position, item) for position, item in enumerate(LONG)]

    def check_answers() -> None:
        expected = recommender.recommend([item for _, item in sorted(history)], k=50)
        for server in replicas:
            scored = answer(server, "ann")
            assert [name for name, _ in scored] == expected.ids
            assert [score for _, score in scored] == pytest.approx([item.score for item in expected.items], abs=1e-4)

    request(replicas[0], "POST", "/events", history_of("ann", *LONG, times=[time_s for time_s, _ in history]))
    for _ in range(3):  # from the second request on each replica has a KV cache
        check_answers()
    late = (1004.5, "i08")
    for number, (time_s, item) in enumerate([(2000.0, "i03"), (3000.0, "i05"), late, (4000.0, "i00")]):
        event = {"user": "ann", "item": item, "time": time_s, "id": f"event {number}"}
        assert request(replicas[number % 3], "POST", "/events", event)["accepted"] == 1
        again = request(replicas[(number + 1) % 3], "POST", "/events", event)
        assert (again["accepted"], again["duplicates"]) == (0, 1), "an event id counts once, on any replica"
        history.append((time_s, item))
        check_answers()
    wait_for_all(replicas, lambda server: incremental_encodings(server) > 0)


def incremental_encodings(server: Server) -> float:
    """The number of requests for which a replica encoded only the new events."""
    (line,) = (
        line for line in request(server, "GET", "/metrics").splitlines() if 'segue_encodings_total{extent="new"' in line
    )
    return float(line.split()[-1])


def test_a_user_deleted_on_one_replica_is_deleted_on_all(replicas: Sequence[Server]) -> None:
    request(replicas[0], "POST", "/events", history_of("eve", *LONG, times=range(len(LONG))))
    for server in (*replicas, *replicas):
        assert request(server, "GET", "/users/eve/recommendations")["fallback"] is None
    assert request(replicas[1], "DELETE", "/users/eve") == {"removed": len(LONG)}
    for server in replicas:
        assert request(server, "GET", "/users/eve/recommendations")["fallback"] == "popularity"
        assert request(server, "GET", "/users/eve/history")["events"] == []


def serves(name: str, server: Server) -> bool:
    return bool(request(server, "GET", "/users/bob/recommendations")["model"] == name)


def test_new_items_and_switches_reach_every_replica(replicas: Sequence[Server]) -> None:
    request(replicas[0], "POST", "/events", {"user": "bob", "item": "i02"})
    report = request(replicas[2], "POST", "/items", {"id": "kettle", "title": "a wholly new kettle"})
    assert (report["accepted"], report["served"]) == (1, 1)
    wait_for_all(replicas, lambda server: "kettle" in dict(answer(server, "bob")))
    for server, method, path, body, name in (
        (replicas[0], "PUT", "/model", {"run": "two"}, "two"),
        (replicas[1], "POST", "/model/rollback", None, "one"),
        (replicas[2], "PUT", "/model", {"run": "two"}, "two"),
    ):
        assert request(server, method, path, body)["active"] == name
        wait_for_all(replicas, functools.partial(serves, name))
        assert all("kettle" in dict(answer(one, "bob")) for one in replicas), "a switch keeps new items"


def test_a_killed_replica_loses_nothing(replicas: Sequence[Server], store: str) -> None:
    world = World(users=[f"user-{number}" for number in range(30)], items=ITEMS)
    outcome = endure(replicas, world, store=store, rate=80, seconds=3, clients=8)
    assert outcome.failed == [], "no request to the other replicas failed"
    assert outcome.at_the_killed >= 1, "requests were in flight at the kill"
    assert outcome.acknowledged == 240 // 5
    assert (outcome.missing, outcome.twice, outcome.unknown, outcome.stale, outcome.differing) == (0, 0, 0, 0, 0)


def test_differing_answers_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = (1, 2)
    answers = {ports[0]: [("a", 0.5), ("b", 0.25)], ports[1]: [("a", 0.5), ("b", 0.25)]}
    monkeypatch.setattr("bench.serving.replicas._answer", lambda port, _: answers[port])
    assert differing(ports, ["ann", "bob"]) == 0
    answers[ports[1]] = [("b", 0.25), ("a", 0.5)]
    assert differing(ports, ["ann", "bob"]) == 2
    answers[ports[1]] = [("a", 0.5), ("b", 0.2501)]
    assert differing(ports, ["ann"]) == 1
