"""The two requests that a service hears most, answered past the framework: a user's recommendations, and events.

Routing, parameters and responses cost the framework about as much as all else that the HTTP process does for them.
Whatever is not as plain as here goes through the framework, to the same answer.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec
from litestar.exceptions import HTTPException

from segue.serving.http.bodies import MAX_BODY_BYTES, MAX_K, EventsBody
from segue.serving.http.problems import read_json
from segue.serving.requests import RecommendationQuery
from segue.serving.service import Service

PATH = re.compile(rb"/users/([A-Za-z0-9._~-]+)/recommendations")  # ids that are the same encoded and not
QUERY = re.compile(rb"(?:k=([1-9][0-9]{0,3}))?")
RECOMMENDATIONS, EVENTS = "/users/{id}/recommendations", "/events"

Receive = Callable[[], Awaitable[Any]]


def fast_request(service: Service, scope: Any, receive: Receive) -> tuple[str, Coroutine[Any, Any, bytes]] | None:
    """The route's template and the answer to come, as JSON, to a request that is plain and can be used."""
    if scope["method"] == "GET":
        question = fast_question(scope)
        return None if question is None else (RECOMMENDATIONS, service.answer(question))
    if scope["method"] == "POST" and scope.get("raw_path") == b"/events" and not scope["query_string"]:
        headers = dict(scope["headers"])
        if headers.get(b"content-length", b"0") != b"0" and b"transfer-encoding" not in headers:
            return EVENTS, _kept(service, receive)
    return None


def fast_question(scope: Any) -> RecommendationQuery | None:
    """A question about a user, with nothing else or with how many items."""
    raw: bytes = scope.get("raw_path") or b""  # some servers leave the query in it
    path, query = PATH.fullmatch(raw.partition(b"?")[0]), QUERY.fullmatch(scope["query_string"])
    if path is None or query is None:
        return None
    user = path[1].decode()
    if query[1] is None:
        return RecommendationQuery(user=user)
    k = int(query[1])
    return RecommendationQuery(user=user, k=k) if k <= MAX_K else None


async def _kept(service: Service, receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(status_code=413)
    return msgspec.json.encode(await service.add_events(read_json(body, EventsBody).as_list()))
