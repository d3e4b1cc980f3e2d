"""The service through its HTTP surface: answers, problems as sentences, the OpenAPI document, the pages."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from math import log
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from small_counts import counts_of
from small_service import (
    Client,
    assert_problem,
    guarded,
    ids,
    in_process_client,
    models_of,
    popular,
    small_service,
    tiny_recommender,
)

from segue.errors import InputError
from segue.recommend.recommender import Recommender
from segue.serving import service as service_module
from segue.serving.http.app import create_app
from segue.serving.http.bodies import MAX_BODY_BYTES, MAX_K
from segue.serving.http.guard import ROLES
from segue.serving.http.server import listening_socket
from segue.serving.service import Service

ITEMS = ["007", "7", "a,b", "a//b", "x/y/../z", "☕🫖", "é+&="]
JSON = {"content-type": "application/json"}

ROUTES = {
    ("post", "/events"): {400, 413, 415, 503},
    ("get", "/users/{id}/recommendations"): {400, 404, 503},
    ("post", "/recommendations"): {400, 404, 413, 415, 503},
    ("get", "/items/{id}/similar"): {400, 404, 503},
    ("get", "/items"): {400, 503},
    ("post", "/items"): {400, 413, 415, 503},
    ("get", "/users/{id}/history"): {400, 503},
    ("delete", "/users/{id}"): {400, 503},
    ("post", "/explanations"): {400, 404, 413, 415, 503},
    ("post", "/plans"): {400, 404, 413, 415, 503},
    ("get", "/model"): {503},
    ("put", "/model"): {400, 409, 413, 415, 503},
    ("post", "/model/rollback"): {409, 413, 415, 503},
    ("get", "/health/live"): set(),
    ("get", "/health/ready"): {503},
    ("get", "/metrics"): set(),
}


@pytest.fixture(name="recommender", scope="module")
def recommender_fixture() -> Recommender:
    return tiny_recommender(ITEMS, title=[f"<b>{name}</b>" for name in ITEMS])


@pytest.fixture(name="client", scope="module")
def client_fixture(recommender: Recommender, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    store = tmp_path_factory.mktemp("store") / "events.sqlite"
    service = small_service(store, recommender)
    with in_process_client(create_app(service, examples=popular(service))) as client:
        yield client


# --- answers --------------------------------------------------------------------------------------------------------


def test_recommendations(client: Client, recommender: Recommender) -> None:
    body: dict[str, Any] = {"history": ["007", "nobody", {"item": "a,b"}], "k": 3}
    response = client.post("/recommendations", json=body)
    expected = recommender.recommend(["007", "nobody", "a,b"], k=3)
    assert len(expected.items) == 3
    assert response.json() == {
        "items": [{"id": item.id, "title": item.title, "score": pytest.approx(item.score)} for item in expected.items],
        "unknown": ["nobody"],
        "fallback": None,
        "model": "first",
    }


def test_options_reach_the_recommender(client: Client) -> None:
    def answer_ids(**options: Any) -> set[str]:
        return set(ids(client.post("/recommendations", json={"history": ["007"], "k": 100, **options})))

    assert answer_ids() == set(ITEMS) - {"007"}
    assert answer_ids(keep_seen=True) == set(ITEMS)
    assert answer_ids(exclude=["a,b", 7]) == set(ITEMS) - {"007", "a,b", "7"}
    assert answer_ids(only=["☕🫖", "nobody"]) == {"☕🫖"}
    assert answer_ids(now="2026-01-01T00:00:00Z") == set(ITEMS) - {"007"}
    assert answer_ids(now=1_700_000_000.5) == set(ITEMS) - {"007"}


def test_an_empty_history_is_answered_by_popularity(client: Client) -> None:
    answer = client.post("/recommendations", json={"history": [], "k": 2}).json()
    assert answer["fallback"] == "popularity"
    assert [item["id"] for item in answer["items"]] == ITEMS[:2]


def test_entries_with_times_are_sorted(client: Client) -> None:
    entries = [
        {"item": "7", "time": "2026-01-02T00:00:00Z"},
        {"item": "007", "time": 1767225600, "value": 2, "kind": "buy"},
    ]
    with_times = client.post("/recommendations", json={"history": entries}).json()
    sorted_ids = client.post("/recommendations", json={"history": ["007", "7"]}).json()
    assert with_times == sorted_ids
    assert with_times != client.post("/recommendations", json={"history": ["7", "007"]}).json()


def test_similar_items(client: Client, recommender: Recommender) -> None:
    for name in ITEMS:
        response = client.get(f"/items/{quote(name, safe='')}/similar?k=4")
        assert ids(response) == recommender.similar(name, 4).ids
        assert (response.json()["fallback"], response.json()["unknown"]) == (None, [])
    assert_problem(client.get("/items/nobody/similar"), 404, "The item 'nobody' is not one of the 7 items")


def test_the_framework_caches_no_id(client: Client) -> None:
    """Litestar caches every routed path; a deleted user's id must not stay there."""
    routed = client.app.asgi_router.handle_routing.cache_info
    sizes = []
    for name in ITEMS:
        user = quote(name, safe="")
        assert client.get(f"/users/{user}/history").json()["user"] == name
        assert client.get(f"/users/{user}/recommendations?keep_seen=true").status_code == 200
        assert client.delete(f"/users/{user}").json() == {"removed": 0}
        sizes.append(routed().currsize)
    assert sizes == [sizes[0]] * len(ITEMS)


def test_explanations(client: Client, recommender: Recommender) -> None:
    history = ["007", "nobody", "7"]
    expected = recommender.explain(history)
    answer = client.post("/explanations", json={"history": history}).json()
    assert answer["item"]["id"] == expected.item.id
    assert (answer["rank"], answer["unknown"], answer["fallback"]) == (1, ["nobody"], None)
    assert [one["contribution"] for one in answer["contributions"]] == pytest.approx(
        [one.contribution for one in expected.contributions]
    )
    assert answer["contributions"][1] == {"item": "nobody", "title": None, "known": False, "contribution": None}
    assert answer["attention"][0]["columns"] == [0, 2]
    assert client.post("/explanations", json={"history": history, "attention": False}).json()["attention"] == []
    seen_item = client.post("/explanations", json={"history": history, "item": 7}).json()
    assert (seen_item["item"]["id"], seen_item["rank"]) == ("7", None), "a seen item can be explained but has no rank"
    unseen = client.post("/explanations", json={"history": history, "item": 7, "keep_seen": True}).json()
    assert unseen["rank"] >= 1
    assert (answer["counts"], answer["counts_score"]) == ([], 0.0)


def test_an_explanation_has_the_counts_in_words(tmp_path: Path) -> None:
    """The first item came twice after the second one, and counts are all that matters."""
    recommender = tiny_recommender(ITEMS, title=[f"<b>{name}</b>" for name in ITEMS])
    recommender.item_counts = counts_of([3] * len(ITEMS), [{(2, 1): 2}, {}, {}], {}, after_1=1000.0)
    with in_process_client(create_app(small_service(tmp_path / "events.sqlite", recommender))) as client:
        answer = client.post("/explanations", json={"history": ["nobody", "7"]}).json()
    assert answer["item"]["id"] == "007"
    assert answer["counts_score"] == pytest.approx(1000 * log(3))
    assert answer["counts"] == [
        {
            "item": "7",
            "title": "<b>7</b>",
            "kind": "followed",
            "distance": 1,
            "count": 2,
            "score": answer["counts_score"],
            "sentence": "followed “<b>7</b>” 2 times",
        }
    ]


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        ({}, 400, "either a history or a user"),
        ({"history": ["7"], "user": "u"}, 400, "either a history or a user"),
        ({"history": ["7"], "item": "nobody"}, 400, "The item 'nobody' is not one of the 7 items"),
        ({"history": ITEMS}, 400, "no item is left"),
        ({"history": ["7"], "model": "third"}, 404, "No model called 'third' is being served; there is: first."),
    ],
)
def test_invalid_explanations_are_refused(client: Client, body: dict[str, Any], status: int, sentence: str) -> None:
    assert_problem(client.post("/explanations", json=body), status, sentence)


# --- problems -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "no body"),
        (b"{bad", "cannot be read as JSON"),
        (b'{"history": ["\xff"]}', "cannot be read as JSON"),
        (b'{"history": ["\\ud800"]}', "cannot be read as JSON"),
        (b'{"history": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", "got `array`"),
        (b'{"history": [], "x": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", "unknown field `x`"),
        (b"[]", "cannot be used: Expected `object`, got `array`"),
        (b"{}", "missing required field `history`"),
        (b'{"history": "007"}', r"Expected `array`, got `str` - at `\$\.history`"),
        (b'{"history": [1.5]}', r"got `float` - at `\$\.history\[0\]`"),
        (b'{"history": [null]}', r"got `null` - at `\$\.history\[0\]`"),
        (b'{"history": [true]}', r"got `bool` - at `\$\.history\[0\]`"),
        (b'{"history": [' + b"7" * 5000 + b"]}", "out of range"),
        (b'{"history": [{"itm": "a"}]}', "unknown field `itm`"),
        (b'{"history": [{"item": "a", "time": "yesterday"}]}', "seconds since 1970 or ISO 8601 .* got 'yesterday'"),
        (b'{"history": [{"item": "a", "time": 1700000000000}]}', "divide milliseconds by 1000"),
        (b'{"history": [{"item": "a", "value": 1e999}]}', "out of range"),
        (b'{"history": [' + b"1," * 10_000 + b"1]}", "length <= 10000"),
        (b'{"history": [], "exclude": [' + b"1," * 10_000 + b"1]}", "length <= 10000"),
        (b'{"history": [], "k": 0}', r"Expected `int` >= 1 - at `\$\.k`"),
        (b'{"history": [], "k": 1001}', r"Expected `int` <= 1000 - at `\$\.k`"),
        (b'{"history": [], "k": "10"}', "Expected `int`, got `str`"),
        (b'{"history": [], "k": 10.5}', "Expected `int`, got `float`"),
        (b'{"history": [], "keep_seen": "yes"}', "Expected `bool | null`, got `str`"),
        (b'{"history": [], "exclude": "007"}', "Expected `array | null`, got `str`"),
        (b'{"history": [], "user": "me"}', "unknown field `user`"),
        (b'{"history": [], "now": -1e15}', "no date in seconds"),
    ],
)
def test_bad_bodies_are_problems(client: Client, body: bytes, sentence: str) -> None:
    assert_problem(client.post("/recommendations", content=body, headers=JSON), 400, sentence)


def test_the_largest_request(client: Client) -> None:
    assert len(ids(client.post("/recommendations", json={"history": ["nobody"] * 10_000, "k": MAX_K}))) == 7


def test_a_body_too_large_without_a_content_length(client: Client) -> None:
    """test_hostile has the case with a Content-Length."""

    def pieces() -> Iterator[bytes]:
        yield b'{"history": ["'
        for _ in range(20):
            yield b"x" * (MAX_BODY_BYTES // 10)
        yield b'"]}'

    assert_problem(client.post("/recommendations", content=pieces(), headers=JSON), 413, "too large")


@pytest.mark.parametrize(
    ("path", "status", "sentence"),
    [
        ("/items/007/similar?k=0", 400, "k: Expected `int` >= 1"),
        ("/items/007/similar?k=1001", 400, "k: Expected `int` <= 1000"),
        ("/items/007/similar?k=many", 400, "k: Expected `int`"),
        ("/items/%ff/similar", 400, "percent-encoded"),
        ("/items//similar", 404, "nothing at"),
        ("/items/007", 404, "nothing at /items/007"),
        ("/items/007/similar?model=third", 404, "No model called 'third'"),
        ("/items?limit=0", 400, "limit: Expected `int` >= 1"),
        ("/items?limit=201", 400, "limit: Expected `int` <= 200"),
        ("/items?search=" + "x" * 1025, 400, "search: Expected `str` of length <= 1024"),
        ("/users/u/history?limit=10001", 400, "limit: Expected `int` <= 10000"),
        ("/users//history", 405, "does not take GET"),
        ("/users/u/recommendations?k=0", 400, "k: Expected `int` >= 1"),
        ("/users/u/recommendations?k=1001", 400, "k: Expected `int` <= 1000"),
        ("/users/u/recommendations?keep_seen=perhaps", 400, "keep_seen"),
        ("/users/u/recommendations?where=red", 400, "A filter is column:value, .* got 'red'"),
        ("/page/nothing.js", 404, "nothing at"),
        ("/page/..%2Fapp.py", 404, "nothing at"),
        ("/recommendations", 405, "does not take GET"),
    ],
)
def test_bad_requests_are_problems(client: Client, path: str, status: int, sentence: str) -> None:
    assert_problem(client.get(path), status, sentence)


def test_a_bug_is_a_problem_without_a_traceback(
    client: Client, recommender: Recommender, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("the secret inside")

    monkeypatch.setattr(recommender, "similar", broken)
    monkeypatch.setattr(recommender, "answer", broken)
    for response in (client.get("/items/007/similar"), client.get("/users/u/recommendations")):
        assert_problem(response, 500, "its log has the reason")
        assert "secret" not in response.text
    assert caplog.text.count("RuntimeError: the secret inside") == 2
    monkeypatch.undo()
    assert client.get("/users/u/recommendations").status_code == 200, "the thread of the engine is alive"


# --- overload -------------------------------------------------------------------------------------------------------


class Gate:
    """Blocks every call until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def before(self, work: Any) -> Any:
        def wait(*arguments: Any, **options: Any) -> Any:
            self.reached.set()
            assert self.opened.wait(20)
            return work(*arguments, **options)

        return wait


async def _run_queries(service: Service, send: Any, app: Any = None) -> Any:
    transport = httpx.ASGITransport(app or guarded(service))
    async with service.running(), httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await send(client)


def test_a_full_queue_answers_503(recommender: Recommender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "MAX_QUERIES", 3)
    monkeypatch.setattr(service_module, "MAX_WRITES", 2)
    service = small_service(tmp_path / "s", recommender)
    app = guarded(service)
    gate = Gate()
    monkeypatch.setattr(recommender, "answer", gate.before(recommender.answer))
    monkeypatch.setattr(service.store, "append", gate.before(service.store.append))

    async def send(client: httpx.AsyncClient) -> tuple[list[httpx.Response], list[httpx.Response], str]:
        queries = [asyncio.ensure_future(client.get("/users/u/recommendations")) for _ in range(5)]
        event = {"user": "u", "item": "7"}
        writes = [asyncio.ensure_future(client.post("/events", json=event)) for _ in range(5)]
        responses, _ = await asyncio.wait(queries + writes, timeout=0.3)
        assert len(responses) == 5, "the others wait for the gate"
        assert (await client.get("/health/live")).status_code == 200
        waiting = (await client.get("/metrics")).text
        assert 'segue_queue_length{queue="answers"} 3.0' in waiting and 'queue="events"} 2.0' in waiting
        gate.opened.set()
        answers = await asyncio.gather(*queries)
        receipts = await asyncio.gather(*writes)
        return answers, receipts, (await client.get("/metrics")).text

    answers, receipts, metrics = asyncio.run(_run_queries(service, send, app))
    assert [answer.status_code for answer in answers] == [200] * 3 + [503] * 2
    assert [answer.status_code for answer in receipts] == [200] * 2 + [503] * 3
    for response in [answer for answer in answers + receipts if answer.status_code == 503]:
        assert_problem(response, 503, "requests wait already; retry in a moment")
        assert response.headers["retry-after"] == "1"
    assert 'segue_unavailable_total{reason="queue"} 5.0' in metrics


def test_a_missed_deadline_answers_503(
    recommender: Recommender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "DEADLINE", 0.05)
    service = small_service(tmp_path / "s", recommender)
    app = guarded(service)
    gate = Gate()
    monkeypatch.setattr(recommender, "answer", gate.before(recommender.answer))

    async def send(client: httpx.AsyncClient) -> list[httpx.Response]:
        late = await client.get("/users/u/recommendations")
        gate.opened.set()
        return [late, await client.get("/users/u/recommendations")]

    late, next_response = asyncio.run(_run_queries(service, send, app))
    assert_problem(late, 503, "no answer within 0.05 s; retry")
    assert late.headers["retry-after"] == "1"
    assert next_response.status_code == 200


def test_a_slow_explanation_or_search_blocks_no_other_request(
    recommender: Recommender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = small_service(tmp_path / "s", recommender)
    app = guarded(service)
    gate = Gate()
    monkeypatch.setattr(recommender, "explain", gate.before(recommender.explain))
    catalogue = models_of(service).active.catalogue
    monkeypatch.setattr(catalogue, "search", gate.before(catalogue.search))

    async def send(client: httpx.AsyncClient) -> list[httpx.Response]:
        slow = [
            asyncio.ensure_future(client.post("/explanations", json={"history": ["7", "007"]})),
            asyncio.ensure_future(client.get("/items")),
        ]
        assert await asyncio.to_thread(gate.reached.wait, 20)
        assert (await client.post("/events", json={"user": "u", "item": "7"})).status_code == 200
        assert (await client.get("/users/u/recommendations")).json()["fallback"] is None
        assert not any(one.done() for one in slow)
        gate.opened.set()
        return list(await asyncio.gather(*slow))

    assert [answer.status_code for answer in asyncio.run(_run_queries(service, send, app))] == [200, 200]


def test_a_bad_query_in_a_batch_does_not_affect_the_others(recommender: Recommender, tmp_path: Path) -> None:
    service = small_service(tmp_path / "s", recommender)

    async def send(client: httpx.AsyncClient) -> list[httpx.Response]:
        bad = ["model=third", "where=colour:red", "where=red"]
        requests = [client.get(f"/users/u/recommendations?{text}") for text in [*bad, "", "exclude=7", "only=7"]]
        return list(await asyncio.gather(*requests))

    answers = asyncio.run(_run_queries(service, send))
    assert [answer.status_code for answer in answers] == [404, 400, 400, 200, 200, 200]
    assert_problem(answers[1], 400, "no column 'colour' to filter by; its columns are: none.")
    assert ids(answers[3]) == ITEMS
    assert ids(answers[4]) == [item for item in ITEMS if item != "7"]
    assert ids(answers[5]) == ["7"]


# --- the document and the pages -------------------------------------------------------------------------------------


def test_health(client: Client) -> None:
    assert client.get("/health/live").json() == {"status": "live"}
    assert client.get("/health/ready").json() == {"status": "ready"}


def test_the_document_lists_every_route_and_every_answer(client: Client) -> None:
    document = client.get("/schema/openapi.json").json()
    statuses = {
        (method, path): {int(status) for status in operation["responses"]} - {200}
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    by_guard = {
        route: {403, 414} | (set() if route[1].startswith("/health") else {401, 429}) for route in ROUTES
    }  # a probe needs no key and has no rate limit
    assert statuses == {route: own | by_guard[route] for route, own in ROUTES.items()}
    for method, path in ROUTES:
        for status, answer in document["paths"][path][method]["responses"].items():
            kinds = ["application/json", "text/plain"] if status == "200" else ["application/problem+json"]
            assert [kind in kinds for kind in answer["content"]] == [True], (path, status)


def test_every_unsafe_route_has_a_role(client: Client) -> None:
    """A route without a role would need the role admin."""
    document = client.get("/schema/openapi.json").json()
    unsafe = {
        (method.upper(), path.split("/")[1].encode(), path.count("/"))
        for path, methods in document["paths"].items()
        for method in methods
        if method != "get"
    }
    assert unsafe == set(ROLES)


def test_the_examples_of_the_document_are_answered(client: Client) -> None:
    paths = client.get("/schema/openapi.json").json()["paths"]
    for path in ("/recommendations", "/explanations", "/events", "/items"):
        example = paths[path]["post"]["requestBody"]["content"]["application/json"]["examples"]["example"]["value"]
        answer = client.post(path, json=example)
        assert (answer.status_code, answer.json().get("unknown", [])) == (200, []), path
    for path in ("/items/{id}/similar", "/users/{id}/recommendations", "/users/{id}/history"):
        parameters = paths[path]["get"]["parameters"]
        name = next(parameter["example"] for parameter in parameters if parameter["name"] == "id")
        assert client.get(path.replace("{id}", quote(name, safe=""))).status_code == 200
    assert client.delete("/users/somebody").json() == {"removed": 1}


def test_the_document_shows_ids_only_if_given_examples(recommender: Recommender, tmp_path: Path) -> None:
    with in_process_client(create_app(small_service(tmp_path / "s", recommender))) as client:
        document = client.get("/schema/openapi.json").text
    assert "somebody" not in document
    assert not any(f'"{item}"' in document for item in ITEMS)


@pytest.mark.parametrize("path", ["/", "/schema"])
def test_the_pages_load_nothing_from_elsewhere(client: Client, path: str) -> None:
    page = client.get(path)
    assert page.headers["content-type"].startswith("text/html")
    assert not re.search(r"""(src|href)=["']?(https?:|//)""", page.text)
    names = re.findall(r"""(?:src|href)=["']?(/?page/[\w.-]+)""", page.text)
    assert names
    for name in names:
        file = client.get(f"/{name.removeprefix('/')}")
        assert file.status_code == 200, name
        kinds = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
        assert file.headers["content-type"].startswith(kinds[name.rpartition(".")[2]])


# --- before serving -------------------------------------------------------------------------------------------------


def test_a_port_in_use_or_a_foreign_address_is_refused_with_a_sentence() -> None:
    with listening_socket("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(InputError, match=f"Port {port} of 127.0.0.1 is in use; choose another with --port"):
            listening_socket("127.0.0.1", port)
    with pytest.raises(InputError, match="is not an address of this machine"):
        listening_socket("192.0.2.1", 0)
    with pytest.raises(InputError, match="a number from 0 to 65535"):
        listening_socket("127.0.0.1", 99999)


def test_serving_imports_no_training_code() -> None:
    code = (
        "import sys, segue.serving.http.server\n"
        "rooms = {name.split('.')[1] for name in sys.modules if name.startswith('segue.')}\n"
        "assert 'recommend' in rooms\n"
        "sys.exit(' '.join(rooms & {'training', 'objective', 'evaluation', 'api'}) or 0)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert process.returncode == 0, process.stderr
