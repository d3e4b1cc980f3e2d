"""A service over a tiny catalogue with untrained weights: its answers are arbitrary but deterministic."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import polars as pl
import torch
import uvicorn
from litestar import Litestar
from litestar.testing import TestClient
from settings_tables import model_settings

from segue.data.vocabulary import Vocabulary
from segue.index.exact import ExactIndex
from segue.models.build import build_model
from segue.recommend.recommender import Recommender, Seen
from segue.serving.engine.channel import LocalEngine
from segue.serving.engine.engine import ServingEngine
from segue.serving.engine.models import Models
from segue.serving.engine.served_model import ServedModel
from segue.serving.http.app import create_app
from segue.serving.http.bodies import MAX_BODY_BYTES
from segue.serving.http.guard import App, Guard
from segue.serving.http.keys import Keys
from segue.serving.http.metrics import Metrics
from segue.serving.http.server import listening_socket
from segue.serving.service import Service
from segue.serving.store.store import open_store

Client = TestClient[Litestar]


def tiny_recommender(
    ids: Sequence[str],
    *,
    seed: int = 3,
    seen: Seen = "excluded",
    untrained: int = 0,
    plans: bool = False,
    **columns: Sequence[Any],
) -> Recommender:
    """An untrained model; the first ids are the most frequent ones, the last `untrained` have no events."""
    settings = model_settings(kind="seq2seq" if plans else "esasrec", width=8, depth=1, length=5)
    model = build_model(settings, len(ids), generator=torch.Generator().manual_seed(seed))
    counts = [max(0, len(ids) - untrained - rank) for rank in range(len(ids))]
    table = pl.DataFrame({"id": ids, "count": counts, **columns})
    candidates = torch.tensor([False, *(count > 0 for count in counts)]).numpy()
    index = ExactIndex.build(model.item_vectors(), candidates=candidates)
    return Recommender(model, index, Vocabulary(table), seen=seen)


def small_service(store: Path, *recommenders: Recommender, runs: Path | None = None) -> Service:
    """Recommenders called "first" and "second", over a SQLite file; `runs`: a folder of runs to switch to. The
    application that it is given to must run it."""
    entries = [ServedModel(name, model) for name, model in zip(("first", "second"), recommenders, strict=False)]
    histories = open_store(str(store))
    return Service(
        LocalEngine(ServingEngine(Models(entries, runs=runs, store=histories), histories)), histories, Metrics()
    )


def models_of(service: Service) -> Models:
    """The models behind a small service."""
    local = service._engine
    assert isinstance(local, LocalEngine)
    models: Models = local.engine.models
    return models


def popular(service: Service) -> list[str]:
    """Items for the examples of the document."""
    return models_of(service).active.recommender.recommend([], k=2).ids


def guarded(service: Service, *, keys: Keys | None = None, **options: Any) -> Guard:
    """The application of a service, behind its guard."""
    return Guard(
        create_app(service, examples=popular(service)),
        keys=keys or Keys({}),
        metrics=service.metrics,
        max_body_bytes=MAX_BODY_BYTES,
        **options,
    )


@contextmanager
def in_process_client(app: Any) -> Iterator[Client]:
    """A client that calls an application without a socket."""
    with TestClient(app, base_url="http://127.0.0.1") as client:
        yield client


@contextmanager
def on_a_socket(app: App) -> Iterator[str]:
    """An application behind uvicorn, in a thread; gives its address."""
    with listening_socket("127.0.0.1", 0) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, ws="none"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(timeout=20)
    assert not thread.is_alive()


def assert_problem(response: httpx.Response, status: int, sentence: str = "") -> None:
    """The response is a problem whose detail matches `sentence` and shows nothing internal."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body = response.json()
    assert (set(body), body["status"]) == ({"title", "status", "detail"}, status)
    assert re.search(sentence, body["detail"]), body["detail"]
    assert body["detail"].rstrip().endswith((".", "…"))
    assert "Traceback" not in response.text


def ids(response: httpx.Response) -> list[str]:
    """The ids of an answer, best first."""
    assert response.status_code == 200, response.text
    return [item["id"] for item in response.json()["items"]]


def post_events(client: Client | httpx.Client, *events: dict[str, Any]) -> dict[str, Any]:
    """Send events, which must be accepted."""
    response = client.post("/events", json={"events": list(events)})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body
