"""KV caches in the service: one token per event, the same answers, deletion of users."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from settings_tables import model_settings
from small_service import Client, guarded, in_process_client, models_of, post_events, small_service

from segue.data.vocabulary import Vocabulary
from segue.errors import InputError
from segue.index.exact import ExactIndex
from segue.models.build import build_model
from segue.recommend.recommender import Recommender
from segue.serving.engine import engine as engine_module
from segue.serving.engine.channel import LocalEngine
from segue.serving.engine.engine import ServingEngine
from segue.serving.engine.models import Models
from segue.serving.engine.served_model import ServedModel
from segue.serving.requests import OverloadedError, RecommendationQuery
from segue.serving.service import Service
from segue.serving.settings import ServiceSettings
from segue.serving.store.store import Event, HistoryStore, open_store

ITEMS = [f"i{number:02}" for number in range(60)]
LENGTH = 24


def recommender_of(seed: int = 3) -> Recommender:
    """A model with a KV cache whose answers depend on the query time."""
    settings = model_settings(kind="hstu", width=8, depth=2, heads=2, length=LENGTH, positions="oldest")
    model = build_model(settings, len(ITEMS), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)), alpha=0.3)
    table = pl.DataFrame({"id": ITEMS, "count": [1] * len(ITEMS)})
    return Recommender(model, ExactIndex.build(model.item_vectors()), Vocabulary(table), seen="kept")


@pytest.fixture(name="service")
def service_fixture(tmp_path: Path) -> Service:
    return small_service(tmp_path / "events.sqlite", recommender_of(), recommender_of(seed=4))


@pytest.fixture(name="client")
def client_fixture(service: Service) -> Iterator[Client]:
    with in_process_client(guarded(service)) as client:
        yield client


def encoding_metrics(client: Client) -> dict[str, float]:
    """The metrics of encodings."""
    families = text_string_to_metric_families(client.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    names = {"segue_encodings_total", "segue_cache_bytes"}
    return {sample.labels.get("extent", "bytes"): sample.value for sample in samples if sample.name in names}


def test_a_cached_user_is_answered_like_a_history_without_a_cache(
    client: Client, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every event changes the next answer, over steps of the window; late events too."""
    clock = SimpleNamespace(time=lambda: 500.0 + 1000 * len(events) ** 2)
    monkeypatch.setattr(engine_module, "time", clock)  # constant between two requests
    events: list[dict[str, Any]] = []
    for number in range(70):
        late = number in (30, 51)
        time_s = 500.0 + 1000 * (number - 3 if late else number)
        events.append({"item": ITEMS[number * 7 % 60], "time": time_s})
        post_events(client, {"user": "anna", **events[-1]})
        for model in ("first", "second") if number % 10 == 0 else ("first",):
            options = {"k": 7, "model": model}
            cached = client.get("/users/anna/recommendations", params=options).json()
            uncached = client.post("/recommendations", json={**options, "history": events}).json()
            assert [item["id"] for item in cached["items"]] == [item["id"] for item in uncached["items"]]
            scores = [item["score"] for item in cached["items"]]
            assert scores == pytest.approx([item["score"] for item in uncached["items"]], abs=1e-4)
    assert [model.kv_caches.users for model in models_of(service).all] == [["anna"], ["anna"]]
    deadline = time.monotonic() + 5
    while (metrics := encoding_metrics(client))["new"] + metrics["whole"] < 154 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert metrics["new"] > 35 and metrics["new"] + metrics["whole"] == 154
    assert metrics["bytes"] == sum(model.kv_caches.bytes for model in models_of(service).all)


def test_a_deleted_user_is_in_no_cache(client: Client, service: Service) -> None:
    for user in ("anna", "bo"):
        post_events(client, *({"user": user, "item": item} for item in ITEMS[:20]))
        for model in ("first", "first", "second", "second"):
            client.get(f"/users/{user}/recommendations", params={"model": model})
    assert [model.kv_caches.users for model in models_of(service).all] == [["anna", "bo"]] * 2
    assert client.delete("/users/anna").json() == {"removed": 20}
    assert [model.kv_caches.users for model in models_of(service).all] == [["bo"]] * 2


@pytest.fixture(name="store")
def store_fixture(tmp_path: Path) -> Iterator[HistoryStore]:
    store = open_store(str(tmp_path / "kept.sqlite"))
    yield store
    store.close()


def queried_engine(store: HistoryStore, *users: str, times: int) -> ServingEngine:
    engine = ServingEngine(Models([ServedModel("first", recommender_of())], runs=None, store=store), store)
    store.append(
        [Event(user=user, item=item, time=position) for user in users for position, item in enumerate(ITEMS[:20])]
    )
    for _ in range(times):
        engine.answer([RecommendationQuery(user=user) for user in users])
    return engine


def test_users_deleted_by_another_process_are_dropped(store: HistoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each check looks up some of the users, in rotation."""
    monkeypatch.setattr(engine_module, "USERS_PER_CHECK", 2)
    users = [f"user-{number}" for number in range(5)]
    engine = queried_engine(store, *users, times=2)
    assert engine.models.active.kv_caches.users == users
    for user in ("user-1", "user-4"):
        store.delete_users([user])
    cached_users = []
    for _ in range(3):
        counts = engine.drop_deleted()
        cached_users.append(engine.models.active.kv_caches.users)
    assert cached_users == [["user-0", "user-2", "user-3", "user-4"]] * 2 + [["user-0", "user-2", "user-3"]]
    assert counts == (0, 0, engine.models.active.kv_caches.bytes)
    for _ in range(10):
        engine.drop_deleted()
    assert engine.models.active.kv_caches.users == ["user-0", "user-2", "user-3"]


def test_a_user_deleted_during_an_answer_is_not_cached_by_it(
    store: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The history was read before the user was removed: its cache must not outlive the deletion."""
    engine = queried_engine(store, "anna", times=1)
    model = engine.models.active.recommender.model
    encoding, deleted = threading.Event(), threading.Event()
    encode = model.query_with_kv

    def slow(*arguments: Any) -> Any:
        encoding.set()
        assert deleted.wait(10)
        return encode(*arguments)

    monkeypatch.setattr(model, "query_with_kv", slow)
    answering = threading.Thread(target=engine.answer, args=([RecommendationQuery(user="anna")],))
    answering.start()
    assert encoding.wait(10)
    store.delete_users(["anna"])
    deleting = threading.Thread(target=engine.drop_user, args=("anna",))
    deleting.start()
    deleting.join(0.2)
    deleted.set()
    for thread in (answering, deleting):
        thread.join(10)
        assert not thread.is_alive()
    assert engine.models.active.kv_caches.users == []


def test_a_user_is_deleted_while_the_engine_restarts(
    client: Client, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    post_events(client, {"user": "anna", "item": "i01"})

    class Restarting(LocalEngine):
        async def call(self, channel: Any, method: str, *arguments: Any) -> Any:
            if method == "drop_user":
                raise OverloadedError("restarting", "The engine of the service is starting again.")
            return await super().call(channel, method, *arguments)

    local = service._engine
    assert isinstance(local, LocalEngine)
    monkeypatch.setattr(service, "_engine", Restarting(local.engine))
    assert client.delete("/users/anna").json() == {"removed": 1}


def test_the_cache_bound_is_shared_by_the_runs_of_a_service(cycle_run: Path, tmp_path: Path) -> None:
    other, store = tmp_path / "other", str(tmp_path / "store.sqlite")
    shutil.copytree(cycle_run, other)
    for runs, megabytes, each in (((cycle_run, other), 256, 128_000_000), ((cycle_run,), 0, 0)):
        engine = ServingEngine.open(ServiceSettings(runs=runs, runs_folder=tmp_path, store=store, cache_mb=megabytes))
        try:
            assert {model.kv_caches.most_bytes for model in engine.models.all} == {each}
            assert engine.switch("other").active == "other"
            assert engine.models.active.kv_caches.most_bytes == each
        finally:
            engine.close()
    with pytest.raises(InputError, match="--cache-mb must be at least 0, which caches nothing, got -1"):
        ServiceSettings(runs=(cycle_run,), cache_mb=-1)
