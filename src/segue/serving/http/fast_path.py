"""The two most frequent requests, answered without the framework: a user's recommendations, and events.

For these two the framework's routing, parameters and responses cost about as much as the rest of the HTTP process. A
request with anything beyond the forms below goes through the framework, to the same answer.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec
from litestar.exceptions import HTTPException

from segue.serving.http.bodies import MAX_BODY_BYTES, MAX_K, EventsBody
from segue.serving.http.json_request import decode_body
from segue.serving.requests import RecommendationQuery
from segue.serving.service import Service

PATH = re.compile(rb"/users/([A-Za-z0-9._~-]+)/recommendations")  # ids that percent-encoding leaves as they are
QUERY = re.compile(rb"(?:k=([1-9][0-9]{0,3}))?")
RECOMMENDATIONS, EVENTS = "/users/{id}/recommendations", "/events"

Receive = Callable[[], Awaitable[Any]]


def fast_request(service: Service, scope: Any, receive: Receive) -> tuple[str, Coroutine[Any, Any, bytes]] | None:
    """The route's template and the JSON answer to await; None if the request is for the framework."""
    if scope["method"] == "GET":
        raw: bytes = scope.get("raw_path") or b""  # some servers leave the query string in it
        path, count = PATH.fullmatch(raw.partition(b"?")[0]), QUERY.fullmatch(scope["query_string"])
        if path is None or count is None or int(count[1] or 10) > MAX_K:
            return None
        query = RecommendationQuery(user=path[1].decode(), k=int(count[1] or 10))
        return RECOMMENDATIONS, service.answer(query)
    if scope["method"] == "POST" and scope.get("raw_path") == b"/events" and not scope["query_string"]:
        headers = dict(scope["headers"])
        if headers.get(b"content-length", b"0") != b"0" and b"transfer-encoding" not in headers:
            return EVENTS, _store_events(service, receive)
    return None


async def _store_events(service: Service, receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(status_code=413)
    return msgspec.json.encode(await service.add_events(decode_body(body, EventsBody).as_list()))
