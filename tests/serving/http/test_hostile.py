"""Hostile input: every id is returned unchanged, everything else is refused with a sentence."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from functools import lru_cache
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from small_service import assert_problem, guarded, on_a_socket, post_events, small_service, tiny_recommender

from segue.serving.http.bodies import MAX_BODY_BYTES
from segue.serving.http.guard import MAX_PATH_BYTES

HOSTILE = [
    "a,b",
    'say "hi"',
    "it's; DROP TABLE users; --",
    "x/y/../z",
    "..",
    ".",
    "/",
    "../../etc/passwd",
    "..%2F",
    "%2F",
    "%",
    "%00",
    "%ff",
    " two  spaces ",
    " ",
    "☕🫖",
    "e\u0301 is not é",
    "\u202eright to left",
    "\ufeff",
    "007",
    "7",
    "1e3",
    "null",
    "line\nbreak\r\n",
    "tab\t",
    "nul\0nul",
    "\x01\x1b[31m\x7f",
    "?k=1#x",
    "a//b",
    "é+&=",
    "<script>alert(1)</script>",
    "{{7*7}}${7*7}",
    "history",
    "recommendations",
    "\U0010ffff",
]
ROUTES = [
    ("POST", "/events"),
    ("GET", "/users/{id}/recommendations"),
    ("POST", "/recommendations"),
    ("GET", "/items/{id}/similar"),
    ("GET", "/items"),
    ("POST", "/items"),
    ("GET", "/users/{id}/history"),
    ("DELETE", "/users/{id}"),
    ("POST", "/explanations"),
    ("POST", "/plans"),
    ("GET", "/model"),
    ("PUT", "/model"),
    ("POST", "/model/rollback"),
    ("GET", "/health/live"),
    ("GET", "/health/ready"),
    ("GET", "/metrics"),
]
TAKING = (
    "events",
    "recommendations",
    "explanations",
    "plans",
    "items",
    "items/{id}/similar",
    "users/{id}/history",
    "users/{id}/recommendations",
)
UNREADABLE = b"Invalid HTTP request received."
QUIET = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)


@pytest.fixture(name="address", scope="module")
def service_on_a_socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A service with every hostile id in its catalogue, behind uvicorn, which decodes paths itself."""
    titles, kinds = [f"<b>{name}</b>" for name in HOSTILE], ["a", "b"] * 17 + ["a"]
    recommender = tiny_recommender(HOSTILE, plans=True, title=titles, kind=kinds)
    store = tmp_path_factory.mktemp("store") / "events.sqlite"
    with on_a_socket(guarded(small_service(store, recommender))) as address:
        yield address


@pytest.fixture(name="client", scope="module")
def client_fixture(address: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=address, trust_env=False, timeout=20) as client:
        yield client


def ask(address: str, method: str, target: str, body: bytes = b"", **headers: str) -> tuple[int, Any]:
    """Send a request with its target unchanged: other clients resolve dots."""
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=20)
    try:
        sent = {"Content-Type": "application/json", **headers} if body else headers
        connection.request(method, target, body=body or None, headers=sent)
        response = connection.getresponse()
        answer = response.read()
        kind = response.getheader("content-type") or ""
        return response.status, json.loads(answer) if "json" in kind else answer
    finally:
        connection.close()


# --- ids ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HOSTILE)
def test_an_id_is_returned_unchanged(address: str, client: httpx.Client, name: str) -> None:
    """As a user, a known item, an unknown item, a kind and an event's id."""
    unknown = f"{name} unknown"
    event = {"user": name, "item": name, "kind": name, "id": name, "time": 1}
    assert post_events(client, event, {"user": name, "item": unknown, "time": 2}, event) == {
        "accepted": 2,
        "duplicates": 1,
        "unknown": [unknown],
    }
    path = f"/users/{quote(name, safe='')}"
    encoded_path = path.replace(".", "%2e")  # a client may resolve dots, but not encoded ones
    status, history = ask(address, "GET", f"{encoded_path}/history")
    assert (status, history["user"]) == (200, name)
    assert [(one["item"], one["kind"], one["known"]) for one in history["events"]] == [
        (name, name, True),
        (unknown, None, False),
    ]
    assert history["events"][0]["title"] == f"<b>{name}</b>"
    status, answer = ask(address, "GET", f"{encoded_path}/recommendations?k=100")
    assert (status, answer["unknown"], answer["fallback"]) == (200, [unknown], None)
    assert {item["id"] for item in answer["items"]} == set(HOSTILE) - {name}
    status, answer = ask(
        address,
        "GET",
        f"{encoded_path}/recommendations?keep_seen=1&only={quote(name, safe='')}&where={quote('kind:a')}",
    )
    assert [item["id"] for item in answer["items"]] == ([name] if HOSTILE.index(name) % 2 == 0 else [])
    status, similar = ask(address, "GET", f"/items/{quote(name, safe='').replace('.', '%2e')}/similar?k=100")
    assert (status, {item["id"] for item in similar["items"]}) == (200, set(HOSTILE) - {name})
    status, problem = ask(address, "GET", f"/items/{quote(unknown, safe='')}/similar")
    assert (status, repr(unknown) in problem["detail"]) == (404, True)
    matches = client.get("/items", params={"search": name, "limit": 200}).json()["items"]
    assert not name.strip() or name.strip() in {item["id"].strip() for item in matches}
    assert ask(address, "DELETE", encoded_path) == (200, {"removed": 2})


any_id = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)


@settings(QUIET, max_examples=40)
@given(user=any_id, item=any_id)
def test_any_text_is_an_id(client: httpx.Client, address: str, user: str, item: str) -> None:
    post_events(client, {"user": user, "item": item})
    path = f"/users/{quote(user, safe='').replace('.', '%2e')}"
    status, history = ask(address, "GET", f"{path}/history")
    assert (status, history["user"], [one["item"] for one in history["events"]]) == (200, user, [item])
    status, answer = ask(address, "GET", f"{path}/recommendations")
    assert (status, answer["unknown"]) == (200, [] if item in HOSTILE else [item])
    assert ask(address, "DELETE", path) == (200, {"removed": 1})


@pytest.mark.parametrize(
    ("method", "target", "status"),
    [
        ("GET", f"/users/{'u' * 1_000_000}/history", (400, 414)),
        ("GET", f"/users/{'u' * (MAX_PATH_BYTES + 1)}/history", (414,)),
        ("GET", f"/users/{'u' * (MAX_PATH_BYTES - 100)}/history", (200,)),
        ("GET", f"/items?search={'x' * 70_000}", (400, 414)),
        ("GET", "/users/u/recommendations?" + "exclude=x&" * 20_000, (400, 414)),
        ("GET", "/users/%ff/history", (400,)),
        ("GET", "/users/%ed%a0%80/history", (400,)),
        ("DELETE", "/users/%ff", (400,)),
        ("GET", "/users/u/recommendations?exclude=%ff&only=%ed%a0%80", (200, 400)),
        ("GET", "/users/u/recommendations?where=%ed%a0%80:%ff", (400,)),
        ("GET", "/users/u/recommendations?model=%ed%a0%80", (404, 400)),
        ("GET", "/items?search=%ed%a0%80%ff%00", (200, 400)),
        ("GET", "/page/../app.py", (404,)),
        ("GET", "/page/%2e%2e%2fapp.py", (404,)),
        ("GET", "/page/%00", (404,)),
        ("GET", "//etc/passwd", (404,)),
        ("TRACE", "/items", (405,)),
        ("PATCH", "/model", (405,)),
        ("GET", "/schema/../model", (404,)),
    ],
)
def test_hostile_targets(address: str, method: str, target: str, status: tuple[int, ...]) -> None:
    code, body = ask(address, method, target)
    assert code in status, body
    if code >= 400 and isinstance(body, dict):
        assert body["detail"].endswith(".")
        assert "Traceback" not in body["detail"]


# --- bodies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/events", "/items", "/recommendations", "/explanations", "/plans"])
@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"[" * 400_000, 400),
        (b'{"a":' * 100_000, 400),
        (b'{"history": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", 400),
        (b'{"history": [{"item": ' + b"[" * 200_000, 400),
        (b"null", 400),
        (b"true", 400),
        (b'"text"', 400),
        (b"\xef\xbb\xbf{}", 400),
        (b"\x00", 400),
        (b"{} {}", 400),
        (b'{"history": NaN}', 400),
        (b'{"history": [], "user": 1, "item": "\\ud83d", "k": 1}', 400),
        (b'{"' + b"x" * 900_000 + b'": 1}', 400),
        (b" " * (MAX_BODY_BYTES + 1), 413),
        (b'{"history": ["' + b"x" * MAX_BODY_BYTES + b'"]}', 413),
    ],
)
def test_hostile_bodies(client: httpx.Client, path: str, body: bytes, status: int) -> None:
    assert_problem(client.post(path, content=body, headers={"content-type": "application/json"}), status)


@pytest.mark.parametrize(
    "kind",
    [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonp", "multipart/form-data; boundary=x"],
)
def test_a_body_without_the_content_type_of_json(client: httpx.Client, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    for method, path in (
        ("POST", "/events"),
        ("POST", "/recommendations"),
        ("PUT", "/model"),
        ("POST", "/explanations"),
        ("POST", "/plans"),
    ):
        response = client.request(method, path, content=b'{"user": "x", "item": "y"}', headers=headers)
        assert_problem(response, 415, "Content-Type: application/json")
    assert client.get("/users/x/history").json()["events"] == []


def test_a_body_of_a_megabyte_is_accepted(client: httpx.Client) -> None:
    history = ["x" * 1000] * 990
    answer = client.post("/recommendations", json={"history": history})
    assert (answer.status_code, answer.json()["unknown"]) == (200, ["x" * 1000])


def test_a_foreign_host_or_origin_is_refused(address: str) -> None:
    """See test_guard for DNS rebinding."""
    status, body = ask(address, "GET", "/model", Host="evil.example")
    assert (status, body["status"]) == (403, 403)
    status, body = ask(address, "POST", "/model/rollback", Origin="https://evil.example")
    assert (status, "another site" in body["detail"]) == (403, True)


# --- generated requests, valid and invalid --------------------------------------------------------------------------


@lru_cache(1)
def _operations(address: str) -> dict[tuple[str, str], Any]:
    schema = schemathesis.openapi.from_url(f"{address}/schema/openapi.json")
    operations: list[Any] = [result.ok() for result in schema.get_all_operations()]  # type: ignore[union-attr]
    return {(operation.method.upper(), operation.path): operation for operation in operations}


def test_every_operation_of_the_document_is_tested(address: str) -> None:
    assert set(_operations(address)) == set(ROUTES)


# The other operations have no invalid input: a path, or nothing at all.
REFUSING = [(method, path) for method, path in ROUTES if method == "PUT" or path[1:] in TAKING]


def _has_whole_float(value: Any) -> bool:
    """Whether a JSON value has a number such as 1e16 anywhere."""
    if isinstance(value, dict | list):
        return any(map(_has_whole_float, value.values() if isinstance(value, dict) else value))
    return isinstance(value, float) and value.is_integer()


@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [(*route, GenerationMode.POSITIVE) for route in ROUTES] + [(*route, GenerationMode.NEGATIVE) for route in REFUSING],
)
def test_generated_requests_get_documented_responses(
    address: str, method: str, path: str, mode: GenerationMode
) -> None:
    operation = _operations(address)[method, path]
    checks = [
        status_code_conformance,  # an undocumented status fails, such as 500
        content_type_conformance,
        response_headers_conformance,
        response_schema_conformance,
        *([negative_data_rejection] if mode is GenerationMode.NEGATIVE else []),
    ]

    @settings(QUIET, max_examples=15 if method == "POST" else 8)
    @given(case=operation.as_strategy(generation_mode=mode))
    def run_case(case: schemathesis.Case[Any]) -> None:
        if mode is GenerationMode.NEGATIVE and _has_whole_float(case.body):
            return  # integer and number at once, which `oneOf` in the document forbids and the service accepts
        response = case.call()
        if response.content == UNREADABLE:
            return  # longer than the server's limit for a request line: it did not reach the service
        assert response.status_code not in (500, 503), response.text
        case.validate_response(response, checks=checks)

    run_case()
