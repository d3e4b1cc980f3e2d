"""POST /items: kept before it is answered, recommended within a second everywhere, whatever run is served."""

from __future__ import annotations

import itertools
import json
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from planted_logs import title
from running_service import serving
from small_service import Client, asked_in_process, assert_problem, guarded, ids

from segue.serve.bodies import MOST_ITEMS
from segue.serve.engine import Engine
from segue.serve.lanes import Here
from segue.serve.metrics import Metrics
from segue.serve.models import Models, ServedModel
from segue.serve.service import Service
from segue.serve.store import open_store

HISTORY = ["i01", "i02"]
JSON = {"content-type": "application/json"}
RATE = 100  # requests a second


@pytest.fixture(name="runs", scope="module")
def runs_folder(content_run: Path, cycle_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of the same items: two known by their titles, one by ids alone."""
    runs = tmp_path_factory.mktemp("runs")
    shutil.copytree(content_run, runs / "titles")
    shutil.copytree(content_run, runs / "again")
    shutil.copytree(cycle_run, runs / "ids")
    return runs


@contextmanager
def service(file: Path, runs: Path, *names: str) -> Iterator[Client]:
    """A replica; several may share a store."""
    store = open_store(str(file))
    models = Models([ServedModel.open(runs / name) for name in names], runs=runs, store=store)
    with asked_in_process(guarded(Service(Here(Engine(models, store)), store, Metrics()))) as client:
        yield client


def best_of(client: Client | httpx.Client, k: int = 2, **options: Any) -> list[str]:
    return ids(client.post("/recommendations", json={"history": HISTORY, "k": k, **options}))


def like(item: str) -> str:
    """The title of an item: what has it, too, is as good an answer."""
    return title(int(item[1:]))


def added(client: Client | httpx.Client, *items: dict[str, Any]) -> dict[str, Any]:
    response = client.post("/items", json={"items": list(items)})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def card(client: Client) -> dict[str, Any]:
    first: dict[str, Any] = client.get("/model").json()["models"][0]
    return first


def test_a_new_item_is_answered_searched_filtered_read_and_explained(runs: Path, tmp_path: Path) -> None:
    with service(tmp_path / "s", runs, "titles") as client:
        best = best_of(client, 1)[0]
        told = client.post(
            "/items", json={"id": "new", "title": like(best), "details": {"kind": "k9", "colour": "red"}}
        )
        assert told.json() == {"accepted": 1, "served": 1, "reason": None}
        assert set(best_of(client)) == {best, "new"}
        assert best_of(client, where={"kind": ["k9"]}) == ["new"]
        found = client.get("/items", params={"search": "NEW"}).json()["items"]
        assert found == [{"id": "new", "title": like(best), "count": 0, "details": {"kind": "k9"}}]
        assert client.get("/items/new/similar", params={"k": 1}).json()["items"][0]["id"] == best
        kept = client.post("/events", json={"user": "ann", "item": "new"})
        assert kept.json()["unknown"] == []
        assert client.get("/users/ann/history").json()["events"][0]["known"]
        unseen = client.get("/users/ann/recommendations", params={"k": 99, "keep_seen": False})
        assert "new" not in ids(unseen) and unseen.json()["fallback"] is None
        explained = client.post("/explanations", json={"history": HISTORY, "item": "new"}).json()
        assert explained["rank"] in (1, 2) and explained["item"]["title"] == like(best)
        assert (card(client)["items"], card(client)["added"], card(client)["left_out"]) == (13, 1, 0)


def test_items_outlive_a_restart_and_a_switch_and_the_newest_row_counts(runs: Path, tmp_path: Path) -> None:
    with service(tmp_path / "s", runs, "titles") as client:
        best, second = best_of(client)
        added(client, {"id": "a", "title": like(best)}, {"id": "b", "title": like(second)})
        assert added(client, {"id": "a", "title": like(second)}, {"id": 7, "title": like(best)})["served"] == 2
    with service(tmp_path / "s", runs, "titles") as client:
        assert set(best_of(client)) == {best, "7"}
        assert set(best_of(client, 5)[2:]) == {second, "a", "b"}
        assert client.put("/model", json={"run": "again"}).status_code == 200
        assert set(best_of(client)) == {best, "7"} and card(client)["added"] == 3
        assert client.post("/model/rollback").status_code == 200
        assert set(best_of(client)) == {best, "7"}


def test_a_run_by_ids_keeps_what_a_later_one_can_take(runs: Path, tmp_path: Path) -> None:
    with service(tmp_path / "s", runs, "ids", "titles") as client:
        best = best_of(client, 1, model="titles")[0]
        told = added(client, {"id": "new", "title": like(best)})
        assert (told["accepted"], told["served"]) == (1, 0) and "by their ids alone" in told["reason"]
        assert "new" not in best_of(client, 99), "it serves on, without"
        assert set(best_of(client, model="titles")) == {best, "new"}, "the run beside it takes it"
        assert (card(client)["added"], card(client)["left_out"]) == (0, 1)
        assert "model.items" in card(client)["left_out_because"]
        assert client.put("/model", json={"run": "again"}).status_code == 200
        assert set(best_of(client)) == {best, "new"}


def test_what_cannot_be_taken_is_refused_and_nothing_of_the_request_kept(runs: Path, tmp_path: Path) -> None:
    good = {"id": "good", "title": title(1)}
    with service(tmp_path / "s", runs, "titles") as client:
        for bad, sentence in [
            ({"id": "i03", "title": title(3)}, "'i03': it is an item of the run already"),
            ({"id": "mute", "title": "?"}, "'mute': .*'title'"),
            ({"id": "mute", "details": {"count": 3}}, "'count'"),
            ({"id": "", "title": title(1)}, "id"),
            ({"id": "x", "titel": title(1)}, "titel"),
            ({"title": title(1)}, "id"),
            ({"id": "x", "title": "\ud800"}, ""),
        ]:
            body = json.dumps({"items": [good, bad]}).encode()  # also of what is no Unicode
            assert_problem(client.post("/items", content=body, headers=JSON), 400, sentence)
        assert_problem(client.post("/items", json={"title": "nothing"}), 400, "needs an id")
        assert_problem(client.post("/items", json={"items": [good] * (MOST_ITEMS + 1)}), 400, str(MOST_ITEMS))
        assert client.post("/items", json={"items": []}).json() == {"accepted": 0, "served": 0, "reason": None}
        assert card(client)["added"] == 0
    with service(tmp_path / "s", runs, "titles") as client:
        assert card(client)["added"] == 0


def test_under_load_a_new_item_is_answered_within_a_second_by_every_worker_and_replica(
    runs: Path, tmp_path: Path
) -> None:
    """Every request on a connection of its own, so that all workers are asked."""
    options = (runs / "titles", "--store", tmp_path / "s", "--workers", "2")
    with serving(*options, cwd=tmp_path) as served, serving(*options[:3], cwd=tmp_path) as replica:
        best = best_of(served.client, 1)[0]
        clock = itertools.count()
        began = time.monotonic() + 0.1

        def ask(_: object) -> tuple[float, str, bool]:
            """At its moment: a hundred a second, every fifth to the replica."""
            turn = next(clock)
            time.sleep(max(0.0, began + turn / RATE - time.monotonic()))
            url = replica.url if turn % 5 == 0 else served.url
            sent = time.monotonic()
            answer = httpx.post(f"{url}/recommendations", json={"history": HISTORY, "k": 2}, trust_env=False, timeout=9)
            return sent, url, "new" in ids(answer)  # ids: it must have been answered

        with ThreadPoolExecutor(16) as threads:
            asked = threads.map(ask, range(2 * RATE))
            time.sleep(max(0.0, began + 0.5 - time.monotonic()))
            assert added(served.client, {"id": "new", "title": like(best)}) == {
                "accepted": 1,
                "served": 1,
                "reason": None,
            }
            posted = time.monotonic()
            answers = list(asked)
        late = Counter((url, found) for sent, url, found in answers if sent > posted + 1)
        assert late[served.url, True] >= 10 and late[replica.url, True] >= 3, "there were questions enough"
        assert late[served.url, False] == late[replica.url, False] == 0, "all follow within a second"
        assert not any(found for sent, _, found in answers if sent < posted - 5)
        for one in (served, replica):
            one.stop()
