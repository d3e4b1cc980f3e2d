"""The routes: what is asked over HTTP → what `Service` does."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import unquote

from litestar import MediaType, Response, delete, get, post, put
from litestar._asgi.routing_trie.traversal import parse_path_params
from litestar.exceptions import HTTPException
from litestar.handlers import BaseRouteHandler
from litestar.params import JSONBody, PathParameter, QueryParameter

from segue.data.batch import MICROSECONDS
from segue.errors import InputError
from segue.recommend.explain.explanation import Explanation
from segue.recommend.history import microseconds, read_history
from segue.serving.http.bodies import (
    MAX_ENTRIES,
    MAX_K,
    ActiveRun,
    Answer,
    CatalogueItems,
    Deletion,
    EventsBody,
    EventsReceipt,
    ExplanationRequest,
    Health,
    ItemsReceipt,
    ModelsStatus,
    NewItemsBody,
    PlanAnswer,
    PlanRequest,
    RecommendationRequest,
    SwitchRequest,
    UserHistory,
)
from segue.serving.http.problems import JsonRequest, conflict, not_found, problem_spec
from segue.serving.requests import CannotSwitchError, RecommendationQuery
from segue.serving.service import Service

MAX_LISTED = 200  # items of a search

User = Annotated[str, PathParameter(description="A user's id.")]
Item = Annotated[str, PathParameter(description="An item's id.")]
K = Annotated[int, QueryParameter(ge=1, le=MAX_K, description="How many items to answer.")]
Model = Annotated[str | None, QueryParameter(description="Which of the models served; without it, the active one.")]
KeepSeen = Annotated[
    bool | None, QueryParameter(description="Whether seen items may be answered; without it, the run's own way.")
]
IdList = Annotated[list[str] | None, QueryParameter(description="Ids; may be repeated.", max_items=MAX_ENTRIES)]
WhereList = Annotated[
    list[str] | None,
    QueryParameter(
        description="column:value of the catalogue; of one column any value will do, of several all must fit.",
        max_items=MAX_ENTRIES,
    ),
]

BAD = problem_spec("The request cannot be used")
UNKNOWN = problem_spec("It is not known")
LARGE = problem_spec("The body is too large")
NOT_JSON = problem_spec("The body is not JSON")
BUSY = problem_spec("Too much to do just now; Retry-After says when to ask again")
CONFLICT = problem_spec("The run cannot be served; the one being served goes on")

# What stands before the application may answer everywhere. Probes have no key and are never too many.
PROBED = {
    403: problem_spec("The key is for something else, or the request comes from a site that may not ask"),
    414: problem_spec("The path or the query is too long"),
}
GUARDED = {
    **PROBED,
    401: problem_spec("A key is needed"),
    429: problem_spec("Too many requests; Retry-After says when"),
}
WITH_BODY = {**GUARDED, 413: LARGE, 415: NOT_JSON}


@post(
    "/events",
    status_code=200,
    summary="Tell what users did",
    description="One event, or several as {events: […]}. The answer comes when they are on disk.",
    responses={**WITH_BODY, 400: BAD, 503: BUSY},
)
async def events(data: JSONBody[EventsBody], request: JsonRequest) -> EventsReceipt:
    return await request.service.add_events(data.as_list())


@get(
    "/users/{id:str}/recommendations",
    summary="The items that come next for a user",
    description="From the events kept of the user. One without any is answered by popularity, and the answer says so.",
    responses={**GUARDED, 400: BAD, 404: UNKNOWN, 503: BUSY},
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
) -> Response[Answer]:
    return await _answered(
        request.service,
        RecommendationQuery(
            user=decoded(id),
            k=k,
            model=model,
            keep_seen=keep_seen,
            exclude=exclude,
            only=only,
            where=None if where is None else _columns(where),
        ),
    )


@post(
    "/recommendations",
    status_code=200,
    summary="The items that come next in a history",
    description="A history without any known item is answered by popularity, and the answer says so.",
    responses={**WITH_BODY, 400: BAD, 404: UNKNOWN, 503: BUSY},
)
async def recommendations(data: JSONBody[RecommendationRequest], request: JsonRequest) -> Response[Answer]:
    return await _answered(
        request.service,
        RecommendationQuery(
            history=read_history(data.history),
            k=data.k,
            model=data.model,
            keep_seen=data.keep_seen,
            exclude=data.exclude,
            only=data.only,
            where=data.where,
            now=None if data.now is None else microseconds(data.now) // MICROSECONDS,
        ),
    )


@get(
    "/items/{id:str}/similar",
    summary="The items nearest to an item",
    description="Scores are cosines. The id is percent-encoded, its slashes included.",
    exception_handlers={InputError: not_found},
    responses={**GUARDED, 400: BAD, 404: UNKNOWN, 503: BUSY},
)
async def similar(request: JsonRequest, id: Item, k: K = 10, model: Model = None) -> Answer:
    return await request.service.similar(decoded(id), k, model)


@get(
    "/items",
    summary="Search the catalogue",
    description="By a part of an id or a title, in any case. Without a text, the most frequent items.",
    responses={**GUARDED, 400: BAD, 503: BUSY},
)
async def items(
    request: JsonRequest,
    search: Annotated[str, QueryParameter(description="A part of an id or a title.", max_length=1024)] = "",
    limit: Annotated[int, QueryParameter(ge=1, le=MAX_LISTED, description="How many items to list.")] = 20,
) -> CatalogueItems:
    return CatalogueItems(items=await request.service.search(search, limit))


@post(
    "/items",
    status_code=200,
    summary="Add items that the model was not trained on",
    description="One item, or several as {items: […]}. A model that knows items by their content answers them from now "
    "on, here and within a second in every worker and replica; the answer comes when they are on disk.",
    responses={**WITH_BODY, 400: BAD, 503: BUSY},
)
async def new_items(data: JSONBody[NewItemsBody], request: JsonRequest) -> ItemsReceipt:
    return await request.service.add_items(data.as_list())


@get(
    "/users/{id:str}/history",
    summary="A user's newest events",
    responses={**GUARDED, 400: BAD, 503: BUSY},
)
async def history(
    request: JsonRequest,
    id: User,
    limit: Annotated[int, QueryParameter(ge=1, le=MAX_ENTRIES, description="How many events to list.")] = 100,
) -> UserHistory:
    return await request.service.history(decoded(id), limit)


@delete(
    "/users/{id:str}",
    status_code=200,
    summary="Forget a user",
    description="Every event of the user is removed.",
    responses={**GUARDED, 400: BAD, 503: BUSY},
)
async def forget(request: JsonRequest, id: User) -> Deletion:
    removed = await request.service.delete_user(decoded(id))
    # The framework remembers paths that were asked for, and they hold the id.
    request.app.asgi_router.handle_routing.cache_clear()
    parse_path_params.cache_clear()
    return Deletion(removed=removed)


@post(
    "/explanations",
    status_code=200,
    summary="Why an item is answered",
    description="How much each entry of the history contributed: the score less the score without that entry.",
    responses={**WITH_BODY, 400: BAD, 404: UNKNOWN, 503: BUSY},
)
async def explanations(data: JSONBody[ExplanationRequest], request: JsonRequest) -> Explanation:
    return await request.service.explain(data)


@post(
    "/plans",
    status_code=200,
    summary="The next items as one plan",
    description="Each is chosen knowing those before it, by a model that can plan; GET /model says which can. A "
    "history without any known item gets the most frequent items, and the plan says so.",
    responses={**WITH_BODY, 400: BAD, 404: UNKNOWN, 503: BUSY},
)
async def plans(data: JSONBody[PlanRequest], request: JsonRequest) -> PlanAnswer:
    return await request.service.plan(data)


@get("/model", summary="What is being served", responses={**GUARDED, 503: BUSY})
async def model_served(request: JsonRequest) -> ModelsStatus:
    return await request.service.models()


@put(
    "/model",
    summary="Serve another run",
    description="It is loaded and checked beside the one being served, then takes over between two requests.",
    exception_handlers={CannotSwitchError: conflict},
    responses={**WITH_BODY, 400: BAD, 409: CONFLICT, 503: BUSY},
)
async def switch(data: JSONBody[SwitchRequest], request: JsonRequest) -> ActiveRun:
    return await request.service.switch(data.run)


@post(
    "/model/rollback",
    status_code=200,
    summary="Serve the previous run again",
    exception_handlers={CannotSwitchError: conflict},
    responses={**WITH_BODY, 409: CONFLICT, 503: BUSY},
)
async def rollback(request: JsonRequest) -> ActiveRun:
    return await request.service.switch(None)


@get("/health/live", summary="Whether the process answers", responses=PROBED)
async def live() -> Health:
    return Health(status="live")


@get(
    "/health/ready",
    summary="Whether questions can be answered: a model is loaded, the store is there",
    responses={**PROBED, 503: BUSY},
)
async def ready(request: JsonRequest) -> Health:
    await request.service.check()
    return Health(status="ready")


@get("/metrics", summary="Counts and times for Prometheus", media_type="text/plain", responses=GUARDED)
async def metrics(request: JsonRequest) -> Response[bytes]:
    body, media_type = await request.service.render_metrics()
    return Response(body, media_type=media_type)


ROUTES: list[BaseRouteHandler] = [
    events,
    user_recommendations,
    recommendations,
    similar,
    items,
    new_items,
    history,
    forget,
    explanations,
    plans,
    model_served,
    switch,
    rollback,
    live,
    ready,
    metrics,
]


async def _answered(service: Service, question: RecommendationQuery) -> Response[Answer]:
    """An answer comes from the engine as JSON already."""
    encoded: Any = await service.answer(question)
    return Response(encoded, media_type=MediaType.JSON)


def decoded(id: str) -> str:
    """An id of a path as it was written, before it was percent-encoded."""
    try:
        return unquote(id, errors="strict")
    except UnicodeDecodeError:
        raise HTTPException(status_code=400, detail="The id in the path is not percent-encoded UTF-8.") from None


def _columns(where: list[str]) -> dict[str, list[Any]]:
    """`column:value` texts, by column."""
    columns: dict[str, list[Any]] = {}
    for text in where:
        column, colon, value = text.partition(":")
        if not colon:
            raise InputError(f"A filter is column:value, such as where=category:books, got {text!r}.")
        columns.setdefault(column, []).append(value)
    return columns
