"""Whatever goes wrong → application/problem+json with a sentence, and never a traceback."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec
from litestar import Request, Response
from litestar.exceptions import ClientException, HTTPException
from litestar.openapi.datastructures import ResponseSpec

from segue.errors import SegueError, StoreError
from segue.serving.http.bodies import PROBLEM_TYPE, Problem
from segue.serving.requests import OverloadedError

if TYPE_CHECKING:
    from segue.serving.service import Service

MISSING_BODY = "'data'"  # the framework's whole message for it: the name of the argument that it could not fill

logger = logging.getLogger(__name__)


class JsonRequest(Request[Any, Any, Any]):
    """A request whose body is decoded straight into what the handler takes, and refused with a sentence.

    The framework would decode it untyped and then convert it leniently, taking the text "10" for a number.
    """

    @property
    def service(self) -> Service:
        """What the application serves."""
        return service_of(self)

    async def json(self) -> Any:
        wanted = self.route_handler.parsed_data_field
        return read_json(await self.body(), Any if wanted is None else wanted.annotation)


def read_json(body: bytes, wanted: Any) -> Any:
    """A body as what is wanted, or what is wrong with it."""
    try:
        return msgspec.json.decode(body, type=wanted)
    except msgspec.ValidationError as error:
        raise ClientException(f"The body cannot be used: {error}.") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ClientException(f"The body cannot be read as JSON: {error}.") from None


def service_of(request: Request[Any, Any, Any]) -> Service:
    """An attribute of the application: as one of the framework's dependencies it would cost more than its routing."""
    service: Service = request.app.service  # type: ignore[attr-defined]  # of `app.Application`
    return service


def problem(status: int, detail: str, *, headers: Mapping[str, str] | None = None) -> Response[Problem]:
    """A problem as a response."""
    body = Problem(title=HTTPStatus(status).phrase, status=status, detail=detail)
    return Response(body, status_code=status, media_type=PROBLEM_TYPE, headers=headers)


def refused(_: Request[Any, Any, Any], error: SegueError) -> Response[Problem]:
    """Input that is understood and cannot be used."""
    return problem(HTTPStatus.BAD_REQUEST, str(error))


def not_found(_: Request[Any, Any, Any], error: SegueError) -> Response[Problem]:
    """The item that a path names is not known."""
    return problem(HTTPStatus.NOT_FOUND, str(error))


def conflict(_: Request[Any, Any, Any], error: SegueError) -> Response[Problem]:
    """What is asked does not fit the state of the service."""
    return problem(HTTPStatus.CONFLICT, str(error))


def overloaded(request: Request[Any, Any, Any], error: OverloadedError) -> Response[Problem]:
    """Too much to do; the client should come back."""
    service_of(request).metrics.unavailable(error.reason)
    return problem(HTTPStatus.SERVICE_UNAVAILABLE, str(error), headers={"Retry-After": "1"})


def unavailable(request: Request[Any, Any, Any], error: StoreError) -> Response[Problem]:
    """The store cannot be reached: the log says why, the client is told to come back."""
    metrics = service_of(request).metrics
    metrics.unavailable("store")
    metrics.store_error()
    logger.error("%s", error)
    detail = "The store of histories cannot be used just now; ask again in a few seconds."
    return problem(HTTPStatus.SERVICE_UNAVAILABLE, detail, headers={"Retry-After": "5"})


def http_problem(request: Request[Any, Any, Any], error: HTTPException) -> Response[Problem]:
    """What the framework refuses, in our words where its own are none."""
    status, path = error.status_code, request.scope["path"]
    if status == HTTPStatus.NOT_FOUND:
        detail = f"There is nothing at {path}; /schema lists what there is."
    elif status == HTTPStatus.METHOD_NOT_ALLOWED:
        detail = f"{request.method} is not answered at {path}; /schema says what is."
    elif status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        detail = "The body is too large; ask with a shorter history."
    elif status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return unexpected(request, error)
    else:
        detail = _reasons(error)
    return problem(status, detail, headers=error.headers)


def unexpected(request: Request[Any, Any, Any], error: Exception) -> Response[Problem]:
    """A bug: the log has it, the client has not."""
    route = request.scope.get("path_template", "a request")  # not the path: it may hold a user's id
    logger.error("%s %s failed", request.method, route, exc_info=error)
    return problem(HTTPStatus.INTERNAL_SERVER_ERROR, "Something went wrong in the service; its log says what.")


def _reasons(error: HTTPException) -> str:
    """The framework lists what is wrong where in `extra`; one sentence says it all."""
    listed = error.extra if isinstance(error.extra, list) else []
    if any(fault.get("message") == MISSING_BODY for fault in listed):
        return "The request has no body; send a JSON object, as /schema shows."
    reasons = [f"{fault.get('key', 'The request')}: {fault['message']}" for fault in listed if "message" in fault]
    return "; ".join(reasons) + "." if reasons else error.detail


def problem_spec(description: str) -> ResponseSpec:
    """A problem in the OpenAPI document."""
    return ResponseSpec(
        data_container=Problem, description=description, media_type=PROBLEM_TYPE, generate_examples=False
    )
