"""The JSON bodies of requests and responses. A recommendation itself is `recommend.answer.Recommendation`."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec

from segue.errors import InputError
from segue.recommend.answer import BEAM, Plan, Recommendation
from segue.recommend.history import Entry

MAX_K = 1000
MAX_PLAN = 50  # items of a plan
MAX_BEAM = 32
MAX_BODY_BYTES = 1_000_000
MAX_ENTRIES = 10_000  # of a history or a list of ids
MAX_EVENTS = 1000  # in one request
MAX_NEW_ITEMS = 1000  # in one request
MAX_COLUMNS = 64
MAX_VECTOR = 4096
MAX_TEXT = 10_000  # characters in a column of the catalogue
MAX_ID = 1024  # characters of a user, item, event id or kind
PROBLEM_TYPE = "application/problem+json"


def described(text: str) -> msgspec.Meta:
    """A field's description in the OpenAPI document."""
    return msgspec.Meta(description=text)


Ids = Annotated[list[str | int], msgspec.Meta(max_length=MAX_ENTRIES)]
ShortText = Annotated[str, msgspec.Meta(max_length=MAX_ID)]
LongText = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Id = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ID)] | int
K = Annotated[int, msgspec.Meta(ge=1, le=MAX_K, description="The number of items to return.")]
History = Annotated[
    list[str | int | Entry],
    msgspec.Meta(
        max_length=MAX_ENTRIES,
        description="Item ids, oldest first, or entries with an item and optionally a time, a kind and a value. "
        "Entries are sorted by time if all of them have one.",
    ),
]
Where = Annotated[
    dict[str, Annotated[list[str | int | float | bool], msgspec.Meta(max_length=MAX_ENTRIES)]],
    msgspec.Meta(max_length=16, description="Catalogue columns, each with the values that an item may have there."),
]


class AnswerRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that recommendations, explanations and plans share: the model, the time, and the items allowed."""

    exclude: Annotated[Ids | None, described("Ids that may not be in the answer.")] = None
    only: Annotated[
        Ids | None, described("The only ids that may be in the answer; ids that the model does not know are ignored.")
    ] = None
    keep_seen: Annotated[
        bool | None, described("Whether the answer may hold items of the history; null is the run's default.")
    ] = None
    where: Annotated[Where | None, described("Filters on the catalogue.")] = None
    now: Annotated[
        float | str | None, described("The request time, for models that use it: seconds since 1970, or ISO 8601.")
    ] = None
    model: Annotated[str | None, described("The name of a served model; null is the active one.")] = None


class HistoryRequest(AnswerRules, frozen=True):
    """A history or a user, and the rules of the answer."""

    history: Annotated[History | None, described("A history; give this or a user.")] = None
    user: Annotated[Id | None, described("A user whose history is in the store.")] = None


class RecommendationRequest(AnswerRules, frozen=True):
    """A history and the rules of the answer."""

    history: History
    k: K = 10


class Answer(Recommendation, frozen=True, kw_only=True):
    """A recommendation and the name of the run that made it."""

    model: str


class EventDetails(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The optional fields of an event."""

    time: Annotated[
        float | str | None, described("Seconds since 1970 or ISO 8601; the time of the request if missing.")
    ] = None
    kind: Annotated[ShortText | None, described("The kind of event, such as click or buy.")] = None
    value: Annotated[float | None, described("A value, such as a rating.")] = None
    id: Annotated[
        Id | None, described("An id of the event, unique over all users. An id sent twice is stored once.")
    ] = None


class EventBody(EventDetails, frozen=True, kw_only=True):
    """An interaction of a user with an item."""

    user: Id
    item: Id


class EventsBody(EventDetails, frozen=True, kw_only=True):
    """One event in the fields of this object, or several in `events`: all of them are stored, or none."""

    user: Id | None = None
    item: Id | None = None
    events: Annotated[list[EventBody], msgspec.Meta(max_length=MAX_EVENTS)] | None = None

    def as_list(self) -> list[EventBody]:
        """The events in either form."""
        single = {field: getattr(self, field) for field in EventBody.__struct_fields__}
        if self.events is not None and all(field is None for field in single.values()):
            return self.events
        if self.events is not None or self.user is None or self.item is None:
            raise InputError("An event needs a user and an item; several events are sent as {events: [...]} alone.")
        return [EventBody(**single)]


class EventsReceipt(msgspec.Struct, frozen=True):
    """The answer to events: they are on disk."""

    accepted: int
    duplicates: int
    """Events whose id was stored before."""
    unknown: list[str]
    """Items that the active model does not know, each once. Their events are stored."""


class CatalogueItem(msgspec.Struct, frozen=True):
    """An item of the catalogue."""

    id: str
    title: str | None
    count: int
    """Events of the item in the active model's training log."""
    details: dict[str, Any]
    """The other columns of the catalogue."""


class CatalogueItems(msgspec.Struct, frozen=True):
    """The items that match a search."""

    items: list[CatalogueItem]


Detail = LongText | int | float | bool | Annotated[list[float | LongText], msgspec.Meta(max_length=MAX_VECTOR)] | None
Title = Annotated[LongText | None, described("The title. Models with content may encode it.")]
Details = Annotated[
    dict[ShortText, Detail],
    msgspec.Meta(
        max_length=MAX_COLUMNS,
        description="Further columns of the catalogue, such as a vector, a category or values to filter by. Columns "
        "that the run does not have are stored and not used.",
    ),
]


class NewItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An item that the model was not trained on."""

    id: Id
    title: Title = None
    details: Details = {}


class NewItemsBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One item in the fields of this object, or several in `items`: all of them are stored, or none."""

    id: Id | None = None
    title: Title = None
    details: Details = {}
    items: Annotated[list[NewItem], msgspec.Meta(max_length=MAX_NEW_ITEMS)] | None = None

    def as_list(self) -> list[NewItem]:
        """The items in either form."""
        if self.items is not None and self.id is None and self.title is None and not self.details:
            return self.items
        if self.items is not None or self.id is None:
            raise InputError("A new item needs an id; several items are sent as {items: [...]} alone.")
        return [NewItem(self.id, self.title, self.details)]


class ItemsReceipt(msgspec.Struct, frozen=True):
    """The answer to new items: they are on disk, and all workers and replicas load them within a second."""

    accepted: int
    """Items stored. An id that is sent again replaces the earlier item."""
    served: int
    """Accepted items that the active model can recommend from now on."""
    reason: str | None
    """Why the active model cannot recommend the others."""


class HistoryEvent(msgspec.Struct, frozen=True):
    """An event of a user's history."""

    item: str
    title: str | None
    time: datetime
    kind: str | None
    value: float | None
    known: bool
    """Whether the active model knows the item."""


class UserHistory(msgspec.Struct, frozen=True):
    """A user's newest events, oldest first."""

    user: str
    events: list[HistoryEvent]
    more: bool
    """Whether the store has older events."""


class Deletion(msgspec.Struct, frozen=True):
    """The answer to the deletion of a user."""

    removed: int
    """Events removed."""


class ExplanationRequest(HistoryRequest, frozen=True):
    """A history or a user, and the item to explain."""

    item: Annotated[Id | None, described("The item to explain; null is the first recommendation.")] = None
    attention: Annotated[bool, described("Whether to return the attention weights as well.")] = True


class PlanRequest(HistoryRequest, frozen=True):
    """A history or a user, and the rules of the plan."""

    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_PLAN, description="The number of items to plan.")] = 5
    beam: Annotated[int, msgspec.Meta(ge=1, le=MAX_BEAM, description="The width of the beam search.")] = BEAM
    repeats: Annotated[bool, described("Whether an item may occur twice.")] = False


class PlanAnswer(Plan, frozen=True, kw_only=True):
    """A plan and the name of the run that made it."""

    model: str


class ModelCard(msgspec.Struct, frozen=True):
    """A served run, with its evaluation report."""

    name: str
    seen: Literal["excluded", "kept"]
    items: int
    length: int
    """The number of newest events that the model uses."""
    attention: bool
    plan: bool
    """Whether the model can plan several items (POST /plans)."""
    columns: list[str]
    """Catalogue columns to filter by."""
    added: int
    """Items added since training."""
    left_out: int
    """Items of POST /items that the model cannot recommend."""
    left_out_because: str | None
    manifest: dict[str, Any]
    report: dict[str, Any] | None
    """The output of `segue evaluate --json`."""


class ModelsStatus(msgspec.Struct, frozen=True):
    """The served runs and those that can be switched to."""

    active: str
    previous: str | None
    """The run that a rollback activates."""
    switchable: list[str]
    """Runs under --runs."""
    models: list[ModelCard]
    """The active one first."""


class SwitchRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The run to serve."""

    run: Annotated[str, msgspec.Meta(max_length=255, description="The name of a folder under --runs, not a path.")]


class ActiveRun(msgspec.Struct, frozen=True):
    """The active run after a switch."""

    active: str
    previous: str | None


class Health(msgspec.Struct, frozen=True):
    """The state of the process."""

    status: Literal["live", "ready"]


class Problem(msgspec.Struct, frozen=True):
    """Why a request failed (RFC 9457)."""

    title: str
    status: int
    detail: str
    """A sentence: what was expected, what came, how to fix it."""
