"""The guard: which requests pass, which are refused, and what is logged and counted."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Callable, Coroutine, Iterator
from typing import Any
from urllib.parse import unquote

import pytest
from litestar import Litestar, Request, delete, get, post, put
from litestar.params import FromPath

from segue.errors import InputError
from segue.serving.http.guard import CLIENT_REQUEST_ID, MAX_PATH_BYTES, MAX_QUERY_BYTES, Guard, RateLimit
from segue.serving.http.keys import Keys
from segue.serving.http.logs import REQUEST_ID, JsonLogHandler
from segue.serving.http.metrics import Metrics

KEYS = {"read": "reader-0123456789", "write": "writer-0123456789", "admin": "admins-0123456789"}
WRONG = "nobody-0123456789"
JSON = {"content-type": "application/json"}
USER = "alice"


class Answer:
    """The response that was sent."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        start, *rest = messages or [{"status": 0, "headers": []}]
        self.status: int = start["status"]
        self.pairs = [(name.decode(), value.decode()) for name, value in start["headers"]]
        self.headers = dict(self.pairs)
        assert len(self.headers) == len(self.pairs), "a header was sent twice"
        self.body = b"".join(message.get("body", b"") for message in rest)

    def problem(self, status: int) -> str:
        """The detail of the problem that this response must be."""
        problem = json.loads(self.body)
        assert (self.status, problem["status"], set(problem)) == (status, status, {"title", "status", "detail"})
        assert self.headers["content-type"] == "application/problem+json"
        assert self.headers["content-length"] == str(len(self.body))
        assert b"Traceback" not in self.body and "x-request-id" in self.headers
        detail: str = problem["detail"]
        return detail


def ask(
    app: Callable[..., Coroutine[Any, Any, None]],
    method: str = "GET",
    path: str = "/items",
    *,
    key: str | None = None,
    body: bytes = b"",
    headers: dict[str, str] | None = None,
    client: str | None = "192.0.2.1",
    gone: bool = False,
) -> Answer:
    """Send one request as an ASGI server does."""
    sent: list[dict[str, Any]] = []
    raw, _, query = path.partition("?")
    fields = {"host": "localhost:8000", **({"content-length": str(len(body))} if body else {}), **(headers or {})}
    if key is not None:
        fields["authorization"] = f"Bearer {key}"
    scope = {
        "type": "http",
        "method": method,
        "path": unquote(raw),
        "raw_path": raw.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "http_version": "1.1",
        "scheme": "http",
        "server": ("127.0.0.1", 8000),
        "client": client and (client, 50000),
        "headers": [(name.encode(), value.encode()) for name, value in fields.items()],
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"} if gone else {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    return Answer(sent)


class Inner:
    """An application that answers OK to everything and records the requests."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.request_ids: list[str | None] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            self.requests.append(f"{scope['method']} {scope['path']}")
            self.request_ids.append(REQUEST_ID.get())
            await receive()
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": b"OK"})


@pytest.fixture(name="inner")
def inner_application() -> Inner:
    return Inner()


THREE_KEYS = Keys({"read": [KEYS["read"]], "write": [KEYS["write"]], "admin": [KEYS["admin"]]})


def guard(app: Any, *, keys: bool = False, **options: Any) -> Guard:
    all_keys = THREE_KEYS if keys else Keys({})
    return Guard(app, **{"keys": all_keys, "metrics": Metrics(), "max_body_bytes": 1000, **options})


ROUTES: dict[str, str | None] = {
    "GET /": None,
    "HEAD /": None,
    "GET /page/app.js": None,
    "GET /page/deeper/app.css": None,
    "GET /schema": None,
    "GET /schema/openapi.json": None,
    "GET /health/live": None,
    "GET /health/ready": None,
    "GET /metrics": "read",
    "GET /model": "read",
    "GET /items?search=x": "read",
    "GET /items/7/similar": "read",
    "GET /users/alice/recommendations?k=3": "read",
    "GET /users/alice/history": "read",
    "POST /recommendations": "read",
    "POST /explanations": "read",
    "POST /plans": "read",
    "POST /events": "write",
    "POST /items": "write",
    "DELETE /users/alice": "write",
    "DELETE /users/a%2Fb": "write",
    "PUT /model": "admin",
    "POST /model/rollback": "admin",
    # unknown routes need a key too, those that would change something the role admin
    "GET /nothing/here": "read",
    "GET /healthy": "read",
    "GET /schemas": "read",
    "GET /%2F": "read",
    "OPTIONS /events": "read",
    "POST /": "admin",
    "POST /page/app.js": "admin",
    "POST /health/live": "admin",
    "POST /nothing": "admin",
    "DELETE /users": "admin",
    "DELETE /users/alice/history": "admin",
    "DELETE /users%2Falice": "admin",
    "PATCH /users/alice": "admin",
    "MADEUP /events": "admin",
}


@pytest.mark.parametrize("route", ROUTES)
def test_each_route_accepts_the_keys_of_its_role_and_no_others(inner: Inner, route: str) -> None:
    app = guard(inner, keys=True)
    method, path = route.split(" ")
    body = b"{}" if method in ("POST", "PUT") else b""
    accepted = []
    for name, key in {"none": None, "wrong": WRONG, **KEYS}.items():
        before = len(inner.requests)
        answer = ask(app, method, path, key=key, body=body, headers=JSON)
        if answer.status == 200:
            accepted.append(name)
            assert len(inner.requests) == before + 1
            continue
        assert len(inner.requests) == before, "a refused request reached the application"
        if name in KEYS:
            assert f"the role {ROUTES[route]}" in answer.problem(403)
        else:
            assert "Authorization: Bearer KEY" in answer.problem(401)
            assert answer.headers["www-authenticate"] == "Bearer"
    role = ROUTES[route]
    assert accepted == (["none", "wrong", *KEYS] if role is None else [role])


def test_a_key_with_two_roles_has_both(inner: Inner) -> None:
    app = Guard(inner, keys=Keys({"read": [WRONG], "write": [WRONG]}), metrics=Metrics(), max_body_bytes=1000)
    answers = [ask(app, *route.split(" "), key=WRONG).status for route in ("GET /items", "POST /events", "PUT /model")]
    assert answers == [200, 200, 403]


def test_refusals_do_not_repeat_the_key(inner: Inner) -> None:
    stream = io.BytesIO()
    app = guard(inner, keys=True, logs=JsonLogHandler(stream, logging.DEBUG))
    sentences = [ask(app, "PUT", "/model", key=key).body for key in (WRONG, KEYS["read"], KEYS["admin"])]
    output = b"".join(sentences) + stream.getvalue() + app._metrics.render()[0]
    assert stream.getvalue().count(b"\n") == 3
    assert not any(key.encode() in output for key in (WRONG, *KEYS.values()))


def app_with_routes(calls: list[str]) -> Litestar:
    @post("/events", status_code=200)
    async def events() -> None:
        calls.append("events")

    @delete("/users/{id:str}", status_code=200)
    async def forget(id: FromPath[str]) -> None:
        calls.append(id)

    @put("/model")
    async def swap() -> None:
        calls.append("model")

    @get("/users/{id:str}/history")
    async def history(id: FromPath[str]) -> str:
        if id == "broken":
            raise KeyError(id)
        return id

    return Litestar([events, forget, swap, history], openapi_config=None, logging_config=None)


@pytest.mark.parametrize(
    "route",
    [
        f"{method} {path}"
        for method, plain in (("POST", "/events"), ("DELETE", "/users/alice"), ("PUT", "/model"))
        for path in (
            plain,
            f"/{plain}",
            f"{plain}/",
            f"//{plain}//",
            f"/%{ord(plain[1]):x}{plain[2:]}",
            f"{plain}?a=/page",
        )
    ],
)
def test_no_spelling_of_a_path_bypasses_the_keys(route: str) -> None:
    calls: list[str] = []
    app = guard(app_with_routes(calls), keys=True)
    method, path = route.split(" ")
    assert ask(app, method, path, key=KEYS["read"]).status == 403
    assert ask(app, method, path).status == 401
    assert calls == []
    assert 200 in [ask(app, method, path, key=KEYS[role]).status for role in ("write", "admin")]
    assert len(calls) == 1


@pytest.mark.parametrize(
    "path", ["/events%2F", "/%2Fevents", "/page/../events", "/page%2F..%2Fevents", "/health/..//events"]
)
def test_encoded_paths_need_the_same_role(inner: Inner, path: str) -> None:
    app = guard(inner, keys=True)
    for key in (None, WRONG, KEYS["read"], KEYS["write"]):
        assert ask(app, "POST", path, key=key).status in (401, 403)
    assert inner.requests == []


def test_without_keys_every_route_is_open(inner: Inner) -> None:
    app = guard(inner)
    for route in ROUTES:
        assert ask(app, *route.split(" ")).status == 200
    assert len(inner.requests) == len(ROUTES) == 37


OWN_HOSTS = [
    "localhost",
    "localhost:8000",
    "LOCALHOST:1",
    "127.0.0.1",
    "127.1.2.3:80",
    "[::1]",
    "[::1]:8000",
    "box:8000",
]
OTHER_HOSTS = [
    "",
    "evil.example",
    "localhost.evil.example",
    "127.0.0.1.evil.example:8000",
    "10.0.0.1",
    "[::2]:1",
    "::",
    "\t",
]


@pytest.mark.parametrize("host", OWN_HOSTS)
def test_without_keys_a_loopback_host_is_answered(inner: Inner, host: str) -> None:
    assert ask(guard(inner, host="Box"), headers={"host": host}).status == 200


@pytest.mark.parametrize("host", [*OTHER_HOSTS, "box:8000"])
def test_without_keys_no_other_host_is_answered(inner: Inner, host: str) -> None:
    for path in ("/", "/items", "/page/app.js"):
        assert "Host" in ask(guard(inner), path=path, headers={"host": host}).problem(403)
    assert inner.requests == []


def test_with_keys_any_host_is_answered(inner: Inner) -> None:
    assert ask(guard(inner, keys=True), key=KEYS["read"], headers={"host": "shop.example"}).status == 200


def from_page(app: Guard, method: str, origin: str, **headers: str) -> Answer:
    return ask(app, method, "/events", key=KEYS["write"], headers={"origin": origin, **headers})


@pytest.mark.parametrize("keys", [True, False])
@pytest.mark.parametrize("origin", ["https://evil.example", "null", "", "http://localhost:3000", "localhost:8000"])
def test_a_page_of_another_site_changes_nothing(inner: Inner, keys: bool, origin: str) -> None:
    app = guard(inner, keys=keys, allowed_origins=["https://shop.example"])
    assert "another site" in from_page(app, "POST", origin).problem(403)
    assert inner.requests == []


@pytest.mark.parametrize("origin", ["http://localhost:8000", "https://LOCALHOST:8000", "https://shop.example"])
def test_own_page_and_allowed_origins_may_change_things(inner: Inner, origin: str) -> None:
    app = guard(inner, keys=True, allowed_origins=["https://Shop.example/"])
    assert from_page(app, "POST", origin).status == 200


def test_safe_methods_pass_for_every_origin(inner: Inner) -> None:
    answer = ask(guard(inner), headers={"origin": "https://evil.example"})
    assert answer.status == 200
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_cors_allows_named_origins_only(inner: Inner) -> None:
    app = guard(inner, keys=True, allowed_origins=["https://shop.example", "http://localhost:3000"])
    for origin in ("https://shop.example", "http://localhost:3000"):
        answer = from_page(app, "POST", origin)
        assert answer.headers["access-control-allow-origin"] == origin
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        response = ask(app, headers={"origin": origin})
        assert (response.status, response.headers["access-control-allow-origin"]) == (401, origin)
    for origin in ("https://evil.example", "https://shop.example.evil.example", "http://shop.example", "null"):
        answer = ask(app, key=KEYS["read"], headers={"origin": origin})
        assert not [name for name in answer.headers if name.startswith("access-control")]
        assert answer.headers["vary"] == "origin"
    assert "vary" not in ask(guard(inner)).headers


def test_preflight(inner: Inner) -> None:
    app = guard(inner, keys=True, allowed_origins=["https://shop.example"])
    headers = {"access-control-request-method": "DELETE", "access-control-request-headers": "authorization"}
    answer = ask(app, "OPTIONS", "/users/x", headers={"origin": "https://shop.example", **headers})
    assert (answer.status, answer.body) == (204, b"")
    assert answer.headers["access-control-allow-origin"] == "https://shop.example"
    assert "DELETE" in answer.headers["access-control-allow-methods"]
    assert {"authorization", "content-type"} <= {*answer.headers["access-control-allow-headers"].split(", ")}
    assert ask(app, "OPTIONS", "/users/x", headers={"origin": "https://evil.example", **headers}).status == 401
    assert ask(app, "OPTIONS", "/users/x", headers={"origin": "https://shop.example"}).status == 401
    assert ask(guard(inner, keys=True), "OPTIONS", "/users/x", headers=headers).status == 401
    assert inner.requests == []


@pytest.mark.parametrize(
    "origin", ["*", "", "shop.example", "https://", "https://a/b", "ftp://a", "https://*.a", "null"]
)
def test_an_invalid_origin(inner: Inner, origin: str) -> None:
    with pytest.raises(InputError, match=r"such as https://shop.example, got"):
        guard(inner, allowed_origins=["https://shop.example", origin])


def test_rate_limit_by_address_and_by_key(inner: Inner) -> None:
    clock = iter([0.0] * 40 + [0.5] * 40)
    app = guard(inner, keys=True, rate_limit=RateLimit(2, clock=lambda: next(clock)))

    def statuses(**options: Any) -> list[int]:
        return [ask(app, **options).status for _ in range(4)]

    assert statuses(key=KEYS["read"]) == [200, 200, 429, 429]
    assert statuses(key=KEYS["read"], client="192.0.2.2") == [429] * 4  # the same key elsewhere
    assert statuses(key=KEYS["admin"]) == [403, 403, 429, 429]  # another key at the same address
    assert statuses(key=WRONG) == [401, 401, 429, 429]  # wrong keys are limited by address
    assert statuses(path="/") == [429] * 4
    assert statuses(client="192.0.2.3") == [401, 401, 429, 429]
    assert statuses(client=None) == [401, 401, 429, 429]
    assert statuses(path="/health/live") == [200] * 4
    answer = ask(app, key=KEYS["read"])
    assert "Retry-After" in answer.problem(429) and answer.headers["retry-after"] == "1"
    for _ in range(11):
        next(clock)
    assert statuses(key=KEYS["read"]) == [200, 429, 429, 429]
    assert len(inner.requests) == 2 + 4 + 1


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH"])
def test_bodies_are_json(inner: Inner, method: str) -> None:
    app = guard(inner)
    for wrong in (
        "text/plain",
        "application/x-www-form-urlencoded",
        "",
        "application/jsonp",
        "text/html;application/json",
    ):
        answer = ask(app, method, "/events", body=b"{}", headers={"content-type": wrong})
        assert "application/json" in answer.problem(415)
    assert ask(app, method, "/events", body=b"{}").status == 415
    assert ask(app, method, "/events", headers={"transfer-encoding": "chunked"}).status == 415
    assert inner.requests == []
    for right in ("application/json", "Application/JSON ; charset=utf-8"):
        assert ask(app, method, "/events", body=b"{}", headers={"content-type": right}).status == 200
    assert ask(app, method, "/events").status == 200  # no body: left to the application


def test_bodies_are_bounded(inner: Inner) -> None:
    app = guard(inner, max_body_bytes=10)
    assert ask(app, "POST", "/events", body=b"1" * 10, headers=JSON).status == 200
    for method in ("POST", "DELETE"):
        assert "at most 10 bytes, got 11" in ask(app, method, "/users/x", body=b"1" * 11, headers=JSON).problem(413)
    assert len(inner.requests) == 1


def test_paths_and_queries_are_bounded(inner: Inner) -> None:
    app = guard(inner)
    assert ask(app, path="/" + "a" * (MAX_PATH_BYTES - 1)).status == 200
    assert "at most 8192 bytes" in ask(app, path="/" + "a" * MAX_PATH_BYTES).problem(414)
    assert ask(app, path="/items?" + "a" * MAX_QUERY_BYTES).status == 200
    assert ask(app, path="/items?" + "a" * (MAX_QUERY_BYTES + 1)).status == 414
    assert len(inner.requests) == 2


@pytest.mark.parametrize("request_id", ["a", "A-z_0.9", "x" * 64])
def test_a_valid_request_id_is_kept(inner: Inner, request_id: str) -> None:
    answer = ask(guard(inner), headers={"x-request-id": request_id})
    assert (answer.headers["x-request-id"], inner.request_ids) == (request_id, [request_id])


@pytest.mark.parametrize("request_id", ["", "x" * 65, "a b", 'a"b', "a\n", "é", "<b>"])
def test_an_invalid_request_id_is_replaced(inner: Inner, request_id: str) -> None:
    app = guard(inner)
    created = {ask(app, headers={"x-request-id": request_id}).headers["x-request-id"] for _ in range(3)}
    assert len(created) == 3 and all(
        CLIENT_REQUEST_ID.fullmatch(one.encode()) and request_id not in one.split() for one in created
    )
    assert {*inner.request_ids} == created and REQUEST_ID.get() is None


@pytest.mark.parametrize("route", ["GET /", "GET /items", "GET /page/app.js", "POST /events", "OPTIONS /events"])
@pytest.mark.parametrize("keys", [True, False])
def test_every_response_has_the_security_headers(inner: Inner, route: str, keys: bool) -> None:
    method, path = route.split(" ")
    headers = ask(guard(inner, keys=keys), method, path).headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "img-src": "'self' data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-opener-policy"] == headers["cross-origin-resource-policy"] == "same-origin"
    assert headers["cache-control"] == ("no-cache" if path.startswith("/page/") else "no-store")


class LoggedGuard:
    """A guard with access to its log and its metrics."""

    def __init__(self, app: Any, **options: Any) -> None:
        self.stream = io.BytesIO()
        self.metrics = Metrics()
        self.app = guard(app, metrics=self.metrics, logs=JsonLogHandler(self.stream, logging.INFO), **options)

    def lines(self) -> list[tuple[str, str, int]]:
        entries = [json.loads(line) for line in self.stream.getvalue().splitlines()]
        return [(line["method"], line["route"], line["status"]) for line in entries]

    def is_counted(self, method: str, route: str, status: int) -> bool:
        line = f'segue_requests_total{{method="{method}",route="{route}",status="{status}"}} 1.0'
        return line in self.metrics.render()[0].decode().splitlines()


@pytest.fixture(name="errors")
def records_in_memory() -> Iterator[io.BytesIO]:
    stream = io.BytesIO()
    handler = JsonLogHandler(stream, logging.INFO)
    logging.getLogger().addHandler(handler)
    yield stream
    logging.getLogger().removeHandler(handler)


def test_requests_are_logged_by_route_template_not_by_path() -> None:
    logged_guard = LoggedGuard(app_with_routes([]), rate_limit=RateLimit(6))
    expected = {
        f"GET /users/{USER}/history": ("GET", "/users/{id}/history", 200),
        f"DELETE /users/{USER}": ("DELETE", "/users/{id}", 200),
        "POST /events": ("POST", "/events", 200),
        f"GET /nothing/{USER}": ("GET", "unmatched", 404),
        f"GET /users/{USER}": ("GET", "unmatched", 405),
        f"{USER} /{USER}": ("other", "unmatched", 404),
        f"PUT /{USER}": ("PUT", "guard", 429),
    }
    for route in expected:
        ask(logged_guard.app, *route.split(" "))
    logged = logged_guard.lines()
    assert logged[-1] == ("PUT", "guard", 429)
    assert logged == [*expected.values()]
    assert all(logged_guard.is_counted(*each) for each in logged)
    assert USER.encode() not in logged_guard.stream.getvalue() + logged_guard.metrics.render()[0]


def test_the_time_of_a_request_is_measured() -> None:
    async def slow(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.sleep(0.03)
        await send({"type": "http.response.body", "body": b""})

    logged_guard = LoggedGuard(slow)
    answer = ask(logged_guard.app)
    line = json.loads(logged_guard.stream.getvalue())
    assert 30 <= line["milliseconds"] < 1000
    assert line["request_id"] == answer.headers["x-request-id"]
    assert 'segue_request_seconds_bucket{le="0.025",route="unmatched"} 0.0' in logged_guard.metrics.render()[0].decode()


def test_an_exception_of_the_application_is_a_problem_without_the_message(errors: io.BytesIO) -> None:
    async def broken(_scope: Any, _receive: Any, _send: Any) -> None:
        raise KeyError(USER)

    logged_guard = LoggedGuard(broken)
    answer = ask(logged_guard.app, path=f"/users/{USER}", headers={"x-request-id": "r-1"})
    assert "The service failed to answer" in answer.problem(500)
    assert USER.encode() not in answer.body and answer.headers["x-content-type-options"] == "nosniff"
    assert logged_guard.is_counted("GET", "unmatched", 500)
    (record,) = [json.loads(line) for line in errors.getvalue().splitlines()]
    assert (record["level"], record["request_id"]) == ("error", "r-1")
    assert "in broken" in record["traceback"] and USER not in errors.getvalue().decode()


def test_an_exception_after_the_response_start_sends_nothing_more(errors: io.BytesIO) -> None:
    async def broken(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise KeyError(USER)

    logged_guard = LoggedGuard(broken)
    answer = ask(logged_guard.app)
    assert (answer.status, answer.body) == (200, b"")
    assert logged_guard.lines() == [("GET", "unmatched", 200)]
    assert b"KeyError" in errors.getvalue()


def test_a_disconnected_client_is_counted() -> None:
    @post("/events", status_code=200)
    async def events(request: Request[Any, Any, Any]) -> str:
        return str(len(await request.body()))

    logged_guard = LoggedGuard(Litestar([events], openapi_config=None, logging_config=None))
    ask(logged_guard.app, "POST", "/events", body=b"{}", headers=JSON, gone=True)
    assert logged_guard.lines() == [("POST", "/events", 499)]
    assert logged_guard.is_counted("POST", "/events", 499)


def test_a_cancelled_request_is_counted() -> None:
    async def endless(_scope: Any, _receive: Any, _send: Any) -> None:
        raise asyncio.CancelledError

    logged_guard = LoggedGuard(endless)
    with pytest.raises(asyncio.CancelledError):
        ask(logged_guard.app)
    assert logged_guard.is_counted("GET", "unmatched", 499)


def test_headers_of_the_application_are_kept_and_its_message_is_not_changed() -> None:
    start = {"type": "http.response.start", "status": 200, "headers": ((b"content-type", b"text/plain"),)}

    async def repeating(_scope: Any, _receive: Any, send: Any) -> None:
        await send(start)
        await send({"type": "http.response.body", "body": b"OK"})

    app = guard(repeating)
    for _ in range(2):
        assert ask(app).headers["content-type"] == "text/plain"
    assert start["headers"] == ((b"content-type", b"text/plain"),)


def test_lifespan_passes_and_websockets_do_not() -> None:
    kinds: list[str] = []
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, _receive: Any, _send: Any) -> None:
        kinds.append(scope["type"])

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {}

    guard_app = guard(app)
    for kind in ("lifespan", "websocket"):
        asyncio.run(guard_app({"type": kind}, receive, send))
    assert (kinds, sent) == (["lifespan"], [{"type": "websocket.close", "code": 1008}])
