"""A URL or a file name → a store of everybody's events, by one small protocol that SQLite and PostgreSQL meet."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import msgspec

from segue.errors import InputError, StoreError

FORMAT = 1  # of what a store holds; kept in it, and another one is refused
DIGEST_BYTES = 16
EARLIEST, LATEST = -(2**63), 2**63 - 1  # of a time in microseconds

Row = tuple[str, int, str | None, float | None]
"""An event of a known user: item, time (microseconds), kind, value."""


class Event(msgspec.Struct, frozen=True):
    """What happened, as a store is given it."""

    user: str
    item: str
    time: int
    """Microseconds since 1970, UTC."""
    kind: str | None = None
    value: float | None = None
    """NaN and infinities are no values: they are kept as None."""
    id: str | None = None
    """The same id twice is one event, whoever sent it."""


class RunSelection(msgspec.Struct, frozen=True):
    """Which run is served."""

    run: str
    previous: str | None
    """What a rollback goes back to."""
    started_with: str
    """The run that the command line named when this was written."""
    version: int
    """Grows by one with each change."""


class FillState(msgspec.Struct, frozen=True):
    """How far a data folder has been read into the store."""

    digest: str
    """The data folder's."""
    next_user: int
    """The number of the first user who is not in the store yet."""
    finished: bool


class AddedItem(msgspec.Struct, frozen=True):
    """An item that no run was trained on."""

    id: str
    row: dict[str, Any]
    """What the catalogue says of it, by column; what JSON can say."""


class HistoryStore(Protocol):
    """Everybody's events, and the items that were added since. Safe to use from several threads; any number of
    processes may share what it keeps.

    Every method raises `StoreError` when the store cannot be used, and `InputError` for a text that is no Unicode.
    """

    def append(self, events: Sequence[Event]) -> list[bool]:
        """Keep events, all or none, for good once this returns. False where the event's id is there already."""
        ...

    def newest(self, users: Sequence[str], limit: int | None) -> list[list[Row]]:
        """The newest `limit` events of each user (None: all), oldest first; of one moment, in the order they came."""
        ...

    def delete_users(self, users: Sequence[str]) -> list[int]:
        """Remove users' events, their ids and the users' ids, all or none; gives each one's number of events."""
        ...

    def is_empty(self) -> bool:
        """Whether there is no event at all."""
        ...

    def active(self) -> RunSelection | None:
        """Which run is served, None where none was ever chosen."""
        ...

    def activate(self, active: RunSelection, *, expected: int | None) -> bool:
        """Choose a run if the stored version is still `expected` (None: nothing stored); False: another was quicker."""
        ...

    def fill_state(self) -> FillState | None:
        """How far a data folder has been read, None where none ever was."""
        ...

    def fill(
        self, histories: Sequence[tuple[str, Sequence[Row]]], state: FillState, *, expected: FillState | None
    ) -> bool:
        """Add whole histories and the state they lead to, in one transaction, if the state is still `expected`.

        False, and nothing is added, when it is not; with `expected` None also when the store holds any event.
        Users forgotten since the first of these calls stay forgotten.
        """
        ...

    def add_items(self, items: Sequence[AddedItem]) -> int:
        """Keep items, all or none, for good once this returns: the version that they are in, one more than before.

        The same id twice is one item, and the newer row counts.
        """
        ...

    def items(self, after: int) -> tuple[int, list[AddedItem]]:
        """The items added or changed since version `after` (0: all), each once, in the order in which they first came;
        and the version that they lead to. What is added later is never in a version that was given already."""
        ...

    def check(self) -> None:
        """Raise `StoreError`, within seconds, when the store cannot be used."""
        ...

    def close(self) -> None:
        """Let go of files and connections; the store cannot be used after it."""
        ...


def open_store(url: str) -> HistoryStore:
    """`postgresql://…` or `postgres://…`, else the name of a SQLite file (also `sqlite:///name`), made when new."""
    scheme, separator, rest = url.partition("://")
    if separator and scheme in ("postgresql", "postgres"):
        return _open_postgres(url)
    if separator and scheme != "sqlite":
        raise StoreError(
            f"A store is the name of a SQLite file or a URL with postgresql://, got one with {scheme[:20]}://."
        )
    from segue.serving.store.sqlite import SqliteStore

    return SqliteStore(rest.removeprefix("/") if separator else url)


def _open_postgres(url: str) -> HistoryStore:
    try:
        from segue.serving.store.postgres import PostgresStore
    except ImportError as error:  # also what psycopg raises where its library is missing
        raise StoreError(
            "A PostgreSQL store needs psycopg, which is not installed or not complete; "
            "run `pip install 'segue[postgres]'`."
        ) from error
    return PostgresStore(url)


def digest(identifier: str) -> bytes:
    """A key of one size for a text of any: indexes have limits, ids have none."""
    return hashlib.blake2b(identifier.encode(), digest_size=DIGEST_BYTES).digest()


def row(event: Event) -> Row:
    """What a store gives back of an event."""
    if not EARLIEST <= event.time <= LATEST:
        raise InputError(f"The time of an event is within 292,000 years of 1970, got {event.time} microseconds.")
    value = event.value if event.value is not None and math.isfinite(event.value) else None
    return event.item, event.time, event.kind, value


@contextlib.contextmanager
def unicode_texts() -> Iterator[None]:
    """Refuse halves of characters, which no file and no database takes."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise InputError(
            "An id, a kind or a text has half a character in it (a lone surrogate); send valid Unicode."
        ) from error
