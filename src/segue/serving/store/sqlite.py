"""All users' events in one SQLite file, which threads and processes of one machine may share.

Rows are clustered by user, time and position among equal times, so a history is read from one or two pages.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from segue.errors import StoreError
from segue.serving.store.store import FORMAT, Event, HistoryStore, Row, T, UserRows, digest, to_row, utf8_texts

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


class SqliteStore(HistoryStore):
    """A store in a file. Readers never wait for writers; one writer writes at a time."""

    ANY_EVENT = "SELECT 1 FROM events LIMIT 1"
    READ_PROPERTY = "SELECT value FROM about WHERE name = ?"
    WRITE_PROPERTY = "INSERT OR REPLACE INTO about VALUES (?, ?)"
    DELETED_USERS = "SELECT digest FROM deleted_users"
    FINISH_FILL = ("DELETE FROM deleted_users",)
    ITEMS_VERSION = "SELECT coalesce(max(version), 0) FROM items"
    ITEMS_AFTER = "SELECT CAST(id AS BLOB), row, version FROM items WHERE version > ? ORDER BY number"

    def __init__(self, path: str) -> None:
        if path in ("", ":memory:") or "\0" in path:
            raise StoreError(
                "A store needs the name of a file, so that events outlive the service; for example store.db."
            )
        self._path = file = Path(path).absolute()
        if file.is_dir():
            raise StoreError(f"{file} is a folder; a SQLite store is a file, for example {file / 'store.db'}.")
        if not file.parent.is_dir():
            raise StoreError(f"The folder {file.parent} does not exist; make it, or name the store elsewhere.")
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
        def add(link: sqlite3.Connection) -> list[bool]:
            users = dict.fromkeys(event.user for event in events)
            numbers = {user: _user_number(link, user) or _insert_user(link, user) for user in users}
            return [
                link.execute(ADD, (numbers[event.user], *one, key)).rowcount == 1
                for event, one, key in zip(events, rows, keys, strict=True)
            ]

        with utf8_texts():
            rows = [to_row(event) for event in events]
            keys = [None if event.id is None else digest(event.id) for event in events]
            return self._write(add)

    def newest(self, users: Sequence[str], limit: int | None) -> list[list[Row]]:
        most = -1 if limit is None else limit
        with utf8_texts():
            return self._read(lambda link: [link.execute(NEWEST, (user, most)).fetchall()[::-1] for user in users])

    def delete_users(self, users: Sequence[str]) -> list[int]:
        """Delete users with their events and event ids, also from the bytes of the file.

        SQLite overwrites deleted rows, but leaves copies of rows that it once moved between pages. So the file is
        rewritten (about a second per 100 MB; writers wait) and its log truncated. A file of more than 512 MB is not
        rewritten here: run `VACUUM` on it at a time of low load.
        """

        def delete(link: sqlite3.Connection) -> list[int | None]:
            """Each user's number of events; None if there is no such user."""
            is_filling, counts = self._is_filling(link), []
            for user in users:
                if is_filling:
                    link.execute("INSERT OR IGNORE INTO deleted_users VALUES (?)", (digest(user),))
                number, count = _user_number(link, user), None
                if number is not None:
                    count = link.execute("DELETE FROM events WHERE user = ?", (number,)).rowcount
                    link.execute("DELETE FROM users WHERE number = ?", (number,))
                counts.append(count)
            return counts

        with utf8_texts():
            counts = self._write(delete)
        if any(count is not None for count in counts):
            with self._write_lock:
                if not self._closed:
                    self._erase()
        return [count or 0 for count in counts]

    def check(self) -> None:
        if not self._path.exists():
            raise StoreError(f"The store {self._path} was removed while it was in use; start again with a new one.")
        self._read(lambda link: link.execute("SELECT count(*) FROM about").fetchone())

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

        def create(link: sqlite3.Connection) -> None:
            if self._is_new(link):
                for statement in SCHEMA:
                    link.execute(statement)

        with self._store_errors():
            self._is_new(self._writer)
            (mode,) = self._writer.execute("PRAGMA journal_mode = WAL").fetchone()
            if mode != "wal":
                raise StoreError(
                    f"SQLite cannot share the file {self._path} with other processes there (a network drive?); "
                    "name a file on a local disk."
                )
        self._write(create)

    def _is_new(self, link: sqlite3.Connection) -> bool:
        # In one statement: between two of them another process may create the tables.
        application, version, tables = link.execute(
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

    def _read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with self._store_errors():
            self._refuse_closed()
            try:
                connection = self._idle.pop()
            except IndexError:
                connection = self._connect()
            try:
                return work(connection)
            finally:
                self._idle.append(connection)
                if self._closed:
                    self._close_idle()

    def _write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """One transaction. The lock serialises threads, SQLite serialises processes."""
        with self._store_errors(), self._write_lock:
            self._refuse_closed()
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                result = work(self._writer)
                self._writer.execute("COMMIT")
            except BaseException:
                if self._writer.in_transaction:  # a full disk may have ended it
                    self._writer.execute("ROLLBACK")
                raise
            return result

    def _add_histories(self, link: sqlite3.Connection, histories: Sequence[UserRows]) -> None:
        for user, rows in histories:
            number = _user_number(link, user)
            if number is not None:
                link.executemany(ADD, [(number, *row, None) for row in rows])
                continue
            number, position, previous_time = _insert_user(link, user), 0, None
            records = []
            for row in rows:  # for a new user, positions among equal times need no query
                position = position + 1 if row[1] == previous_time else 0
                previous_time = row[1]
                records.append((number, *row, position))
            link.executemany(ADD_FOR_NEW_USER, records)

    def _add_items(self, link: sqlite3.Connection, rows: Mapping[str, bytes], version: int) -> None:
        link.executemany(ADD_ITEM, [(name, row.decode(), version) for name, row in rows.items()])

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
            raise StoreError(self._message(error)) from error

    def _message(self, error: sqlite3.Error | OSError) -> str:
        name, path, store = _error_name(error), self._path, f"The store {self._path}"
        if name.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT")):
            return f"{path} is not a SQLite database, or is damaged ({error}); name another file for the store."
        if name.startswith("SQLITE_FULL"):
            return f"The disk is full: the store {path} was not changed. Free some space and try again."
        if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")) or isinstance(error, PermissionError):
            return f"{store} cannot be opened for writing ({error}); check the permissions of it and its folder."
        if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            return f"{store} was busy for {BUSY_SECONDS:.0f} seconds: another process is writing. Try again."
        return f"{store} cannot be used: {error}."


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


def _user_number(link: sqlite3.Connection, user: str) -> int | None:
    row = link.execute("SELECT number FROM users WHERE id = ?", (user,)).fetchone()
    return None if row is None else int(row[0])


def _insert_user(link: sqlite3.Connection, user: str) -> int:
    number = link.execute("INSERT INTO users (id) VALUES (?)", (user,)).lastrowid
    assert number is not None
    return number
