"""A Service → an HTTP application, described by OpenAPI, with its pages."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any
from urllib.parse import quote_from_bytes, unquote_to_bytes

from litestar import Litestar
from litestar.exceptions import HTTPException
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import Example, Parameter, RequestBody
from litestar.types import Receive, Scope, Send

from segue.errors import FolderError, SegueError, StoreError
from segue.serve.pages import PAGE_ROUTES, SchemaPage
from segue.serve.problems import JsonRequest, http_problem, not_found, overloaded, refused, unavailable, unexpected
from segue.serve.refusals import OverloadedError, UnknownModelError
from segue.serve.routes import ROUTES
from segue.serve.service import Service

MOST_BYTES = 1_000_000  # of a request's body


class EncodedPaths(Litestar):
    """Routes by the path as it was sent, piece by piece: an encoded slash belongs to its id and parts nothing."""

    service: Service

    async def __call__(self, scope: Any, receive: Receive | Any, send: Send | Any) -> None:
        if scope["type"] == "http":
            scope["path"] = _encoded_path(scope)
        await super().__call__(scope, receive, send)


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

    app = EncodedPaths(
        [*ROUTES, *PAGE_ROUTES],
        lifespan=[running],
        exception_handlers={
            HTTPException: http_problem,
            OverloadedError: overloaded,
            StoreError: unavailable,
            UnknownModelError: not_found,
            FolderError: unexpected,  # a damaged run is not the client's doing
            SegueError: refused,
            Exception: unexpected,
        },
        request_max_body_size=MOST_BYTES,
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
    }
    for path, item in (app.openapi_schema.paths or {}).items():
        if path in bodies and item.post is not None and isinstance(item.post.request_body, RequestBody):
            content = item.post.request_body.content["application/json"]
            content.examples = {"example": Example(value=bodies[path])}
        for parameter in (item.get and item.get.parameters) or ():
            if isinstance(parameter, Parameter) and parameter.name == "id":
                parameter.example = ids[0] if path.startswith("/items/") else "somebody"
