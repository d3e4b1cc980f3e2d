"""Errors → application/problem+json responses with one sentence each, never a traceback."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, cast

from litestar import Response
from litestar.exceptions import HTTPException
from litestar.openapi.datastructures import ResponseSpec

from segue.errors import FolderError, SegueError, StoreError
from segue.serving.http.bodies import PROBLEM_TYPE, Problem
from segue.serving.http.guard import path_pieces
from segue.serving.http.json_request import JsonRequest, encoded_path
from segue.serving.requests import OverloadedError, UnknownModelError

MISSING_BODY = "'data'"  # the framework's whole message for it: the name of the handler's parameter

logger = logging.getLogger(__name__)


def problem(status: int, detail: str, *, headers: Mapping[str, str] | None = None) -> Response[Problem]:
    body = Problem(title=HTTPStatus(status).phrase, status=status, detail=detail)
    return Response(body, status_code=status, media_type=PROBLEM_TYPE, headers=headers)


def refusal_with(status: HTTPStatus) -> Callable[[Any, SegueError], Response[Problem]]:
    """A handler that answers with this status and the error's sentence."""
    return lambda _, error: problem(status, str(error))


not_found = refusal_with(HTTPStatus.NOT_FOUND)  # an unknown item or model
conflict = refusal_with(HTTPStatus.CONFLICT)  # the request does not fit the state of the service


def overloaded(request: JsonRequest, error: OverloadedError) -> Response[Problem]:
    """503: too many requests wait; the client should retry."""
    request.service.metrics.unavailable(error.reason)
    return problem(HTTPStatus.SERVICE_UNAVAILABLE, str(error), headers={"Retry-After": "1"})


def store_unavailable(request: JsonRequest, error: StoreError) -> Response[Problem]:
    """503: the store failed. The reason is logged and not sent to the client."""
    request.service.metrics.unavailable("store")
    logger.error("%s", error)
    detail = "The store of histories is not available at the moment; send the request again in a few seconds."
    return problem(HTTPStatus.SERVICE_UNAVAILABLE, detail, headers={"Retry-After": "5"})


def http_problem(request: JsonRequest, error: HTTPException) -> Response[Problem]:
    """The framework's own refusals."""
    status, scope = error.status_code, cast("dict[str, Any]", request.scope)
    path = encoded_path(path_pieces(scope))
    if status == HTTPStatus.NOT_FOUND:
        detail = f"There is nothing at {path}; /schema lists the paths."
    elif status == HTTPStatus.METHOD_NOT_ALLOWED:
        detail = f"{path} does not take {request.method}; /schema lists the methods of each path."
    elif status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        detail = "The body is too large; send a shorter history or fewer events."
    elif status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return unexpected(request, error)
    else:  # the framework's list of faults in `extra` as one sentence
        faults = error.extra if isinstance(error.extra, list) else []
        reasons = [f"{fault.get('key', 'The request')}: {fault['message']}" for fault in faults if "message" in fault]
        detail = "; ".join(reasons) + "." if reasons else error.detail
        if any(fault.get("message") == MISSING_BODY for fault in faults):
            detail = "The request has no body; send a JSON object, as /schema shows."
    return problem(status, detail, headers=error.headers)


def unexpected(request: JsonRequest, error: Exception) -> Response[Problem]:
    """500: a bug or a damaged run. The traceback is logged and not sent to the client."""
    route = request.scope.get("path_template", "a request")  # not the path, which may hold a user's id
    logger.error("%s %s failed", request.method, route, exc_info=error)
    return problem(HTTPStatus.INTERNAL_SERVER_ERROR, "The service failed to answer; its log has the reason.")


def problem_spec(description: str) -> ResponseSpec:
    """A problem in the OpenAPI document."""
    return ResponseSpec(
        data_container=Problem, description=description, media_type=PROBLEM_TYPE, generate_examples=False
    )


EXCEPTION_HANDLERS: dict[int | type[Exception], Callable[[Any, Any], Response[Any]]] = {
    HTTPException: http_problem,
    OverloadedError: overloaded,
    StoreError: store_unavailable,
    UnknownModelError: not_found,
    FolderError: unexpected,  # a damaged run is not the client's fault
    SegueError: refusal_with(HTTPStatus.BAD_REQUEST),
    Exception: unexpected,
}
