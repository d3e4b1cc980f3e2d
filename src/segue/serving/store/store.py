"""A URL or a file name → a store of all users' events, with what the SQLite and the PostgreSQL store share."""

from __future__ import annotations

import contextlib
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import msgspec

from segue.errors import InputError, StoreError

FORMAT = 2  # of the tables; a store of another format is refused
DIGEST_BYTES = 16
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1  # bounds of a time in microseconds

Row = tuple[str, int, str | None, float | None]
"""An event of a given user: item, time (microseconds), kind, value."""
UserRows = tuple[str, Sequence[Row]]
"""A user and all events, oldest first."""
T = TypeVar("T")


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


class HistoryStore(ABC):
    """All users' events, and the items added since training. Several threads and any number of processes may use it.

    Every method raises `StoreError` if the store cannot be used, and `InputError` for text that is not valid Unicode.
    The SQL statements below and all connections are those of the subclass's database.
    """

    ANY_EVENT: ClassVar[str]
    READ_PROPERTY: ClassVar[str]
    WRITE_PROPERTY: ClassVar[str]
    DELETED_USERS: ClassVar[str]
    """Digests of the users who were deleted while the store was being filled."""
    FINISH_FILL: ClassVar[Sequence[str]]
    ITEMS_VERSION: ClassVar[str]
    ITEMS_AFTER: ClassVar[str]

    @abstractmethod
    def append(self, events: Sequence[Event]) -> list[bool]:
        """Store events durably, all or none; False for an event whose id is already stored."""

    @abstractmethod
    def newest(self, users: Sequence[str], limit: int | None) -> list[list[Row]]:
        """The newest `limit` events of each user (None: all), oldest first; at equal times in order of arrival."""

    @abstractmethod
    def delete_users(self, users: Sequence[str]) -> list[int]:
        """Delete users with their events and event ids, all or none; returns each user's number of events."""

    @abstractmethod
    def check(self) -> None:
        """Raise `StoreError`, within seconds, if the store cannot be used."""

    @abstractmethod
    def close(self) -> None:
        """Close files and connections; the store cannot be used afterwards."""

    def active(self) -> RunSelection | None:
        """The run being served; None if none was ever selected."""
        return self._read(lambda link: self._property(link, "active", RunSelection))

    def activate(self, active: RunSelection, *, expected: int | None) -> bool:
        """Select a run if the stored version is still `expected` (None: nothing stored); False if it is not."""

        def select(link: Any) -> bool:
            stored = self._property(link, "active", RunSelection)
            if (None if stored is None else stored.version) != expected:
                return False
            self._set_property(link, "active", active)
            return True

        return self._write(select)

    def fill_state(self) -> FillState | None:
        """Progress of filling; None if it was never started."""
        return self._read(lambda link: self._property(link, "fill", FillState))

    def fill(self, histories: Sequence[UserRows], state: FillState, *, expected: FillState | None) -> bool:
        """Add whole histories and the new state, in one transaction, if the stored state is still `expected`.

        Returns False and adds nothing if it is not; with `expected` None also if the store has any event. Users deleted
        since the first of these calls stay deleted.
        """

        def add(link: Any) -> bool:
            if self._property(link, "fill", FillState) != expected:
                return False
            if expected is None and link.execute(self.ANY_EVENT).fetchone() is not None:
                return False
            deleted = {key for (key,) in link.execute(self.DELETED_USERS)}
            self._add_histories(link, [one for one in histories if not deleted or digest(one[0]) not in deleted])
            for statement in self.FINISH_FILL if state.finished else ():
                link.execute(statement)
            self._set_property(link, "fill", state)
            return True

        with utf8_texts():
            return self._write(add)

    def add_items(self, items: Sequence[AddedItem]) -> int:
        """Store items durably, all or none, as a new version, and return its number. A row replaces that of its id."""

        def add(link: Any) -> int:
            rows = {item.id: msgspec.json.encode(item.row) for item in items}
            version = int(link.execute(self.ITEMS_VERSION).fetchone()[0]) + bool(rows)
            self._add_items(link, rows, version)
            return version

        with utf8_texts():
            return self._write(add)

    def items(self, after: int) -> tuple[int, list[AddedItem]]:
        """The newest version, and the items added or changed since version `after` (0: all), each once, in the order
        in which they were first added. Later additions never belong to a version that was already returned."""
        records = self._read(lambda link: link.execute(self.ITEMS_AFTER, (after,)).fetchall())
        version = max((record[2] for record in records), default=after)
        return version, [AddedItem(name.decode(), msgspec.json.decode(row)) for name, row, _ in records]

    @abstractmethod
    def _read(self, work: Callable[[Any], T]) -> T:
        """Call `work` with a connection."""

    @abstractmethod
    def _write(self, work: Callable[[Any], T]) -> T:
        """Call `work` with a connection, in a transaction that excludes all others of this method."""

    @abstractmethod
    def _add_histories(self, link: Any, histories: Sequence[UserRows]) -> None: ...

    @abstractmethod
    def _add_items(self, link: Any, rows: Mapping[str, bytes], version: int) -> None:
        """Insert or replace items, given their rows as JSON."""

    def _property(self, link: Any, name: str, kind: type[T]) -> T | None:
        row = link.execute(self.READ_PROPERTY, (name,)).fetchone()
        return None if row is None else msgspec.json.decode(row[0], type=kind)

    def _is_filling(self, link: Any) -> bool:
        state = self._property(link, "fill", FillState)
        return state is not None and not state.finished

    def _set_property(self, link: Any, name: str, value: RunSelection | FillState) -> None:
        link.execute(self.WRITE_PROPERTY, (name, msgspec.json.encode(value).decode()))


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
