"""The routes of the API: HTTP requests → calls of `Service`."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import msgspec
from litestar import MediaType, Response, delete, get, post, put
from litestar.handlers import BaseRouteHandler
from litestar.params import JSONBody, PathParameter, QueryParameter

from segue.data.timestamps import MICROSECONDS
from segue.errors import InputError
from segue.recommend.answer import Explanation
from segue.recommend.history import microseconds, read_history
from segue.serving.http import bodies
from segue.serving.http.bodies import MAX_ENTRIES, MAX_K
from segue.serving.http.json_request import JsonRequest
from segue.serving.http.problems import conflict, not_found, problem_spec
from segue.serving.requests import CannotSwitchError, RecommendationQuery
from segue.serving.service import Service

MAX_LISTED = 200  # items in a search result

User = Annotated[str, PathParameter(description="The id of a user.")]
Item = Annotated[str, PathParameter(description="The id of an item.")]
K = Annotated[int, QueryParameter(ge=1, le=MAX_K, description="The number of items to return.")]
Model = Annotated[str | None, QueryParameter(description="The name of a served model; the active one if missing.")]
KeepSeen = Annotated[
    bool | None,
    QueryParameter(description="Whether the answer may hold items of the history; the run's default if missing."),
]
IdList = Annotated[list[str] | None, QueryParameter(description="An id; may be repeated.", max_items=MAX_ENTRIES)]
WhereList = Annotated[
    list[str] | None,
    QueryParameter(
        description="A filter column:value on the catalogue; may be repeated. An item matches if, in every column "
        "named, it has one of the values.",
        max_items=MAX_ENTRIES,
    ),
]

BAD = problem_spec("The request cannot be used")
UNKNOWN = problem_spec("The item or model is not known")
LARGE = problem_spec("The body is too large")
NOT_JSON = problem_spec("The body is not JSON")
BUSY = problem_spec("The service is overloaded; Retry-After has the seconds to wait")
CONFLICT = problem_spec("The run cannot be served; the active run stays")

# Responses of the guard, which runs before the application. Health checks need no key and have no rate limit.
PROBED = {
    403: problem_spec("The key has another role, or the request comes from a site that is not allowed"),
    414: problem_spec("The path or the query string is too long"),
}
GUARDED = {
    **PROBED,
    401: problem_spec("A key is needed"),
    429: problem_spec("Too many requests; Retry-After has the seconds to wait"),
}
WITH_BODY = {**GUARDED, 413: LARGE, 415: NOT_JSON}
USUAL = {400: BAD, 503: BUSY}

read = partial(get, responses={**GUARDED, **USUAL})
read_known = partial(get, responses={**GUARDED, **USUAL, 404: UNKNOWN})
post_body = partial(post, status_code=200, responses={**WITH_BODY, **USUAL})
post_known = partial(post, status_code=200, responses={**WITH_BODY, **USUAL, 404: UNKNOWN})


@post_body(
    "/events",
    summary="Store events",
    description="One event, or several as {events: […]}. The response is sent when they are on disk.",
)
async def events(data: JSONBody[bodies.EventsBody], request: JsonRequest) -> bodies.EventsReceipt:
    return await request.service.add_events(data.as_list())


@read_known(
    "/users/{id:str}/recommendations",
    summary="Recommendations for a user",
    description="From the user's events in the store. A user without events gets the most popular items, and the field "
    "`fallback` is set.",
)
async def user_recommendations(
    request: JsonRequest,
    id: User,
    k: K = 10,
    model: Model = None,
    keep_seen: KeepSeen = None,
    exclude: IdList = None,
    only: IdList = None,
    where: WhereList = None,
) -> Response[bodies.Answer]:
    columns: dict[str, list[Any]] = {}
    for text in where or ():
        column, colon, value = text.partition(":")
        if not colon:
            raise InputError(f"A filter is column:value, such as where=category:books, got {text!r}.")
        columns.setdefault(column, []).append(value)
    query = RecommendationQuery(
        user=id, k=k, model=model, keep_seen=keep_seen, exclude=exclude, only=only, where=columns or None
    )
    return await _recommend(request.service, query)


@post_known(
    "/recommendations",
    summary="Recommendations for a history",
    description="A history without any known item gets the most popular items, and the field `fallback` is set.",
)
async def recommendations(
    data: JSONBody[bodies.RecommendationRequest], request: JsonRequest
) -> Response[bodies.Answer]:
    history = read_history(data.history)
    now = None if data.now is None else microseconds(data.now) // MICROSECONDS
    fields = msgspec.structs.asdict(data) | {"history": history, "now": now}
    return await _recommend(request.service, RecommendationQuery(**fields))


@read_known(
    "/items/{id:str}/similar",
    summary="The nearest items of an item",
    description="Scores are cosine similarities, without item-to-item counts. The id is percent-encoded, including its "
    "slashes.",
    exception_handlers={InputError: not_found},
)
async def similar(request: JsonRequest, id: Item, k: K = 10, model: Model = None) -> bodies.Answer:
    return await request.service.similar(id, k, model)


@read(
    "/items",
    summary="Search the catalogue",
    description="By a part of an id or a title, ignoring case. Without a text, the most frequent items.",
)
async def items(
    request: JsonRequest,
    search: Annotated[str, QueryParameter(description="A part of an id or a title.", max_length=1024)] = "",
    limit: Annotated[int, QueryParameter(ge=1, le=MAX_LISTED, description="The number of items to return.")] = 20,
) -> bodies.CatalogueItems:
    return bodies.CatalogueItems(items=await request.service.search(search, limit))


@post_body(
    "/items",
    summary="Add items that the model was not trained on",
    description="One item, or several as {items: […]}. A model with item content recommends them at once, and within a "
    "second in every worker and replica. The response is sent when they are on disk.",
)
async def new_items(data: JSONBody[bodies.NewItemsBody], request: JsonRequest) -> bodies.ItemsReceipt:
    return await request.service.add_items(data.as_list())


@read("/users/{id:str}/history", summary="A user's newest events")
async def history(
    request: JsonRequest,
    id: User,
    limit: Annotated[int, QueryParameter(ge=1, le=MAX_ENTRIES, description="The number of events to return.")] = 100,
) -> bodies.UserHistory:
    return await request.service.history(id, limit)


@delete(
    "/users/{id:str}",
    status_code=200,
    summary="Delete a user",
    description="Removes every event of the user.",
    responses={**GUARDED, **USUAL},
)
async def forget(request: JsonRequest, id: User) -> bodies.Deletion:
    return bodies.Deletion(removed=await request.service.delete_user(id))


@post_known(
    "/explanations",
    summary="Why an item is recommended",
    description="The contribution of each entry of the history: the score minus the score without that entry.",
)
async def explanations(data: JSONBody[bodies.ExplanationRequest], request: JsonRequest) -> Explanation:
    return await request.service.explain(data)


@post_known(
    "/plans",
    summary="The next items as one plan",
    description="Each item is chosen given the items before it, by a model that can plan (see GET /model). A history "
    "without any known item gets the most popular items, and the field `fallback` is set. Item-to-item counts have "
    "no part in a plan.",
)
async def plans(data: JSONBody[bodies.PlanRequest], request: JsonRequest) -> bodies.PlanAnswer:
    return await request.service.plan(data)


@get("/model", summary="The served models", responses={**GUARDED, 503: BUSY})
async def model_served(request: JsonRequest) -> bodies.ModelsStatus:
    return await request.service.models()


@put(
    "/model",
    summary="Switch to another run",
    description="The run is loaded and checked beside the active one, and becomes active between two requests.",
    exception_handlers={CannotSwitchError: conflict},
    responses={**WITH_BODY, 400: BAD, 409: CONFLICT, 503: BUSY},
)
async def switch(data: JSONBody[bodies.SwitchRequest], request: JsonRequest) -> bodies.ActiveRun:
    return await request.service.switch(data.run)


@post(
    "/model/rollback",
    status_code=200,
    summary="Switch back to the previous run",
    exception_handlers={CannotSwitchError: conflict},
    responses={**WITH_BODY, 409: CONFLICT, 503: BUSY},
)
async def rollback(request: JsonRequest) -> bodies.ActiveRun:
    return await request.service.switch(None)


@get("/health/live", summary="Whether the process answers", responses=PROBED)
async def live() -> bodies.Health:
    return bodies.Health(status="live")


@get(
    "/health/ready",
    summary="Whether the service can answer: a model is loaded and the store is available",
    responses={**PROBED, 503: BUSY},
)
async def ready(request: JsonRequest) -> bodies.Health:
    await request.service.check()
    return bodies.Health(status="ready")


@get("/metrics", summary="Metrics in Prometheus' text format", media_type="text/plain", responses=GUARDED)
async def metrics(request: JsonRequest) -> Response[bytes]:
    body, media_type = await request.service.render_metrics()
    return Response(body, media_type=media_type)


ROUTES = [value for value in list(globals().values()) if isinstance(value, BaseRouteHandler)]


async def _recommend(service: Service, query: RecommendationQuery) -> Response[bodies.Answer]:
    """An answer, which comes from the engine as JSON."""
    encoded: Any = await service.answer(query)
    return Response(encoded, media_type=MediaType.JSON)
