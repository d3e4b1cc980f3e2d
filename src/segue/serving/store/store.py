"""A URL or a file name → a store of all users' events: the protocol of the SQLite and the PostgreSQL store."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import msgspec

from segue.errors import InputError, StoreError

FORMAT = 2  # of the tables; a store of another format is refused
DIGEST_BYTES = 16
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1  # bounds of a time in microseconds

Row = tuple[str, int, str | None, float | None]
"""An event of a given user: item, time (microseconds), kind, value."""


class Event(msgspec.Struct, frozen=True):
    """An event to be stored."""

    user: str
    item: str
    time: int
    """Microseconds since 1970, UTC."""
    kind: str | None = None
    value: float | None = None
    """NaN and infinities are stored as None."""
    id: str | None = None
    """Two events with the same id are one event, whichever client sent them."""


class RunSelection(msgspec.Struct, frozen=True):
    """The run being served."""

    run: str
    previous: str | None
    """The run that a rollback returns to."""
    started_with: str
    """The run that the command line named when this was written."""
    version: int
    """Grows by one with each change."""


class FillState(msgspec.Struct, frozen=True):
    """Progress of filling the store from a data folder."""

    digest: str
    """Digest of the data folder."""
    next_user: int
    """Number of the first user who is not in the store yet."""
    finished: bool


class AddedItem(msgspec.Struct, frozen=True):
    """An item unseen in training."""

    id: str
    row: dict[str, Any]
    """Its catalogue columns, as JSON values."""


class HistoryStore(Protocol):
    """All users' events, and the items added since training. Several threads and any number of processes may use it.

    Every method raises `StoreError` if the store cannot be used, and `InputError` for text that is not valid Unicode.
    """

    def append(self, events: Sequence[Event]) -> list[bool]:
        """Store events durably, all or none; False for an event whose id is already stored."""
        ...

    def newest(self, users: Sequence[str], limit: int | None) -> list[list[Row]]:
        """The newest `limit` events of each user (None: all), oldest first; at equal times in order of arrival."""
        ...

    def delete_users(self, users: Sequence[str]) -> list[int]:
        """Delete users with their events and event ids, all or none; returns each user's number of events."""
        ...

    def is_empty(self) -> bool:
        """Whether the store has no event."""
        ...

    def active(self) -> RunSelection | None:
        """The run being served; None if none was ever selected."""
        ...

    def activate(self, active: RunSelection, *, expected: int | None) -> bool:
        """Select a run if the stored version is still `expected` (None: nothing stored); False if it is not."""
        ...

    def fill_state(self) -> FillState | None:
        """Progress of filling; None if it was never started."""
        ...

    def fill(
        self, histories: Sequence[tuple[str, Sequence[Row]]], state: FillState, *, expected: FillState | None
    ) -> bool:
        """Add whole histories and the new state, in one transaction, if the stored state is still `expected`.

        Returns False and adds nothing if it is not; with `expected` None also if the store has any event. Users deleted
        since the first of these calls stay deleted.
        """
        ...

    def add_items(self, items: Sequence[AddedItem]) -> int:
        """Store items durably, all or none, as a new version, and return its number. A row replaces that of its id."""
        ...

    def items(self, after: int) -> tuple[int, list[AddedItem]]:
        """The newest version, and the items added or changed since version `after` (0: all), each once, in the order
        in which they were first added. Later additions never belong to a version that was already returned."""
        ...

    def check(self) -> None:
        """Raise `StoreError`, within seconds, if the store cannot be used."""
        ...

    def close(self) -> None:
        """Close files and connections; the store cannot be used afterwards."""
        ...


def open_store(url: str) -> HistoryStore:
    """Open `postgresql://…`, `postgres://…` or a SQLite file (also `sqlite:///name`), which is created if missing."""
    scheme, separator, rest = url.partition("://")
    if separator and scheme in ("postgresql", "postgres"):
        try:
            from segue.serving.store.postgres import PostgresStore
        except ImportError as error:  # psycopg raises it too, if libpq is missing
            raise StoreError(
                "A PostgreSQL store needs psycopg, which is not installed or not complete; "
                "run `pip install 'segue[postgres]'`."
            ) from error
        return PostgresStore(url)
    if separator and scheme != "sqlite":
        raise StoreError(
            f"A store is the name of a SQLite file or a URL with postgresql://, got one with {scheme[:20]}://."
        )
    from segue.serving.store.sqlite import SqliteStore

    return SqliteStore(rest.removeprefix("/") if separator else url)


def digest(identifier: str) -> bytes:
    """A key of fixed size for an id of any length, because database indexes limit the size of keys."""
    return hashlib.blake2b(identifier.encode(), digest_size=DIGEST_BYTES).digest()


def to_row(event: Event) -> Row:
    """An event as it is read back."""
    if not INT64_MIN <= event.time <= INT64_MAX:
        raise InputError(f"The time of an event is within 292,000 years of 1970, got {event.time} microseconds.")
    value = event.value if event.value is not None and math.isfinite(event.value) else None
    return event.item, event.time, event.kind, value


@contextlib.contextmanager
def utf8_texts() -> Iterator[None]:
    """Turn the error of a lone surrogate, which no database stores, into `InputError`."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise InputError(
            "An id, a kind or a text has half a character in it (a lone surrogate); send valid Unicode."
        ) from error
