"""POST /items: stored before the response, recommended by every replica within a second, after any switch."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import polars as pl
import pytest
from planted_logs import title
from running_service import serving
from small_service import Client, assert_problem, guarded, ids, in_process_client

from segue.data.read.catalogue import fitted
from segue.data.vocabulary import Vocabulary
from segue.serving.engine.catalogue_search import new_rows
from segue.serving.engine.channel import LocalEngine
from segue.serving.engine.engine import ServingEngine
from segue.serving.engine.models import Models
from segue.serving.engine.served_model import ServedModel
from segue.serving.http.bodies import MAX_NEW_ITEMS, NewItemsBody
from segue.serving.http.metrics import Metrics
from segue.serving.requests import RecommendationQuery
from segue.serving.service import Service
from segue.serving.store.store import AddedItem, Event, open_store

HISTORY = ["i01", "i02"]
JSON = {"content-type": "application/json"}
RATE = 100  # requests a second


@pytest.fixture(name="runs", scope="module")
def runs_folder(content_run: Path, cycle_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of the same items: two with title vectors, one with ids alone."""
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
    with in_process_client(guarded(Service(LocalEngine(ServingEngine(models, store)), store, Metrics()))) as client:
        yield client


def best_of(client: Client | httpx.Client, k: int = 2, **options: Any) -> list[str]:
    return ids(client.post("/recommendations", json={"history": HISTORY, "k": k, **options}))


def title_of(item: str) -> str:
    """The title of an item; a new item with this title gets the same score."""
    return title(int(item[1:]))


def add_items(client: Client | httpx.Client, *items: dict[str, Any]) -> dict[str, Any]:
    response = client.post("/items", json={"items": list(items)})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def card(client: Client) -> dict[str, Any]:
    first: dict[str, Any] = client.get("/model").json()["models"][0]
    return first


def test_a_new_item_is_recommended_searched_filtered_and_explained(runs: Path, tmp_path: Path) -> None:
    with service(tmp_path / "s", runs, "titles") as client:
        best = best_of(client, 1)[0]
        response = client.post(
            "/items", json={"id": "new", "title": title_of(best), "details": {"kind": "k9", "colour": "red"}}
        )
        assert response.json() == {"accepted": 1, "served": 1, "reason": None}
        assert set(best_of(client)) == {best, "new"}
        assert best_of(client, where={"kind": ["k9"]}) == ["new"]
        matches = client.get("/items", params={"search": "NEW"}).json()["items"]
        assert matches == [{"id": "new", "title": title_of(best), "count": 0, "details": {"kind": "k9"}}]
        assert client.get("/items/new/similar", params={"k": 1}).json()["items"][0]["id"] == best
        event = client.post("/events", json={"user": "ann", "item": "new"})
        assert event.json()["unknown"] == []
        assert client.get("/users/ann/history").json()["events"][0]["known"]
        unseen = client.get("/users/ann/recommendations", params={"k": 99, "keep_seen": False})
        assert "new" not in ids(unseen) and unseen.json()["fallback"] is None
        explanation = client.post("/explanations", json={"history": HISTORY, "item": "new"}).json()
        assert explanation["rank"] in (1, 2) and explanation["item"]["title"] == title_of(best)
        assert (card(client)["items"], card(client)["added"], card(client)["left_out"]) == (13, 1, 0)
        assert (card(client)["manifest"]["items"], card(client)["manifest"]["added"]["items"]) == (13, 1)


def test_details_are_converted_to_the_type_of_the_column() -> None:
    vector = pl.Array(pl.Float32, 2)
    table = pl.DataFrame(schema=[("id", pl.String), ("count", pl.Int64), ("tags", pl.List(pl.String)), ("v", vector)])
    details: list[dict[str, Any]] = [{"tags": ["a", "b"], "v": [1, 2]}, {"tags": "a"}, {"v": ["a", 2.0]}, {}]
    body = msgspec.json.encode({"items": [{"id": str(number), "details": one} for number, one in enumerate(details)]})
    items = [AddedItem(str(item.id), item.details) for item in msgspec.json.decode(body, type=NewItemsBody).as_list()]
    rows, errors = fitted(new_rows(items, Vocabulary(table)), table)
    assert rows["tags"].to_list() == [["a", "b"], ["a"], None, None]
    assert rows["v"].to_list() == [[1.0, 2.0], None, None, None]
    assert [error is None for error in errors] == [True, True, False, True]


def test_added_items_survive_a_restart_and_a_switch_with_their_newest_row(runs: Path, tmp_path: Path) -> None:
    with service(tmp_path / "s", runs, "titles") as client:
        best, second = best_of(client)
        add_items(client, {"id": "a", "title": title_of(best)}, {"id": "b", "title": title_of(second)})
        assert (
            add_items(client, {"id": "a", "title": title_of(second)}, {"id": 7, "title": title_of(best)})["served"] == 2
        )
    with service(tmp_path / "s", runs, "titles") as client:
        assert set(best_of(client)) == {best, "7"}
        assert set(best_of(client, 5)[2:]) == {second, "a", "b"}
        assert client.put("/model", json={"run": "again"}).status_code == 200
        assert set(best_of(client)) == {best, "7"} and card(client)["added"] == 3
        assert client.post("/model/rollback").status_code == 200
        assert set(best_of(client)) == {best, "7"}


def test_a_run_of_ids_stores_items_for_a_later_run_with_titles(runs: Path, tmp_path: Path) -> None:
    with service(tmp_path / "s", runs, "ids", "titles") as client:
        best = best_of(client, 1, model="titles")[0]
        report = add_items(client, {"id": "new", "title": title_of(best)})
        assert (report["accepted"], report["served"]) == (1, 0) and "by their ids alone" in report["reason"]
        assert "new" not in best_of(client, 99), "the run of ids still answers, without it"
        assert set(best_of(client, model="titles")) == {best, "new"}, "the run with titles recommends it"
        assert (card(client)["added"], card(client)["left_out"]) == (0, 1)
        assert "model.items" in card(client)["left_out_because"]
        assert client.put("/model", json={"run": "again"}).status_code == 200
        assert set(best_of(client)) == {best, "new"}


def test_a_kv_cache_is_valid_until_an_item_in_it_changes(runs: Path, tmp_path: Path) -> None:
    """Adding an item keeps the KV caches; changing the content of an encoded item drops them."""
    store = open_store(str(tmp_path / "s"))
    with contextlib.closing(
        ServingEngine(Models([ServedModel.open(runs / "titles")], runs=runs, store=store), store)
    ) as engine:
        engine.add_items([AddedItem("new", {"title": title(1)})])
        history = [*(f"i{number % 12:02}" for number in range(15)), "new", "i05"]
        store.append([Event("ann", item, time_s) for time_s, item in enumerate(history)])
        scores = [trained_scores(engine) for _ in range(3)][-1]
        engine.drop_deleted()
        engine.add_items([AddedItem("newer", {"title": title(3)})])
        assert trained_scores(engine) == scores
        assert engine.drop_deleted()[:2] == (1, 0), "no event was encoded again"
        engine.add_items([AddedItem("new", {"title": title(9)})])
        new_scores = trained_scores(engine)
        assert new_scores != scores
        assert engine.drop_deleted()[:2] == (0, 1)
    store = open_store(str(tmp_path / "s"))
    with contextlib.closing(
        ServingEngine(Models([ServedModel.open(runs / "titles")], runs=runs, store=store), store)
    ) as engine:
        assert trained_scores(engine) == new_scores


def trained_scores(engine: ServingEngine) -> dict[str, float]:
    """Scores of the trained items for a user, to a few decimals: rounding differs with the number of tokens."""
    [answer] = engine.answer([RecommendationQuery(user="ann", k=99)])
    assert not isinstance(answer, Exception)
    items = json.loads(answer[0])["items"]
    return {item["id"]: round(item["score"], 3) for item in items if not item["id"].startswith("new")}


def test_an_invalid_item_refuses_its_whole_request(runs: Path, tmp_path: Path) -> None:
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
            body = json.dumps({"items": [good, bad]}).encode()  # invalid Unicode too
            assert_problem(client.post("/items", content=body, headers=JSON), 400, sentence)
        assert_problem(client.post("/items", json={"title": "nothing"}), 400, "needs an id")
        assert_problem(client.post("/items", json={"items": [good] * (MAX_NEW_ITEMS + 1)}), 400, str(MAX_NEW_ITEMS))
        assert client.post("/items", json={"items": []}).json() == {"accepted": 0, "served": 0, "reason": None}
        assert card(client)["added"] == 0
    with service(tmp_path / "s", runs, "titles") as client:
        assert card(client)["added"] == 0


def test_under_load_a_new_item_is_recommended_within_a_second_on_every_replica(runs: Path, tmp_path: Path) -> None:
    """An open loop of a hundred requests a second, each on its own connection, from half a second before the item to a
    second after it."""
    options = (runs / "titles", "--store", tmp_path / "s")
    with serving(*options, cwd=tmp_path) as server, service(tmp_path / "s", runs, "titles") as replica:
        best = best_of(server.client, 1)[0]
        start, stop = time.monotonic(), threading.Event()

        def ask() -> tuple[float, bool]:
            """The request time, and whether the answer has the new item."""
            return time.monotonic(), "new" in recommend(server.url)

        def ask_steadily() -> list[Future[tuple[float, bool]]]:
            futures = []
            while not stop.is_set():
                futures.append(threads.submit(ask))
                time.sleep(max(0.0, start + len(futures) / RATE - time.monotonic()))
            return futures

        with ThreadPoolExecutor(32) as threads:
            steady = threads.submit(ask_steadily)
            try:
                time.sleep(0.5)
                report = add_items(server.client, {"id": "new", "title": title_of(best)})
                post_time = time.monotonic()
                while "new" not in best_of(replica):
                    assert time.monotonic() < post_time + 1, "a replica follows within a second"
                    time.sleep(0.05)
                time.sleep(max(0.0, post_time + 1.2 - time.monotonic()))
            finally:
                stop.set()
            seconds = time.monotonic() - start
            answers = [future.result() for future in steady.result()]  # raises if a request failed
        assert report == {"accepted": 1, "served": 1, "reason": None}
        late = [has_item for sent, has_item in answers if sent > post_time + 1]
        assert late and all(late)
        assert len(answers) > 0.9 * RATE * seconds, "requests were sent and answered all the time"
        server.stop()


def recommend(url: str) -> list[str]:
    """The ids of an answer, which must be a success. Without httpx, whose connections cost more than an answer."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=9)
    with contextlib.closing(connection):
        connection.request("POST", "/recommendations", json.dumps({"history": HISTORY, "k": 2}), JSON)
        answer = connection.getresponse()
        assert answer.status == 200
        return [item["id"] for item in json.loads(answer.read())["items"]]
