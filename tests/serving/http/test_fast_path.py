"""The fast path answers like the framework, errors included."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from small_service import Client, in_process_client, small_service, tiny_recommender

from segue.errors import InputError, StoreError
from segue.serving.http import app as app_module
from segue.serving.http.app import create_app, fast_request
from segue.serving.http.bodies import MAX_BODY_BYTES
from segue.serving.requests import OverloadedError
from segue.serving.service import Service

ITEMS = ["1", "2", "3", "4", "5"]
USERS = itertools.count()


@pytest.fixture(name="service", scope="module")
def service_fixture(tmp_path_factory: pytest.TempPathFactory) -> Service:
    return small_service(tmp_path_factory.mktemp("store") / "events.sqlite", tiny_recommender(ITEMS))


@pytest.fixture(name="client", scope="module")
def client_fixture(service: Service) -> Iterator[Client]:
    with in_process_client(create_app(service)) as client:
        yield client


def both(client: Client, monkeypatch: pytest.MonkeyPatch, method: str, path: str, **more: Any) -> list[httpx.Response]:
    """The responses of the fast path and of the framework. In a path, {} is a new user."""
    responses, plain, used = [], fast_request, []

    def counted(*arguments: Any) -> Any:
        used.append(plain(*arguments))
        return used[-1]

    for request in (counted, lambda *_: None):
        monkeypatch.setattr(app_module, "fast_request", request)
        responses.append(client.request(method, path.format(f"user-{next(USERS)}"), **more))
    assert used[0] is not None, "the request did not take the fast path"
    return responses


def assert_alike(responses: list[httpx.Response], status: int) -> None:
    one, other = responses
    assert (one.status_code, one.content, one.headers) == (status, other.content, other.headers)
    assert other.status_code == status


def test_a_known_user(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    assert client.post("/events", json={"user": "ann", "item": "2"}).status_code == 200
    responses = both(client, monkeypatch, "GET", "/users/ann/recommendations")
    assert_alike(responses, 200)
    assert len(responses[0].json()["items"]) == 4, "all items but the seen one"
    assert_alike(both(client, monkeypatch, "GET", "/users/ann/recommendations?k=2"), 200)


def test_an_unknown_user(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_alike(both(client, monkeypatch, "GET", "/users/{}/recommendations?k=1000"), 200)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"user": "bob", "item": "1"}', 200),
        (b'{"user": 5, "item": "never seen", "value": 2, "time": "2026-01-01T00:00:00Z"}', 200),
        (b'{"events": [{"user": "bob", "item": "1"}, {"user": "bob", "item": "2"}]}', 200),
        (b'{"events": [{"user": "bob", "item": "1"}], "user": "bob"}', 400),
        (b'{"user": "bob"}', 400),
        (b'{"user": "bob", "item": true}', 400),
        (b'{"user": "bob", "item": "1"', 400),
        (b"\xff", 400),
        (b"[" * 100_000, 400),
        (b"x" * (MAX_BODY_BYTES + 1), 413),
    ],
)
def test_events(client: Client, monkeypatch: pytest.MonkeyPatch, body: bytes, status: int) -> None:
    headers = {"content-type": "application/json"}
    assert_alike(both(client, monkeypatch, "POST", "/events", content=body, headers=headers), status)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (OverloadedError("queue", "Too many."), 503),
        (StoreError("It is gone."), 503),
        (InputError("It makes no sense."), 400),
        (RuntimeError("the secret inside"), 500),
    ],
)
@pytest.mark.parametrize(("method", "path"), [("GET", "/users/{}/recommendations"), ("POST", "/events")])
def test_failures(
    client: Client,
    service: Service,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    status: int,
    method: str,
    path: str,
) -> None:
    async def failing(_: Any) -> None:
        raise error

    monkeypatch.setattr(service, "answer", failing)
    monkeypatch.setattr(service, "add_events", failing)
    more = {"json": {"user": "bob", "item": "1"}} if method == "POST" else {}
    responses = both(client, monkeypatch, method, path, **more)
    assert_alike(responses, status)
    assert "secret" not in responses[0].text


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/users/ann/recommendations?k=0"),
        ("GET", "/users/ann/recommendations?k=1001"),
        ("GET", "/users/ann/recommendations?k=2&model=first"),
        ("GET", "/users/a%2Fb/recommendations"),
        ("GET", "/users/ann/recommendations/"),
        ("GET", "/users/ann/history"),
        ("HEAD", "/users/ann/recommendations"),
        ("POST", "/events?x=1"),
        ("POST", "/events"),
    ],
)
def test_every_other_request_goes_through_the_framework(
    client: Client, monkeypatch: pytest.MonkeyPatch, method: str, path: str
) -> None:
    answers = []
    monkeypatch.setattr(app_module, "fast_request", lambda *request: answers.append(fast_request(*request)))
    client.request(method, path)
    assert answers == [None]
