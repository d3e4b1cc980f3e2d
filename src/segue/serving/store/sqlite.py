"""All users' events in one SQLite file, which threads and processes of one machine may share.

Rows are clustered by user, time and position among equal times, so a history is read from one or two pages.
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
from segue.serving.store.store import FORMAT, AddedItem, Event, FillState, Row, RunSelection, digest, to_row, utf8_texts

APPLICATION = 0x73656775  # "segu", in the header of every such file
BUSY_SECONDS = 5.0  # for another process that writes
CACHE_KILOBYTES = 16_384  # of a connection
ERASE_MAX_BYTES = 512_000_000  # up to this size the file is rewritten when a user is deleted
ERASE_MILLISECONDS = 1000  # for other connections, before the file is rewritten
RETRY_SECONDS = 0.02

SCHEMA = (
    "CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE users (number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE)",
    "CREATE TABLE events (user INTEGER, time INTEGER, position INTEGER, item TEXT NOT NULL, kind TEXT, value REAL, "
    "digest BLOB, PRIMARY KEY (user, time, position)) WITHOUT ROWID",
    "CREATE UNIQUE INDEX event_digests ON events (digest) WHERE digest IS NOT NULL",
    "CREATE TABLE deleted_users (digest BLOB PRIMARY KEY) WITHOUT ROWID",  # only while the store is filled
    "CREATE TABLE items "
    "(number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, row TEXT NOT NULL, version INTEGER NOT NULL)",
    "CREATE INDEX item_versions ON items (version)",
    f"PRAGMA application_id = {APPLICATION}",
    f"PRAGMA user_version = {FORMAT}",
)
ADD_ITEM = """
    INSERT INTO items (id, row, version) VALUES (?1, ?2, ?3)
    ON CONFLICT (id) DO UPDATE SET row = excluded.row, version = excluded.version
"""
ADD = """
    INSERT INTO events (user, item, time, kind, value, digest, position)
    VALUES (?1, ?2, ?3, ?4, ?5, ?6, (SELECT coalesce(max(position) + 1, 0) FROM events WHERE user = ?1 AND time = ?3))
    ON CONFLICT (digest) WHERE digest IS NOT NULL DO NOTHING
"""
ADD_FOR_NEW_USER = "INSERT INTO events (user, item, time, kind, value, position) VALUES (?, ?, ?, ?, ?, ?)"
NEWEST = """
    SELECT item, time, kind, value FROM events WHERE user = (SELECT number FROM users WHERE id = ?)
    ORDER BY time DESC, position DESC LIMIT ?
"""

T = TypeVar("T")


class SqliteStore:
    """A store in a file. Readers never wait for writers; one writer writes at a time."""

    def __init__(self, path: str) -> None:
        self._path = _store_path(path)
        self._write_lock = threading.Lock()
        self._idle: list[sqlite3.Connection] = []
        self._closed = False
        self._unerased = False  # deleted rows may have copies in the file
        with self._store_errors():
            self._writer = self._connect()
        try:
            _retry_while_busy(self._create_tables)
        except BaseException:
            self._writer.close()
            raise

    def append(self, events: Sequence[Event]) -> list[bool]:
        with utf8_texts():
            rows = [to_row(event) for event in events]
            keys = [None if event.id is None else digest(event.id) for event in events]
            with self._writing() as connection:
                numbers = {user: _new_user_number(connection, user) for user in dict.fromkeys(e.user for e in events)}
                return [
                    connection.execute(ADD, (numbers[event.user], *one, key)).rowcount == 1
                    for event, one, key in zip(events, rows, keys, strict=True)
                ]

    def newest(self, users: Sequence[str], limit: int | None) -> list[list[Row]]:
        most = -1 if limit is None else limit
        with utf8_texts(), self._reading() as connection:
            return [connection.execute(NEWEST, (user, most)).fetchall()[::-1] for user in users]

    def delete_users(self, users: Sequence[str]) -> list[int]:
        """Delete users with their events and event ids, also from the bytes of the file.

        SQLite overwrites deleted rows, but leaves copies of rows that it once moved between pages. So the file is
        rewritten (about a second per 100 MB; writers wait) and its log truncated. A file of more than 512 MB is not
        rewritten here: run `VACUUM` on it at a time of low load.
        """
        with utf8_texts(), self._writing() as connection:
            state, counts = _read_property(connection, "fill", FillState), []
            for user in users:
                if state is not None and not state.finished:
                    connection.execute("INSERT OR IGNORE INTO deleted_users VALUES (?)", (digest(user),))
                counts.append(_delete_user(connection, user))
        if any(count is not None for count in counts):
            with self._write_lock:
                if not self._closed:
                    self._erase()
        return [count or 0 for count in counts]

    def is_empty(self) -> bool:
        with self._reading() as connection:
            return _is_empty(connection)

    def active(self) -> RunSelection | None:
        with self._reading() as connection:
            return _read_property(connection, "active", RunSelection)

    def activate(self, active: RunSelection, *, expected: int | None) -> bool:
        with self._writing() as connection:
            stored = _read_property(connection, "active", RunSelection)
            if (None if stored is None else stored.version) != expected:
                return False
            _write_property(connection, "active", active)
            return True

    def fill_state(self) -> FillState | None:
        with self._reading() as connection:
            return _read_property(connection, "fill", FillState)

    def fill(
        self, histories: Sequence[tuple[str, Sequence[Row]]], state: FillState, *, expected: FillState | None
    ) -> bool:
        with utf8_texts(), self._writing() as connection:
            stored = _read_property(connection, "fill", FillState)
            if stored != expected or (expected is None and not _is_empty(connection)):
                return False
            deleted = {key for (key,) in connection.execute("SELECT digest FROM deleted_users")}
            for user, rows in histories:
                if not deleted or digest(user) not in deleted:
                    _add_history(connection, user, rows)
            if state.finished:
                connection.execute("DELETE FROM deleted_users")
            _write_property(connection, "fill", state)
            return True

    def add_items(self, items: Sequence[AddedItem]) -> int:
        with utf8_texts():
            rows = [(item.id, msgspec.json.encode(item.row).decode()) for item in items]
            with self._writing() as connection:
                (version,) = connection.execute("SELECT coalesce(max(version), 0) FROM items").fetchone()
                version = int(version) + bool(rows)
                connection.executemany(ADD_ITEM, [(*one, version) for one in rows])
                return version

    def items(self, after: int) -> tuple[int, list[AddedItem]]:
        with self._reading() as connection:
            rows = connection.execute(
                "SELECT id, row, version FROM items WHERE version > ? ORDER BY number", (after,)
            ).fetchall()
        version = max((row[2] for row in rows), default=after)
        return version, [AddedItem(name, msgspec.json.decode(json)) for name, json, _ in rows]

    def check(self) -> None:
        if not self._path.exists():
            raise StoreError(f"The store {self._path} was removed while it was in use; start again with a new one.")
        with self._reading() as connection:
            connection.execute("SELECT count(*) FROM about").fetchone()

    def close(self) -> None:
        self._closed = True
        with self._write_lock:
            if self._unerased:
                self._erase()
            self._writer.close()
        self._close_idle()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        connection.execute(f"PRAGMA cache_size = -{CACHE_KILOBYTES}")
        connection.execute("PRAGMA synchronous = FULL")  # with a write-ahead log: on disk at every commit
        connection.execute("PRAGMA secure_delete = ON")
        return connection

    def _create_tables(self) -> None:
        """Create the tables in a new file; refuse a file of another program before changing it."""
        with self._store_errors():
            self._is_new(self._writer)
            (mode,) = self._writer.execute("PRAGMA journal_mode = WAL").fetchone()
            if mode != "wal":
                raise StoreError(
                    f"SQLite cannot share the file {self._path} with other processes there (a network drive?); "
                    "name a file on a local disk."
                )
        with self._writing() as connection:
            if self._is_new(connection):
                for statement in SCHEMA:
                    connection.execute(statement)

    def _is_new(self, connection: sqlite3.Connection) -> bool:
        # In one statement: between two of them another process may create the tables.
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
        with self._store_errors():
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
        """One transaction. The lock serialises threads, SQLite serialises processes."""
        with self._store_errors(), self._write_lock:
            self._refuse_closed()
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.execute("COMMIT")
            except BaseException:
                if self._writer.in_transaction:  # a full disk may have ended it
                    self._writer.execute("ROLLBACK")
                raise

    def _erase(self) -> None:
        """Rewrite the file and truncate its log; if other connections prevent it, the next deletion or close tries."""
        self._unerased = True
        with contextlib.suppress(sqlite3.Error, OSError):  # the deletion itself has succeeded
            self._writer.execute(f"PRAGMA busy_timeout = {ERASE_MILLISECONDS}")
            if self._path.stat().st_size <= ERASE_MAX_BYTES:
                self._writer.execute("VACUUM")
            busy, *_ = self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            self._unerased = bool(busy)
        self._writer.execute(f"PRAGMA busy_timeout = {BUSY_SECONDS * 1000:.0f}")

    def _close_idle(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().close()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise StoreError(f"The store {self._path} is closed.")

    @contextlib.contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise StoreError(_message(error, self._path)) from error


def _store_path(path: str) -> Path:
    """The absolute path of a store; raises if no file can be there."""
    if path in ("", ":memory:") or "\0" in path:
        raise StoreError("A store needs the name of a file, so that events outlive the service; for example store.db.")
    file = Path(path).absolute()
    if file.is_dir():
        raise StoreError(f"{file} is a folder; a SQLite store is a file, for example {file / 'store.db'}.")
    if not file.parent.is_dir():
        raise StoreError(f"The folder {file.parent} does not exist; make it, or name the store elsewhere.")
    return file


def _retry_while_busy(work: Callable[[], None]) -> None:
    """Retry, because SQLite itself does not wait while another process changes the mode of a new file."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            return work()
        except StoreError as error:
            if not _error_name(error.__cause__).startswith("SQLITE_BUSY") or time.monotonic() > deadline:
                raise
        time.sleep(RETRY_SECONDS)


def _error_name(error: BaseException | None) -> str:
    return str(getattr(error, "sqlite_errorname", ""))


def _message(error: sqlite3.Error | OSError, path: Path) -> str:
    name = _error_name(error)
    if name.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT")):
        return f"{path} is not a SQLite database, or is damaged ({error}); name another file for the store."
    if name.startswith("SQLITE_FULL"):
        return f"The disk is full: the store {path} was not changed. Free some space and try again."
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")) or isinstance(error, PermissionError):
        return f"The store {path} cannot be opened for writing ({error}); check the permissions of it and its folder."
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return f"The store {path} was busy for {BUSY_SECONDS:.0f} seconds: another process is writing. Try again."
    return f"The store {path} cannot be used: {error}."


def _delete_user(connection: sqlite3.Connection, user: str) -> int | None:
    """Delete a user; returns the number of events, None if there is no such user."""
    number = _user_number(connection, user)
    if number is None:
        return None
    count = connection.execute("DELETE FROM events WHERE user = ?", (number,)).rowcount
    connection.execute("DELETE FROM users WHERE number = ?", (number,))
    return count


def _user_number(connection: sqlite3.Connection, user: str) -> int | None:
    row = connection.execute("SELECT number FROM users WHERE id = ?", (user,)).fetchone()
    return None if row is None else int(row[0])


def _new_user_number(connection: sqlite3.Connection, user: str) -> int:
    """A user's number; the user is inserted if new."""
    number = _user_number(connection, user)
    if number is None:
        number = connection.execute("INSERT INTO users (id) VALUES (?)", (user,)).lastrowid
    assert number is not None
    return number


def _add_history(connection: sqlite3.Connection, user: str, rows: Sequence[Row]) -> None:
    """Add a history, oldest first. For a new user, positions among equal times need no query."""
    number = _user_number(connection, user)
    if number is not None:
        connection.executemany(ADD, [(number, *row, None) for row in rows])
        return
    number, position, previous_time = _new_user_number(connection, user), 0, None
    records = []
    for row in rows:
        position = position + 1 if row[1] == previous_time else 0
        previous_time = row[1]
        records.append((number, *row, position))
    connection.executemany(ADD_FOR_NEW_USER, records)


def _is_empty(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT 1 FROM events LIMIT 1").fetchone() is None


def _read_property(connection: sqlite3.Connection, name: str, kind: type[T]) -> T | None:
    row = connection.execute("SELECT value FROM about WHERE name = ?", (name,)).fetchone()
    return None if row is None else msgspec.json.decode(row[0], type=kind)


def _write_property(connection: sqlite3.Connection, name: str, value: RunSelection | FillState) -> None:
    connection.execute("INSERT OR REPLACE INTO about VALUES (?, ?)", (name, msgspec.json.encode(value).decode()))
