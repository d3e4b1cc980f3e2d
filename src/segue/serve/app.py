"""A Recommender → an HTTP application: histories in, answers out, problems as sentences, described by OpenAPI."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote_from_bytes, unquote, unquote_to_bytes

from litestar import Litestar, get, post
from litestar.datastructures import State
from litestar.exceptions import HTTPException
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import Example, Parameter, RequestBody
from litestar.params import JSONBody, PathParameter, QueryParameter
from litestar.response import Redirect
from litestar.types import Receive, Scope, Send

from segue.errors import InputError, SegueError
from segue.recommend.answers import Recommendation
from segue.recommend.recommender import Recommender
from segue.serve.bodies import MOST_ANSWERS, Health, RecommendationRequest
from segue.serve.problems import JsonRequest, http_problem, not_found, problem_spec, refused, unexpected
from segue.serve.schema_page import SchemaPage

MOST_BYTES = 1_000_000  # of a request's body


@post(
    "/recommendations",
    status_code=200,
    sync_to_thread=True,
    summary="The items that come next in a history",
    description="A history without any known item is answered by popularity, and the answer says so.",
    responses={
        400: problem_spec("The request cannot be used"),
        413: problem_spec("The body is too large"),
    },
)
def recommendations(data: JSONBody[RecommendationRequest], state: State) -> Recommendation:
    answer: Recommendation = state.recommender.recommend(
        data.history,
        data.k,
        now=data.now,
        exclude=data.exclude,
        only=data.only,
        keep_seen=data.keep_seen,
    )
    return answer


@get(
    "/items/{id:str}/similar",
    sync_to_thread=True,
    summary="The items nearest to an item",
    description="Scores are cosines. The id is percent-encoded, its slashes included.",
    exception_handlers={InputError: not_found},
    responses={400: problem_spec("The request cannot be used"), 404: problem_spec("The item is not known")},
)
def similar(
    state: State,
    id: Annotated[str, PathParameter(description="An item's id.")],
    k: Annotated[int, QueryParameter(ge=1, le=MOST_ANSWERS, description="How many items to answer.")] = 10,
) -> Recommendation:
    try:
        item = unquote(id, errors="strict")
    except UnicodeDecodeError:
        raise HTTPException(status_code=400, detail="The id in the path is not percent-encoded UTF-8.") from None
    answer: Recommendation = state.recommender.similar(item, k)
    return answer


@get("/health/live", sync_to_thread=False, summary="Whether the process answers")
def live() -> Health:
    return Health(status="live")


@get("/health/ready", sync_to_thread=False, summary="Whether a model is loaded")
def ready() -> Health:
    return Health(status="ready")  # the application is made with its model, so there is no moment in between


@get("/", include_in_schema=False, sync_to_thread=False)
def root() -> Redirect:
    return Redirect("/schema")


class Service(Litestar):
    """Routes by the path as it was sent, piece by piece: an encoded slash belongs to its id and parts nothing."""

    async def __call__(self, scope: Any, receive: Receive | Any, send: Send | Any) -> None:
        if scope["type"] == "http":
            scope["path"] = _encoded_path(scope)
        await super().__call__(scope, receive, send)


def _encoded_path(scope: Scope | Any) -> str:
    """The path with every piece encoded in the same one way."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    pieces = raw.partition(b"?")[0].split(b"/")
    return "/".join(quote_from_bytes(unquote_to_bytes(piece), safe="") for piece in pieces)


def create_app(recommender: Recommender) -> Litestar:
    """The service for one Recommender. It keeps no state of its own."""
    app = Service(
        [recommendations, similar, live, ready, root],
        state=State({"recommender": recommender}),
        exception_handlers={HTTPException: http_problem, SegueError: refused, Exception: unexpected},
        request_max_body_size=MOST_BYTES,
        request_class=JsonRequest,
        logging_config=None,
        openapi_config=OpenAPIConfig(
            title="segue",
            version=str(recommender.manifest.get("segue", "1")),
            description="Next-item recommendations from a trained run.",
            render_plugins=[SchemaPage(), JsonRenderPlugin()],
        ),
    )
    _add_examples(app, recommender)
    return app


def _add_examples(app: Litestar, recommender: Recommender) -> None:
    """Examples in the OpenAPI document that this very service answers: its most frequent items."""
    ids = recommender.recommend([], k=2).ids
    paths = app.openapi_schema.paths or {}
    asked, neighbours = paths["/recommendations"].post, paths["/items/{id}/similar"].get
    if asked is not None and isinstance(asked.request_body, RequestBody):
        asked.request_body.content["application/json"].examples = {"history": Example(value={"history": ids, "k": 5})}
    for parameter in (neighbours and neighbours.parameters) or ():
        if isinstance(parameter, Parameter) and parameter.name == "id" and ids:
            parameter.example = ids[0]
