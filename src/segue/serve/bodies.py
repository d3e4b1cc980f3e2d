"""What requests carry and what the service says of itself, as JSON. Answers are `recommend.answers`."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

import msgspec

from segue.recommend.history import Entry

MOST_ANSWERS = 1000
MOST_ENTRIES = 10_000

Ids = Annotated[list[str | int], msgspec.Meta(max_length=MOST_ENTRIES)]


def about(description: str) -> msgspec.Meta:
    """What the OpenAPI document says of a field."""
    return msgspec.Meta(description=description)


class RecommendationRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A history, and what the answer may hold."""

    history: Annotated[
        list[str | int | Entry],
        msgspec.Meta(
            max_length=MOST_ENTRIES,
            description="Item ids, oldest first, or entries with an item and perhaps a time, a kind and a value; "
            "they are sorted by time where every one has it.",
        ),
    ]
    k: Annotated[int, msgspec.Meta(ge=1, le=MOST_ANSWERS, description="How many items to answer.")] = 10
    exclude: Annotated[Ids | None, about("Ids that are no answer.")] = None
    only: Annotated[Ids | None, about("Ids that may be an answer; unknown ones are ignored.")] = None
    keep_seen: Annotated[
        bool | None, about("Whether items of the history may be answered; null is the run's own way.")
    ] = None
    now: Annotated[
        float | datetime | None,
        about("The moment of the question, for models that use it: seconds since 1970, or ISO 8601."),
    ] = None


class Health(msgspec.Struct, frozen=True):
    """The service's own state."""

    status: Literal["live", "ready"]


class Problem(msgspec.Struct, frozen=True):
    """Why a request was not answered (RFC 9457)."""

    title: str
    status: int
    detail: str
    """A sentence: what was expected, what came, how to fix it."""
