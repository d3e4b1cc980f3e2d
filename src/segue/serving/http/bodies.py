"""What requests carry and what the service says, as JSON. Recommendations themselves are `recommend.answers`."""

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
MAX_BODY_BYTES = 1_000_000  # of a request's body
MAX_ENTRIES = 10_000
MAX_EVENTS = 1000
MAX_NEW_ITEMS = 1000  # added in one request
MAX_COLUMNS = 64
MAX_VECTOR = 4096
MAX_TEXT = 10_000  # characters of what a catalogue says of an item
MAX_ID = 1024  # characters of a user, item, event id or kind that is kept

Ids = Annotated[list[str | int], msgspec.Meta(max_length=MAX_ENTRIES)]
ShortText = Annotated[str, msgspec.Meta(max_length=MAX_ID)]
Id = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ID)] | int
K = Annotated[int, msgspec.Meta(ge=1, le=MAX_K, description="How many items to answer.")]


def about(description: str) -> msgspec.Meta:
    """What the OpenAPI document says of a field."""
    return msgspec.Meta(description=description)


History = Annotated[
    list[str | int | Entry],
    msgspec.Meta(
        max_length=MAX_ENTRIES,
        description="Item ids, oldest first, or entries with an item and perhaps a time, a kind and a value; "
        "they are sorted by time where every one has it.",
    ),
]
KeepSeen = Annotated[bool | None, about("Whether items of the history may be answered; null is the run's own way.")]
Where = Annotated[
    dict[str, Annotated[list[str | int | float | bool], msgspec.Meta(max_length=MAX_ENTRIES)]],
    msgspec.Meta(max_length=16, description="Columns of the catalogue and the values that an answer may have in them."),
]
Now = Annotated[
    float | datetime | None,
    about("The moment of the question, for models that use it: seconds since 1970, or ISO 8601."),
]
ModelName = Annotated[str | None, about("Which of the models served; null is the active one.")]


class RecommendationRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A history, and what the answer may hold."""

    history: History
    k: K = 10
    exclude: Annotated[Ids | None, about("Ids that are no answer.")] = None
    only: Annotated[Ids | None, about("Ids that may be an answer; unknown ones are ignored.")] = None
    keep_seen: KeepSeen = None
    where: Annotated[Where | None, about("Filters on the catalogue.")] = None
    now: Now = None
    model: ModelName = None


class Answer(Recommendation, frozen=True, kw_only=True):
    """A recommendation and the run that gave it."""

    model: str


class EventBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something that a user did with an item."""

    user: Id
    item: Id
    time: Annotated[float | datetime | None, about("Seconds since 1970 or ISO 8601; without it, now.")] = None
    kind: Annotated[ShortText | None, about("What happened, such as click or buy.")] = None
    value: Annotated[float | None, about("How much of it, such as a rating.")] = None
    id: Annotated[Id | None, about("The event's own id, of all users: what is sent twice with it is kept once.")] = None


class EventsBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One event, with its fields here; or several in `events`, kept together or not at all."""

    user: Id | None = None
    item: Id | None = None
    time: Annotated[float | datetime | None, about("Seconds since 1970 or ISO 8601; without it, now.")] = None
    kind: Annotated[ShortText | None, about("What happened, such as click or buy.")] = None
    value: Annotated[float | None, about("How much of it, such as a rating.")] = None
    id: Annotated[Id | None, about("The event's own id, of all users: what is sent twice with it is kept once.")] = None
    events: Annotated[list[EventBody], msgspec.Meta(max_length=MAX_EVENTS)] | None = None

    def as_list(self) -> list[EventBody]:
        """The events."""
        single = [getattr(self, field) for field in EventBody.__struct_fields__]
        if self.events is not None and all(field is None for field in single):
            return self.events
        if self.events is not None or self.user is None or self.item is None:
            raise InputError("An event needs a user and an item; several events are sent as {events: [...]} alone.")
        return [EventBody(*single)]


class EventsReceipt(msgspec.Struct, frozen=True):
    """What became of events: they are on disk."""

    accepted: int
    duplicates: int
    """Events whose id was there already."""
    unknown: list[str]
    """Items, each once, that the active model does not know. Their events are kept."""


class CatalogueItem(msgspec.Struct, frozen=True):
    """An item of the catalogue."""

    id: str
    title: str | None
    count: int
    """Events that the active model was trained on."""
    details: dict[str, Any]
    """Further columns of the catalogue."""


class CatalogueItems(msgspec.Struct, frozen=True):
    """Items that fit a search."""

    items: list[CatalogueItem]


Detail = (
    Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
    | int
    | float
    | bool
    | Annotated[list[float | Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]], msgspec.Meta(max_length=MAX_VECTOR)]
    | None
)
Title = Annotated[
    Annotated[str, msgspec.Meta(max_length=MAX_TEXT)] | None, about("Its title; a part of what it is known by.")
]
Details = Annotated[
    dict[ShortText, Detail],
    msgspec.Meta(
        max_length=MAX_COLUMNS,
        description="Further columns of the catalogue: its vector, its category, whatever there is to filter by. "
        "Columns that the run does not have are kept and left aside.",
    ),
]


class NewItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An item that the model was not trained on."""

    id: Id
    title: Title = None
    details: Details = {}


class NewItemsBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One item, with its fields here; or several in `items`, kept together or not at all."""

    id: Id | None = None
    title: Title = None
    details: Details = {}
    items: Annotated[list[NewItem], msgspec.Meta(max_length=MAX_NEW_ITEMS)] | None = None

    def as_list(self) -> list[NewItem]:
        """The items."""
        if self.items is not None and self.id is None and self.title is None and not self.details:
            return self.items
        if self.items is not None or self.id is None:
            raise InputError("A new item needs an id; several items are sent as {items: [...]} alone.")
        return [NewItem(self.id, self.title, self.details)]


class ItemsReceipt(msgspec.Struct, frozen=True):
    """What became of new items: they are on disk, and every worker and replica follows within a second."""

    accepted: int
    """Items kept; the same id again is the same item, with what was said last."""
    served: int
    """Those of them that the active model answers from now on."""
    reason: str | None
    """Why it does not answer the others."""


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
    """Whether there are older ones."""


class Deletion(msgspec.Struct, frozen=True):
    """What was removed."""

    removed: int
    """Events of the user."""


class ExplanationRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why an item is answered to a history, or to a user."""

    history: Annotated[History | None, about("A history; else name a user.")] = None
    user: Annotated[Id | None, about("A user whose history the service keeps.")] = None
    item: Annotated[Id | None, about("The item to explain; null is the first answer.")] = None
    exclude: Annotated[Ids | None, about("Ids that are no answer.")] = None
    only: Annotated[Ids | None, about("Ids that may be an answer; unknown ones are ignored.")] = None
    keep_seen: KeepSeen = None
    where: Annotated[Where | None, about("Filters on the catalogue.")] = None
    attention: Annotated[bool, about("Whether to give the attention weights too.")] = True
    now: Now = None
    model: ModelName = None


class PlanRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A history, or a user, and what the plan may hold."""

    history: Annotated[History | None, about("A history; else name a user.")] = None
    user: Annotated[Id | None, about("A user whose history the service keeps.")] = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_PLAN, description="How many items to plan.")] = 5
    beam: Annotated[int, msgspec.Meta(ge=1, le=MAX_BEAM, description="How many plans are followed side by side.")] = (
        BEAM
    )
    exclude: Annotated[Ids | None, about("Ids that are no part of a plan.")] = None
    only: Annotated[Ids | None, about("Ids that may be part of it; unknown ones are ignored.")] = None
    keep_seen: Annotated[
        bool | None, about("Whether items of the history may be planned; null is the run's own way.")
    ] = None
    repeats: Annotated[bool, about("Whether an item may come twice.")] = False
    where: Annotated[Where | None, about("Filters on the catalogue.")] = None
    now: Now = None
    model: ModelName = None


class PlanAnswer(Plan, frozen=True, kw_only=True):
    """A plan and the run that made it."""

    model: str


class ModelCard(msgspec.Struct, frozen=True):
    """A run being served: what it is and how it was measured."""

    name: str
    seen: Literal["excluded", "kept"]
    items: int
    length: int
    """The newest events that the model looks at, at most."""
    attention: bool
    plan: bool
    """Whether it can plan several items: see POST /plans."""
    columns: list[str]
    """Columns of the catalogue, to filter by."""
    added: int
    """Items that were added since it was trained."""
    left_out: int
    """Items of POST /items that it cannot take."""
    left_out_because: str | None
    manifest: dict[str, Any]
    report: dict[str, Any] | None
    """As `segue evaluate --json` prints it."""


class ModelsStatus(msgspec.Struct, frozen=True):
    """What is being served."""

    active: str
    previous: str | None
    """The run that a rollback would bring back."""
    switchable: list[str]
    """Runs that may be switched to."""
    models: list[ModelCard]
    """The active one first."""


class SwitchRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The run to serve from now on."""

    run: Annotated[str, msgspec.Meta(max_length=255, description="The name of a folder under --runs, never a path.")]


class ActiveRun(msgspec.Struct, frozen=True):
    """What is served now."""

    active: str
    previous: str | None


class Health(msgspec.Struct, frozen=True):
    """The service's own state."""

    status: Literal["live", "ready"]


PROBLEM_TYPE = "application/problem+json"


class Problem(msgspec.Struct, frozen=True):
    """Why a request was not answered (RFC 9457)."""

    title: str
    status: int
    detail: str
    """A sentence: what was expected, what came, how to fix it."""
