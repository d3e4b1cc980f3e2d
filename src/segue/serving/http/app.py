"""A Service → an HTTP application, described by OpenAPI, with its pages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any
from urllib.parse import quote_from_bytes, unquote_to_bytes

from litestar import Litestar, Request, Response
from litestar.exceptions import HTTPException
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import Example, Parameter, RequestBody
from litestar.types import Receive, Scope, Send

from segue.errors import FolderError, SegueError, StoreError
from segue.serving.http.bodies import MAX_BODY_BYTES
from segue.serving.http.fast_path import fast_request
from segue.serving.http.pages import PAGE_ROUTES, SchemaPage
from segue.serving.http.problems import (
    JsonRequest,
    http_problem,
    not_found,
    overloaded,
    refused,
    unavailable,
    unexpected,
)
from segue.serving.http.routes import ROUTES
from segue.serving.requests import OverloadedError, UnknownModelError
from segue.serving.service import Service

PROBLEMS: dict[int | type[Exception], Callable[[Request[Any, Any, Any], Any], Response[Any]]] = {
    HTTPException: http_problem,
    OverloadedError: overloaded,
    StoreError: unavailable,
    UnknownModelError: not_found,
    FolderError: unexpected,  # a damaged run is not the client's doing
    SegueError: refused,
    Exception: unexpected,
}


class Application(Litestar):
    """Routes by the path as it was sent, piece by piece: an encoded slash belongs to its id and parts nothing."""

    service: Service

    async def __call__(self, scope: Any, receive: Receive | Any, send: Send | Any) -> None:
        if scope["type"] == "http":
            plain = fast_request(self.service, scope, receive)
            if plain is not None:
                scope["path_template"], answer = plain
                await self._answer(answer, scope, receive, send)
                return
            scope["path"] = _encoded_path(scope)
        await super().__call__(scope, receive, send)

    async def _answer(self, answer: Awaitable[bytes], scope: Any, receive: Any, send: Any) -> None:
        try:
            body = await answer
        except Exception as error:  # noqa: BLE001  # each kind has its own sentence
            scope["litestar_app"] = self
            request = JsonRequest(scope, receive, send)
            told = next(PROBLEMS[kind] for kind in type(error).__mro__ if kind in PROBLEMS)(request, error)
            await told.to_asgi_response(app=None, request=request)(scope, receive, send)
            return
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _encoded_path(scope: Scope | Any) -> str:
    """The path with every piece encoded in the same one way."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    pieces = raw.partition(b"?")[0].split(b"/")
    return "/".join(quote_from_bytes(unquote_to_bytes(piece), safe="") for piece in pieces)


def create_app(service: Service, *, examples: Sequence[str] = ()) -> Litestar:
    """The application for a Service, which it runs and closes.

    `examples`: items to show in the OpenAPI document, which anyone may read.
    """

    def running(_: Litestar) -> AbstractAsyncContextManager[None]:
        return service.running()

    app = Application(
        [*ROUTES, *PAGE_ROUTES],
        lifespan=[running],
        exception_handlers=PROBLEMS,
        request_max_body_size=MAX_BODY_BYTES,
        request_class=JsonRequest,
        logging_config=None,
        openapi_config=OpenAPIConfig(
            title="segue",
            version="1",
            description="Next-item recommendations, live: every event changes the next answer.",
            render_plugins=[SchemaPage(), JsonRenderPlugin()],
        ),
    )
    app.service = service
    if examples:
        _add_examples(app, list(examples))
    return app


def _add_examples(app: Litestar, ids: list[str]) -> None:
    """Examples in the OpenAPI document that this very service answers."""
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
