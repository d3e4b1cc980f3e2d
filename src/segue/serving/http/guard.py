"""The ASGI middleware before the application: keys, limits and origin checks; it counts and logs every request."""

from __future__ import annotations

import itertools
import logging
import math
import os
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote_to_bytes

import msgspec

from segue.errors import InputError
from segue.serving.http.bodies import MAX_BODY_BYTES, PROBLEM_TYPE, Problem
from segue.serving.http.keys import KeyHolder, Keys, Role, is_loopback
from segue.serving.http.logs import REQUEST_ID, JsonLogHandler
from segue.serving.http.metrics import Metrics

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Headers = dict[bytes, bytes]
Header = tuple[bytes, bytes]
App = Callable[[Any, Any, Any], Awaitable[None]]

MAX_PATH_BYTES = 8192
MAX_QUERY_BYTES = 65_536
MAX_CLIENTS = 10_000  # whose request rates are held in memory
CLIENT_CLOSED = 499  # in logs and metrics: the client closed the connection before the response
UNMATCHED = "unmatched"  # the route in logs and metrics if the application has none for the path
GUARD = "guard"  # the route in logs and metrics if the guard answered

SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
METHODS = SAFE | {"POST", "PUT", "PATCH", "DELETE"}
WITH_BODY = frozenset({"POST", "PUT", "PATCH"})

# By the method, the first piece of the path and the number of pieces. A route that is missing here needs `read` if its
# method is safe and `admin` if not, so a forgotten route is never open to everybody.
OPEN = frozenset({b"", b"page", b"schema", b"health"})
ROLES: dict[tuple[str, bytes, int], Role] = {
    ("POST", b"recommendations", 1): "read",
    ("POST", b"explanations", 1): "read",
    ("POST", b"plans", 1): "read",
    ("POST", b"events", 1): "write",
    ("POST", b"items", 1): "write",
    ("DELETE", b"users", 2): "write",
    ("PUT", b"model", 1): "admin",
    ("POST", b"model", 2): "admin",
}

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SECURITY: list[Header] = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
NO_STORE: Header = (b"cache-control", b"no-store")
NO_CACHE: Header = (b"cache-control", b"no-cache")  # for files of the page: browsers revalidate them after an upgrade
PREFLIGHT: list[Header] = [
    (b"access-control-allow-methods", b"GET, POST, PUT, DELETE"),
    (b"access-control-allow-headers", b"authorization, content-type, x-request-id"),
    (b"access-control-max-age", b"600"),
]
EXPOSED: Header = (b"access-control-expose-headers", b"x-request-id, retry-after")

PROCESS = os.urandom(5).hex()  # the prefix of request ids that this process makes
REQUESTS = itertools.count(1)
CLIENT_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
ORIGIN = re.compile(r"https?://[^/\s?#@*,]+")

logger = logging.getLogger(__name__)


class Reply(msgspec.Struct, frozen=True):
    """A response of the guard itself."""

    status: int
    headers: Sequence[Header] = ()
    body: bytes = b""


def refusal(status: HTTPStatus, detail: str, *headers: Header) -> Reply:
    """A problem response like those of the application."""
    body = msgspec.json.encode(Problem(title=status.phrase, status=status.value, detail=detail))
    entity = ((b"content-type", PROBLEM_TYPE.encode()), (b"content-length", str(len(body)).encode()))
    return Reply(status.value, (*entity, *headers), body)


class RateLimit:
    """A token bucket for each client, refilled at `per_second`, with room for one second's tokens and at least one.

    For one thread. The least recently active clients are dropped, so their next request has a full bucket.
    """

    def __init__(
        self, per_second: float, *, max_clients: int = MAX_CLIENTS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if not 0 < per_second < float("inf"):
            raise InputError(f"--rate-limit must be a number of requests a second above 0, got {per_second}.")
        self._rate = per_second
        self._full = max(per_second, 1)
        self._max_clients = max_clients
        self._clock = clock
        self._buckets: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()  # tokens left, and when

    def wait(self, client: Hashable) -> float:
        """Take a token and return 0; if there is none, return the seconds until there is."""
        now = self._clock()
        tokens, last = self._buckets.pop(client, (self._full, now))
        tokens = min(self._full, tokens + (now - last) * self._rate)
        passes = tokens >= 1
        self._buckets[client] = (tokens - 1 if passes else tokens, now)
        if len(self._buckets) > self._max_clients:
            self._buckets.popitem(last=False)
        return 0.0 if passes else (1 - tokens) / self._rate


class Guard:
    """Refuses requests before they reach the application; adds headers to every response, counts it and logs it."""

    def __init__(
        self,
        app: App,
        *,
        keys: Keys,
        metrics: Metrics,
        max_body_bytes: int = MAX_BODY_BYTES,
        logs: JsonLogHandler | None = None,
        rate_limit: RateLimit | None = None,
        allowed_origins: Iterable[str] = (),
        host: str = "localhost",
    ) -> None:
        """`host`: the bound name. Without keys, a request's Host header must be this or a loopback name."""
        self._app = app
        self._keys = keys
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._logs = logs
        self._rate_limit = rate_limit
        self._origins = frozenset(read_origin(name) for name in allowed_origins)
        self._host = host.lower()
        self._added = [*SECURITY, (b"vary", b"origin")] if self._origins else SECURITY

    async def __call__(self, scope: Scope, receive: Callable[[], Awaitable[Message]], send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:  # no WebSocket route exists
            await send({"type": "websocket.close", "code": 1008})

    async def _http(self, scope: Scope, receive: Callable[[], Awaitable[Message]], send: Any) -> None:
        start = time.perf_counter()
        headers: Headers = dict(scope["headers"])
        sent_id = headers.get(b"x-request-id")
        if sent_id is not None and CLIENT_REQUEST_ID.fullmatch(sent_id):
            request_id = sent_id.decode()
        else:
            request_id = f"{PROCESS}-{next(REQUESTS):x}"
        pieces = path_pieces(scope)
        caching = NO_CACHE if pieces and pieces[0] == b"page" else NO_STORE
        added = [*self._added, caching, (b"x-request-id", request_id.encode())]
        if self._origins and headers.get(b"origin") in self._origins:
            added += [(b"access-control-allow-origin", headers[b"origin"]), EXPOSED]
        exchange = Exchange(receive, send, added)
        route = GUARD
        token = REQUEST_ID.set(request_id)
        try:
            reply = self._reply(scope, headers, pieces)
            if reply is None:
                route = UNMATCHED
                await self._app(scope, exchange.receive, exchange.send)
            else:
                await exchange.answer(reply)
        except Exception:
            logger.exception("A request failed outside its handler")
            await exchange.answer(INTERNAL_ERROR)
        finally:
            REQUEST_ID.reset(token)
            if route is UNMATCHED:
                route = scope.get("path_template") or UNMATCHED
            method = scope["method"] if scope["method"] in METHODS else "other"  # an invented method adds no label
            status, seconds = exchange.status or CLIENT_CLOSED, time.perf_counter() - start
            self._metrics.request(method=method, route=route, status=status, seconds=seconds)
            if self._logs is not None:
                self._logs.request(request_id=request_id, method=method, route=route, status=status, seconds=seconds)

    def _reply(self, scope: Scope, headers: Headers, pieces: list[bytes]) -> Reply | None:
        """The guard's response; None if the request may pass."""
        method: str = scope["method"]
        path, query = len(scope.get("raw_path") or scope["path"].encode()), len(scope["query_string"])
        if path > MAX_PATH_BYTES or query > MAX_QUERY_BYTES:
            return refusal(
                HTTPStatus.REQUEST_URI_TOO_LONG,
                f"A path has at most {MAX_PATH_BYTES} bytes and a query string {MAX_QUERY_BYTES}, "
                f"got {path} and {query}.",
            )
        # Against DNS rebinding: a foreign site can resolve its name to this machine, but browsers send that name.
        if not self._keys and not is_own_host(headers.get(b"host", b""), self._host):
            return refusal(
                HTTPStatus.FORBIDDEN,
                "Without keys, the request's Host must be localhost or a loopback address, and it is another; use one "
                "of these, or start the service with keys.",
            )
        holder = self._keys.holder(headers.get(b"authorization")) if self._keys else None
        if self._rate_limit is not None and pieces[:1] != [b"health"]:  # a failed health check ends the service
            client = scope.get("client")
            seconds = self._rate_limit.wait(holder.number if holder else client[0] if client else None)
            if seconds:
                return refusal(
                    HTTPStatus.TOO_MANY_REQUESTS,
                    "This client sent more requests a second than the service allows; wait the seconds in Retry-After.",
                    (b"retry-after", str(math.ceil(seconds)).encode()),
                )
        is_preflight = method == "OPTIONS" and b"access-control-request-method" in headers
        if is_preflight and headers.get(b"origin") in self._origins:
            return PREFLIGHT_REPLY
        return self._forbidden(method, headers, holder, pieces) or self._unsafe_request(method, headers)

    def _forbidden(self, method: str, headers: Headers, holder: KeyHolder | None, pieces: list[bytes]) -> Reply | None:
        if not self._keys:
            return None
        first = pieces[0] if pieces else b""
        if method in SAFE:
            role: Role | None = None if first in OPEN else "read"
        else:
            role = ROLES.get((method, first, len(pieces)), "admin")
        if role is None or (holder is not None and role in holder.roles):
            return None
        if holder is not None:
            return refusal(
                HTTPStatus.FORBIDDEN, f"This needs a key with the role {role}; the key sent has another role."
            )
        reason = "the one sent is not known" if b"authorization" in headers else "none was sent"
        return refusal(
            HTTPStatus.UNAUTHORIZED,
            f"This needs a key, and {reason}; send one as Authorization: Bearer KEY.",
            (b"www-authenticate", b"Bearer"),
        )

    def _unsafe_request(self, method: str, headers: Headers) -> Reply | None:
        """A request that may change state: not from a foreign site's page, and with a body of bounded JSON."""
        if method in SAFE:
            return None
        origin, host = headers.get(b"origin"), headers.get(b"host")
        # A page of this service may have another scheme: TLS often ends at a proxy.
        is_own = origin is not None and host is not None and origin.lower().partition(b"://")[2] == host.lower()
        if origin is not None and origin not in self._origins and not is_own:
            return refusal(
                HTTPStatus.FORBIDDEN,
                "The request comes from a page of another site, which is not allowed; allow its origin with --cors.",
            )
        length = int(headers.get(b"content-length", b"0"))
        if length > self._max_body_bytes:
            return refusal(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"A body has at most {self._max_body_bytes} bytes, got {length}; split the request.",
            )
        has_body = length > 0 or b"transfer-encoding" in headers
        content_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if has_body and method in WITH_BODY and content_type != b"application/json":
            return refusal(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "The body must be JSON; send it with Content-Type: application/json."
            )
        return None


PREFLIGHT_REPLY = Reply(HTTPStatus.NO_CONTENT.value, PREFLIGHT)
INTERNAL_ERROR = refusal(
    HTTPStatus.INTERNAL_SERVER_ERROR, "The service failed to answer; its log has the reason under X-Request-Id."
)


@dataclass(slots=True)
class Exchange:
    """The messages of one request and its response: adds the headers and records the status."""

    _receive: Callable[[], Awaitable[Message]]
    _send: Any
    _added: list[Header]
    status: int = 0
    """Of the response sent; CLIENT_CLOSED if the client left before it; 0 before either."""

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self.status:
            self.status = CLIENT_CLOSED
        return message

    def send(self, message: Message) -> Awaitable[None]:
        """Not a coroutine function: it returns the server's awaitable, which saves a coroutine a message."""
        if message["type"] == "http.response.start":
            self.status = self.status or message["status"]
            message = {**message, "headers": [*message.get("headers", ()), *self._added]}
        sent: Awaitable[None] = self._send(message)
        return sent

    async def answer(self, reply: Reply) -> None:
        """Send the guard's response, unless another one has started."""
        if not self.status:
            await self.send({"type": "http.response.start", "status": reply.status, "headers": reply.headers})
            await self.send({"type": "http.response.body", "body": reply.body})


def path_pieces(scope: Scope) -> list[bytes]:
    """The decoded pieces of the path between its slashes. The guard and the router both read these."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    pieces = [piece for piece in raw.partition(b"?")[0].split(b"/") if piece]
    return [unquote_to_bytes(piece) for piece in pieces] if b"%" in raw else pieces


@lru_cache(256)
def is_own_host(header: bytes, bound: str) -> bool:
    """Whether a Host header, without its port, is a loopback name or address, or the bound name."""
    host = header.decode("latin-1").lower()
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name == bound or is_loopback(name)


def read_origin(name: str) -> bytes:
    """An origin of --cors in the form that browsers send."""
    origin = name.lower().removesuffix("/")
    if not ORIGIN.fullmatch(origin):
        raise InputError(f"An origin of --cors is a scheme and a host, such as https://shop.example, got {name!r}.")
    return origin.encode()
