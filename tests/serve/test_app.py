"""The service through its HTTP surface: answers, hostile ids, problems as sentences, the OpenAPI document."""

from __future__ import annotations

import http.client
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, unquote

import httpx
import polars as pl
import pytest
import torch
from litestar import Litestar
from litestar.testing import TestClient

from segue.data.vocabulary import Vocabulary
from segue.errors import InputError
from segue.index.exact import ExactIndex
from segue.models.build import build_model
from segue.models.settings import ModelSettings
from segue.recommend.recommender import Recommender
from segue.serve.app import MOST_BYTES, create_app
from segue.serve.server import listening_socket, make_server

HOSTILE = [
    "a,b",
    'say "hi"',
    "x/y/../z",
    " two  spaces ",
    "☕🫖",
    "007",
    "7",
    "line\nbreak",
    "%2F",
    "?k=1#x",
    "a//b",
    "é+&=",
]


@pytest.fixture(name="recommender", scope="module")
def tiny_recommender() -> Recommender:
    ids = sorted(HOSTILE, key=str.encode)
    model = build_model(ModelSettings(width=8, depth=1, length=5), len(ids), generator=torch.Generator().manual_seed(3))
    table = pl.DataFrame({"id": ids, "count": range(len(ids), 0, -1), "title": [f"<b>{name}</b>" for name in ids]})
    return Recommender(model, ExactIndex.build(model.item_vectors()), Vocabulary(table))


@pytest.fixture(name="client", scope="module")
def test_client(recommender: Recommender) -> Iterator[TestClient[Litestar]]:
    with TestClient(create_app(recommender)) as client:
        yield client


def assert_problem(response: httpx.Response, status: int, sentence: str) -> None:
    assert response.headers["content-type"] == "application/problem+json"
    body = response.json()
    assert (response.status_code, body["status"]) == (status, status)
    assert re.search(sentence, body["detail"]), body["detail"]
    assert "Traceback" not in response.text


def test_recommendations(client: TestClient[Litestar], recommender: Recommender) -> None:
    body: dict[str, Any] = {"history": ["007", "nobody", {"item": "a,b"}], "k": 3}
    response = client.post("/recommendations", json=body)
    assert response.status_code == 200
    expected = recommender.recommend(["007", "nobody", "a,b"], k=3)
    assert response.json() == {
        "items": [{"id": item.id, "title": item.title, "score": pytest.approx(item.score)} for item in expected.items],
        "unknown": ["nobody"],
        "fallback": None,
    }
    assert len(expected.items) == 3


def test_options_reach_the_recommender(client: TestClient[Litestar]) -> None:
    def ids(**options: Any) -> list[str]:
        response = client.post("/recommendations", json={"history": ["007"], "k": 100, **options})
        assert response.status_code == 200
        return [item["id"] for item in response.json()["items"]]

    assert set(ids()) == set(HOSTILE) - {"007"}
    assert set(ids(keep_seen=True)) == set(HOSTILE)
    assert set(ids(exclude=["a,b", 7])) == set(HOSTILE) - {"007", "a,b", "7"}
    assert set(ids(only=["☕🫖", "nobody"])) == {"☕🫖"}
    assert len(ids(now="2026-01-01T00:00:00Z")) == len(HOSTILE) - 1


def test_empty_history_is_answered_by_popularity(client: TestClient[Litestar]) -> None:
    answer = client.post("/recommendations", json={"history": [], "k": 2}).json()
    assert answer["fallback"] == "popularity"
    assert [item["id"] for item in answer["items"]] == sorted(HOSTILE, key=str.encode)[:2]


def test_entries_with_times_are_sorted(client: TestClient[Litestar]) -> None:
    timed = [
        {"item": "7", "time": "2026-01-02T00:00:00Z"},
        {"item": "007", "time": 1767225600, "value": 2, "kind": "buy"},
    ]
    one = client.post("/recommendations", json={"history": timed}).json()
    other = client.post("/recommendations", json={"history": ["007", "7"]}).json()
    assert one == other


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_ids_in_paths(client: TestClient[Litestar], name: str, recommender: Recommender) -> None:
    response = client.get(f"/items/{quote(name, safe='')}/similar?k=4")
    assert response.status_code == 200
    assert [item["id"] for item in response.json()["items"]] == recommender.similar(name, 4).ids
    unknown = client.get(f"/items/{quote(name + '!', safe='')}/similar")
    assert_problem(unknown, 404, re.escape(repr(name + "!")))


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
        (b'{"history": [{"itm": "a"}]}', "unknown field `itm`"),
        (b'{"history": [{"item": "a", "time": "yesterday"}]}', r"\$\.history\[0\]\.time"),
        (b'{"history": [{"item": "a", "time": 1700000000000}]}', "divide milliseconds by 1000"),
        (b'{"history": [], "k": 0}', r"Expected `int` >= 1 - at `\$\.k`"),
        (b'{"history": [], "k": 1001}', r"Expected `int` <= 1000 - at `\$\.k`"),
        (b'{"history": [], "k": "10"}', "Expected `int`, got `str`"),
        (b'{"history": [], "keep_seen": "yes"}', "Expected `bool | null`, got `str`"),
        (b'{"history": [], "exclude": "007"}', "Expected `array | null`, got `str`"),
        (b'{"history": [], "user": "me"}', "unknown field `user`"),
    ],
)
def test_bad_bodies_are_problems(client: TestClient[Litestar], body: bytes, sentence: str) -> None:
    response = client.post("/recommendations", content=body, headers={"content-type": "application/json"})
    assert_problem(response, 400, sentence)


def test_a_body_too_large(client: TestClient[Litestar]) -> None:
    body = b'{"history": ["' + b"x" * MOST_BYTES + b'"]}'
    assert_problem(client.post("/recommendations", content=body), 413, "too large")


@pytest.mark.parametrize(
    ("path", "status", "sentence"),
    [
        ("/items/007/similar?k=0", 400, "k: Expected `int` >= 1"),
        ("/items/007/similar?k=1001", 400, "k: Expected `int` <= 1000"),
        ("/items/007/similar?k=many", 400, "k: Expected `int`"),
        ("/items/%ff/similar", 400, "percent-encoded"),
        ("/items//similar", 404, "nothing at"),
        ("/items/007", 404, "nothing at /items/007"),
        ("/recommendations", 405, "GET is not answered"),
    ],
)
def test_bad_requests_are_problems(client: TestClient[Litestar], path: str, status: int, sentence: str) -> None:
    assert_problem(client.get(path), status, sentence)


def test_a_bug_is_a_problem_without_a_traceback(
    client: TestClient[Litestar],
    recommender: Recommender,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("the secret inside")

    monkeypatch.setattr(recommender, "similar", broken)
    response = client.get("/items/007/similar")
    assert_problem(response, 500, "its log says what")
    assert "secret" not in response.text
    assert "the secret inside" in caplog.text


def test_health(client: TestClient[Litestar]) -> None:
    assert client.get("/health/live").json() == {"status": "live"}
    assert client.get("/health/ready").json() == {"status": "ready"}


def test_the_document_lists_the_routes_and_its_examples_work(client: TestClient[Litestar]) -> None:
    document = client.get("/schema/openapi.json").json()
    routes = {(method, path) for path, methods in document["paths"].items() for method in methods}
    assert routes == {
        ("post", "/recommendations"),
        ("get", "/items/{id}/similar"),
        ("get", "/health/live"),
        ("get", "/health/ready"),
    }
    asked = document["paths"]["/recommendations"]["post"]
    assert set(asked["responses"]) == {"200", "400", "413"}
    example = asked["requestBody"]["content"]["application/json"]["examples"]["history"]["value"]
    answer = client.post("/recommendations", json=example)
    assert (answer.status_code, answer.json()["unknown"]) == (200, [])
    neighbours = document["paths"]["/items/{id}/similar"]["get"]
    name = next(parameter["example"] for parameter in neighbours["parameters"] if parameter["name"] == "id")
    assert client.get(f"/items/{quote(name, safe='')}/similar").status_code == 200


def test_the_page_loads_nothing_from_elsewhere(client: TestClient[Litestar]) -> None:
    page = client.get("/schema")
    assert page.headers["content-type"].startswith("text/html")
    assert "/schema/openapi.json" in page.text
    assert not re.search(r"https?:|//[a-z]", page.text)
    redirect = client.get("/", follow_redirects=False)
    assert (redirect.status_code, redirect.headers["location"]) == (302, "/schema")


@contextmanager
def running(recommender: Recommender) -> Iterator[int]:
    """The service on a real socket; gives its port."""
    with listening_socket("127.0.0.1", 0) as listening:
        server = make_server(recommender)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(timeout=20)
    assert not thread.is_alive()


def test_over_a_real_socket(recommender: Recommender) -> None:
    """uvicorn hands over paths in its own way: the same ids must survive it, as must dots that clients fold away."""
    with running(recommender) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        for piece in [*(quote(name, safe="") for name in HOSTILE), "%2e%2e", "nobody"]:
            connection.request("GET", f"/items/{piece}/similar?k=3")
            response = connection.getresponse()
            body = response.read().decode()
            if unquote(piece) in HOSTILE:
                assert response.status == 200, piece
                assert body.count('"id"') == 3
            else:
                assert response.status == 404
                assert f"The item '{unquote(piece)}' is not one of" in body
        connection.close()


def test_a_slow_answer_holds_up_nobody_else(recommender: Recommender, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, released = threading.Event(), threading.Event()
    answer = recommender.recommend

    def slow(*arguments: Any, **options: Any) -> Any:
        begun.set()
        assert released.wait(20)
        return answer(*arguments, **options)

    with running(recommender) as port, ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(recommender, "recommend", slow)  # the examples were made before
        url = f"http://127.0.0.1:{port}"
        waiting = pool.submit(httpx.post, f"{url}/recommendations", json={"history": ["007"]}, timeout=20)
        assert begun.wait(20)
        assert httpx.get(f"{url}/health/live", timeout=5).status_code == 200
        assert not waiting.done()
        released.set()
        assert waiting.result().status_code == 200


def test_a_port_in_use_or_an_address_of_another_machine_is_a_sentence() -> None:
    with listening_socket("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"Port {port} of 127.0.0.1 is in use; choose another with --port"):
            listening_socket("127.0.0.1", port)
    with pytest.raises(InputError, match="is not an address of this machine"):
        listening_socket("192.0.2.1", 0)
    with pytest.raises(InputError, match="a number from 0 to 65535"):
        listening_socket("127.0.0.1", 99999)


def test_serving_brings_no_training_code() -> None:
    code = (
        "import sys, segue.serve.server\n"
        "rooms = {name.split('.')[1] for name in sys.modules if name.startswith('segue.')}\n"
        "assert 'recommend' in rooms\n"
        "sys.exit(' '.join(rooms & {'train', 'objective', 'evaluate', 'api'}) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
