"""A Service → an ASGI application with its routes, its OpenAPI document and its page."""

from __future__ import annotations

import re
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec
from litestar import Litestar
from litestar.exceptions import HTTPException
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import Example, Parameter, RequestBody

from segue.serving.http.bodies import MAX_BODY_BYTES, MAX_K, EventsBody
from segue.serving.http.json_request import JsonRequest, decode_body, hide_id
from segue.serving.http.pages import PAGE_ROUTES, SchemaPage
from segue.serving.http.problems import EXCEPTION_HANDLERS
from segue.serving.http.routes import ROUTES
from segue.serving.requests import RecommendationQuery
from segue.serving.service import Service

PATH = re.compile(rb"/users/([A-Za-z0-9._~-]+)/recommendations")  # ids that percent-encoding leaves as they are
QUERY = re.compile(rb"(?:k=([1-9][0-9]{0,3}))?")


class Application(Litestar):
    """The framework's application, with the fast path before its routing."""

    service: Service

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        fast = fast_request(self.service, scope, receive) if scope["type"] == "http" else None
        if fast is None:
            if scope["type"] == "http":
                hide_id(scope)
            await super().__call__(scope, receive, send)
            return
        scope["path_template"], answer = fast
        try:
            body = await answer
        except Exception as error:  # noqa: BLE001  # every kind has a handler
            scope["litestar_app"] = self
            request = JsonRequest(scope, receive, send)
            handler = next(EXCEPTION_HANDLERS[kind] for kind in type(error).__mro__ if kind in EXCEPTION_HANDLERS)
            response = handler(request, error)
            await response.to_asgi_response(app=None, request=request)(scope, receive, send)
            return
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def fast_request(service: Service, scope: Any, receive: Any) -> tuple[str, Coroutine[Any, Any, bytes]] | None:
    """A user's recommendations or events without the framework: the route's template and the JSON answer to await.

    For these two, the most frequent requests, the framework's routing, parameters and responses cost about as much as
    the rest of the HTTP process. None: the request has another form, and the framework gives the same answer.
    """
    if scope["method"] == "GET":
        raw: bytes = scope.get("raw_path") or b""  # some servers leave the query string in it
        path, count = PATH.fullmatch(raw.partition(b"?")[0]), QUERY.fullmatch(scope["query_string"])
        if path is None or count is None or int(count[1] or 10) > MAX_K:
            return None
        query = RecommendationQuery(user=path[1].decode(), k=int(count[1] or 10))
        return "/users/{id}/recommendations", service.answer(query)
    if scope["method"] == "POST" and scope.get("raw_path") == b"/events" and not scope["query_string"]:
        headers = dict(scope["headers"])
        if headers.get(b"content-length", b"0") != b"0" and b"transfer-encoding" not in headers:
            return "/events", _store_events(service, receive)
    return None


async def _store_events(service: Service, receive: Any) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(status_code=413)
    return msgspec.json.encode(await service.add_events(decode_body(body, EventsBody).as_list()))


def create_app(service: Service, *, examples: Sequence[str] = ()) -> Litestar:
    """The application of a Service, which it runs and closes.

    `examples`: ids of items for the OpenAPI document, which anyone may read.
    """
    app = Application(
        [*ROUTES, *PAGE_ROUTES],
        lifespan=[lambda _: service.running()],
        exception_handlers=EXCEPTION_HANDLERS,
        request_max_body_size=MAX_BODY_BYTES,
        request_class=JsonRequest,
        logging_config=None,
        openapi_config=OpenAPIConfig(
            title="segue",
            version="1",
            description="Live next-item recommendations: every event changes the next answer.",
            render_plugins=[SchemaPage(), JsonRenderPlugin()],
        ),
    )
    app.service = service
    if examples:
        _add_examples(app, list(examples))
    return app


def _add_examples(app: Litestar, ids: list[str]) -> None:
    """Put requests that this service can answer into the OpenAPI document."""
    bodies: dict[str, dict[str, Any]] = {
        "/recommendations": {"history": ids, "k": 5},
        "/explanations": {"history": ids},
        "/events": {"user": "somebody", "item": ids[0]},
        "/items": {"id": "something-new", "title": "Something new"},
    }
    for path, item in (app.openapi_schema.paths or {}).items():
        if path in bodies and item.post is not None and isinstance(item.post.request_body, RequestBody):
            content = item.post.request_body.content["application/json"]
            content.examples = {"example": Example(value=bodies[path])}
        for parameter in (item.get and item.get.parameters) or ():
            if isinstance(parameter, Parameter) and parameter.name == "id":
                parameter.example = ids[0] if path.startswith("/items/") else "somebody"
