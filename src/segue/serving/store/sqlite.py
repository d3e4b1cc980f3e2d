"""Everybody's events in one SQLite file, which any number of threads and processes on a machine may share.

Rows are clustered by user, time and place among ties, so a history is read from one or two pages, newest first.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from segue.errors import StoreError
from segue.serving.store.store import FORMAT, AddedItem, Event, FillState, Row, RunSelection, digest, row, unicode_texts

APPLICATION = 0x73656775  # "segu", in the header of every such file
BUSY_SECONDS = 5.0  # to wait while another process writes
CACHE_KILOBYTES = 16_384  # a connection's
WIPE_BYTES = 512_000_000  # up to this size a file is rewritten when a user is forgotten
WIPE_MILLISECONDS = 1000  # to wait for others meanwhile
TRY_SECONDS = 0.02

SCHEMA = (
    "CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE users (number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE)",
    "CREATE TABLE events (user INTEGER, time INTEGER, place INTEGER, item TEXT NOT NULL, kind TEXT, value REAL, "
    "digest BLOB, PRIMARY KEY (user, time, place)) WITHOUT ROWID",
    "CREATE UNIQUE INDEX event_digests ON events (digest) WHERE digest IS NOT NULL",
    "CREATE TABLE forgotten (digest BLOB PRIMARY KEY) WITHOUT ROWID",  # users, only while a data folder is read
    f"PRAGMA application_id = {APPLICATION}",
    f"PRAGMA user_version = {FORMAT}",
)
# Also made in a file from before it: who does not know it loses nothing by it, so the format is the same.
ITEMS_TABLE = (
    "CREATE TABLE IF NOT EXISTS items "
    "(number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, row TEXT NOT NULL, version INTEGER NOT NULL)",
    "CREATE INDEX IF NOT EXISTS item_versions ON items (version)",
)
ADD_ITEM = """
    INSERT INTO items (id, row, version) VALUES (?1, ?2, ?3)
    ON CONFLICT (id) DO UPDATE SET row = excluded.row, version = excluded.version
"""
ADD = """
    INSERT INTO events (user, item, time, kind, value, digest, place)
    VALUES (?1, ?2, ?3, ?4, ?5, ?6, (SELECT coalesce(max(place) + 1, 0) FROM events WHERE user = ?1 AND time = ?3))
    ON CONFLICT (digest) WHERE digest IS NOT NULL DO NOTHING
"""
ADD_TO_NEW = "INSERT INTO events (user, item, time, kind, value, place) VALUES (?, ?, ?, ?, ?, ?)"
NEWEST = """
    SELECT item, time, kind, value FROM events WHERE user = (SELECT number FROM users WHERE id = ?)
    ORDER BY time DESC, place DESC LIMIT ?
"""

T = TypeVar("T")


class SqliteStore:
    """A store in a file. Readers never wait for writers; writers take turns."""

    def __init__(self, path: str) -> None:
        self._path = _usable(path)
        self._write_lock = threading.Lock()
        self._idle: list[sqlite3.Connection] = []
        self._closed = False
        self._residue = False
        with self._explained():
            self._writer = self._connect()
        try:
            _patiently(self._prepare)
        except BaseException:
            self._writer.close()
            raise

    def append(self, events: Sequence[Event]) -> list[bool]:
        with unicode_texts():
            rows = [row(event) for event in events]
            keys = [None if event.id is None else digest(event.id) for event in events]
            with self._writing() as connection:
                numbers = {user: _made_number(connection, user) for user in dict.fromkeys(e.user for e in events)}
                return [
                    connection.execute(ADD, (numbers[event.user], *one, key)).rowcount == 1
                    for event, one, key in zip(events, rows, keys, strict=True)
                ]

    def newest(self, users: Sequence[str], limit: int | None) -> list[list[Row]]:
        most = -1 if limit is None else limit
        with unicode_texts(), self._reading() as connection:
            return [connection.execute(NEWEST, (user, most)).fetchall()[::-1] for user in users]

    def delete_users(self, users: Sequence[str]) -> list[int]:
        """Remove users' events, their ids and the users' ids, from the file's bytes too.

        SQLite overwrites what is deleted, but leaves copies behind where it once moved rows between pages. So the
        file is rewritten (about a second for each 100 MB; writers wait meanwhile) and its log emptied. A file of
        more than 512 MB is not rewritten here: run `VACUUM` on it in a quiet hour.
        """
        with unicode_texts(), self._writing() as connection:
            filling, removed = _is_filling(connection), []
            for user in users:
                if filling:
                    connection.execute("INSERT OR IGNORE INTO forgotten VALUES (?)", (digest(user),))
                removed.append(_removed(connection, user))
        if any(found is not None for found in removed):
            self._wipe()
        return [found or 0 for found in removed]

    def is_empty(self) -> bool:
        with self._reading() as connection:
            return _is_empty(connection)

    def active(self) -> RunSelection | None:
        with self._reading() as connection:
            return _said(connection, "active", RunSelection)

    def activate(self, active: RunSelection, *, expected: int | None) -> bool:
        with self._writing() as connection:
            stored = _said(connection, "active", RunSelection)
            if (None if stored is None else stored.version) != expected:
                return False
            _say(connection, "active", active)
            return True

    def fill_state(self) -> FillState | None:
        with self._reading() as connection:
            return _said(connection, "fill", FillState)

    def fill(
        self, histories: Sequence[tuple[str, Sequence[Row]]], state: FillState, *, expected: FillState | None
    ) -> bool:
        with unicode_texts(), self._writing() as connection:
            if _said(connection, "fill", FillState) != expected or (expected is None and not _is_empty(connection)):
                return False
            forgotten = {key for (key,) in connection.execute("SELECT digest FROM forgotten")}
            for user, rows in histories:
                if not forgotten or digest(user) not in forgotten:
                    _add_history(connection, user, rows)
            if state.finished:
                connection.execute("DELETE FROM forgotten")
            _say(connection, "fill", state)
            return True

    def add_items(self, items: Sequence[AddedItem]) -> int:
        with unicode_texts():
            rows = [(item.id, msgspec.json.encode(item.row).decode()) for item in items]
            with self._writing() as connection:
                version = _items_version(connection) + bool(rows)
                connection.executemany(ADD_ITEM, [(*one, version) for one in rows])
                return version

    def items(self, after: int) -> tuple[int, list[AddedItem]]:
        with self._reading() as connection:
            rows = connection.execute(
                "SELECT id, row, version FROM items WHERE version > ? ORDER BY number", (after,)
            ).fetchall()
        version = max((row[2] for row in rows), default=after)
        return version, [AddedItem(name, msgspec.json.decode(told)) for name, told, _ in rows]

    def check(self) -> None:
        if not self._path.exists():
            raise StoreError(f"The store {self._path} was removed while it was in use; start again with a new one.")
        with self._reading() as connection:
            connection.execute("SELECT count(*) FROM about").fetchone()

    def close(self) -> None:
        self._closed = True
        with self._write_lock:
            if self._residue:
                self._wipe_now()
            self._writer.close()
        self._close_idle()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        connection.execute(f"PRAGMA cache_size = -{CACHE_KILOBYTES}")
        connection.execute("PRAGMA synchronous = FULL")  # with a write-ahead log: on disk at every commit
        connection.execute("PRAGMA secure_delete = ON")
        return connection

    def _prepare(self) -> None:
        """Make the tables in a new file, by whoever comes first; refuse a file that is not ours before touching it."""
        with self._explained():
            self._is_new(self._writer)
            (mode,) = self._writer.execute("PRAGMA journal_mode = WAL").fetchone()
            if mode != "wal":
                raise StoreError(
                    f"The store {self._path} is in a place where SQLite cannot share a file (a network drive?); "
                    "name a file on a local disk."
                )
        with self._writing() as connection:
            if self._is_new(connection):
                for statement in SCHEMA:
                    connection.execute(statement)
            for statement in ITEMS_TABLE:
                connection.execute(statement)

    def _is_new(self, connection: sqlite3.Connection) -> bool:
        # In one statement: between two of them another process may have made the tables.
        application, version, tables = connection.execute(
            "SELECT application_id, user_version, (SELECT count(*) FROM sqlite_master) "
            "FROM pragma_application_id, pragma_user_version"
        ).fetchone()
        if not application and not tables:
            return True
        if application != APPLICATION:
            raise StoreError(f"{self._path} is a database of another program; name another file for the store.")
        if version != FORMAT:
            raise StoreError(
                f"The store {self._path} has format {version}, this segue reads format {FORMAT}; "
                "use the segue that made it, or name a new file."
            )
        return False

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._explained():
            self._refuse_closed()
            try:
                connection = self._idle.pop()
            except IndexError:
                connection = self._connect()
            try:
                yield connection
            finally:
                self._idle.append(connection)
                if self._closed:
                    self._close_idle()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction: the lock makes threads take turns, SQLite makes processes."""
        with self._explained(), self._write_lock:
            self._refuse_closed()
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.execute("COMMIT")
            except BaseException:
                if self._writer.in_transaction:  # a full disk may have ended it already
                    self._writer.execute("ROLLBACK")
                raise

    def _wipe(self) -> None:
        with self._write_lock:
            if not self._closed:
                self._wipe_now()

    def _wipe_now(self) -> None:
        """Rewrite the file and empty the log; where others are in the way, the next to forget or close tries again."""
        self._residue = True
        with contextlib.suppress(sqlite3.Error, OSError):  # the user is forgotten already: that is what to answer
            self._writer.execute(f"PRAGMA busy_timeout = {WIPE_MILLISECONDS}")
            if self._path.stat().st_size <= WIPE_BYTES:
                self._writer.execute("VACUUM")
            busy, *_ = self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            self._residue = bool(busy)
        self._writer.execute(f"PRAGMA busy_timeout = {BUSY_SECONDS * 1000:.0f}")

    def _close_idle(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().close()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise StoreError(f"The store {self._path} is closed.")

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise StoreError(_sentence(error, self._path)) from error


def _usable(path: str) -> Path:
    """The file's absolute name, where there is or may be a file."""
    if path in ("", ":memory:") or "\0" in path:
        raise StoreError("A store needs the name of a file, so that events outlive the service; for example store.db.")
    file = Path(path).absolute()
    if file.is_dir():
        raise StoreError(f"{file} is a folder; a SQLite store is a file, for example {file / 'store.db'}.")
    if not file.parent.is_dir():
        raise StoreError(f"The folder {file.parent} does not exist; make it, or name the store elsewhere.")
    return file


def _patiently(work: Callable[[], None]) -> None:
    """SQLite does not wait by itself while another process changes a new file's mode."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            return work()
        except StoreError as error:
            if not _name(error.__cause__).startswith("SQLITE_BUSY") or time.monotonic() > deadline:
                raise
        time.sleep(TRY_SECONDS)


def _name(error: BaseException | None) -> str:
    return str(getattr(error, "sqlite_errorname", ""))


def _sentence(error: sqlite3.Error | OSError, path: Path) -> str:
    name = _name(error)
    if name.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT")):
        return f"{path} is not a SQLite database, or is damaged ({error}); name another file for the store."
    if name.startswith("SQLITE_FULL"):
        return f"The disk is full: the store {path} was not changed. Free some space and try again."
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")) or isinstance(error, PermissionError):
        return f"The store {path} cannot be opened for writing ({error}); check the permissions of it and its folder."
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return f"The store {path} was busy for {BUSY_SECONDS:.0f} seconds: another process is writing. Try again."
    return f"The store {path} cannot be used: {error}."


def _removed(connection: sqlite3.Connection, user: str) -> int | None:
    """How many events of a user were deleted; None where there was no such user."""
    number = _number(connection, user)
    if number is None:
        return None
    removed = connection.execute("DELETE FROM events WHERE user = ?", (number,)).rowcount
    connection.execute("DELETE FROM users WHERE number = ?", (number,))
    return removed


def _number(connection: sqlite3.Connection, user: str) -> int | None:
    found = connection.execute("SELECT number FROM users WHERE id = ?", (user,)).fetchone()
    return None if found is None else int(found[0])


def _made_number(connection: sqlite3.Connection, user: str) -> int:
    number = _number(connection, user)
    if number is None:
        number = connection.execute("INSERT INTO users (id) VALUES (?)", (user,)).lastrowid
    assert number is not None
    return number


def _add_history(connection: sqlite3.Connection, user: str, rows: Sequence[Row]) -> None:
    """Add a history, oldest first; where the user is new, the place of a row among ties need not be looked up."""
    number = _number(connection, user)
    if number is not None:
        connection.executemany(ADD, [(number, *one, None) for one in rows])
        return
    number, place, before = _made_number(connection, user), 0, None
    records = []
    for one in rows:
        place = place + 1 if one[1] == before else 0
        before = one[1]
        records.append((number, *one, place))
    connection.executemany(ADD_TO_NEW, records)


def _items_version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("SELECT coalesce(max(version), 0) FROM items").fetchone()[0])


def _is_empty(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT 1 FROM events LIMIT 1").fetchone() is None


def _is_filling(connection: sqlite3.Connection) -> bool:
    state = _said(connection, "fill", FillState)
    return state is not None and not state.finished


def _said(connection: sqlite3.Connection, name: str, kind: type[T]) -> T | None:
    found = connection.execute("SELECT value FROM about WHERE name = ?", (name,)).fetchone()
    return None if found is None else msgspec.json.decode(found[0], type=kind)


def _say(connection: sqlite3.Connection, name: str, value: RunSelection | FillState) -> None:
    connection.execute("INSERT OR REPLACE INTO about VALUES (?, ?)", (name, msgspec.json.encode(value).decode()))
