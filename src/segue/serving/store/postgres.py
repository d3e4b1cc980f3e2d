"""All users' events in a PostgreSQL database, which any number of replicas may share.

Texts are stored as bytes, because PostgreSQL's text refuses the NUL character, and are indexed by digest, because its
indexes refuse long keys. The tables are in the first schema of the search path; their names begin with `segue_`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import psycopg
from psycopg import Connection, IsolationLevel
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg_pool import ConnectionPool, PoolTimeout

from segue.errors import StoreError
from segue.serving.store.store import FORMAT, Event, HistoryStore, Row, T, UserRows, digest, to_row, utf8_texts

WAIT_SECONDS = 1.5  # for a connection; shorter than a request waits, so that the request gets the reason
MAX_CONNECTIONS = 4  # of a process
ATTEMPTS = 3
IDLE_SECONDS = 15.0  # in a transaction; a busy machine may take seconds between two statements
LOCK = 0x7365677565  # "segue": advisory lock for creating tables, filling, deleting, selecting a run and adding items
# A lost or refused connection (None), a server that stops or starts, a deadlock: the transaction was rolled back.
TRANSIENT = (None, "57P01", "57P02", "57P03", "40001", "40P01")
IDLE = "25P03"  # the server ended an idle transaction: it was rolled back, even at a commit
DEFAULTS = {
    "application_name": "segue",
    "connect_timeout": "3",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    "tcp_user_timeout": "10000",  # milliseconds; without it a vanished server is noticed after a quarter of an hour
}

SCHEMA = (
    "CREATE TABLE segue_about (name text PRIMARY KEY, value text NOT NULL)",
    "CREATE TABLE segue_users (number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, "
    "digest bytea NOT NULL UNIQUE, id bytea NOT NULL)",
    "CREATE SEQUENCE segue_arrivals",
    # At equal times, events are in the order of the calls that added them, and of their position in a call.
    "CREATE TABLE segue_events (number bigint, time bigint, arrival bigint, position bigint, item bytea NOT NULL, "
    "kind bytea, value double precision, digest bytea, PRIMARY KEY (number, time, arrival, position))",
    "CREATE UNIQUE INDEX segue_event_digests ON segue_events (digest) WHERE digest IS NOT NULL",
    "CREATE TABLE segue_deleted_users (digest bytea PRIMARY KEY)",  # only while the store is filled
    "CREATE TABLE segue_items (number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, digest bytea NOT NULL UNIQUE, "
    "id bytea NOT NULL, row bytea NOT NULL, version bigint NOT NULL)",
    "CREATE INDEX segue_item_versions ON segue_items (version)",
    f"INSERT INTO segue_about VALUES ('format', '{FORMAT}')",
)
ADD_ITEMS = """
    INSERT INTO segue_items (digest, id, row, version)
    SELECT digest, id, row, %s FROM unnest(%s::bytea[], %s::bytea[], %s::bytea[]) WITH ORDINALITY
        AS new (digest, id, row, position) ORDER BY position
    ON CONFLICT (digest) DO UPDATE SET row = excluded.row, version = excluded.version
"""
# Digests are inserted in sorted order, so that two calls with the same ones cannot deadlock.
ADD = """
    INSERT INTO segue_events (number, time, arrival, position, item, kind, value, digest)
    SELECT number, time, (SELECT nextval('segue_arrivals')), position, item, kind, value, digest
    FROM unnest(%s::bigint[], %s::bigint[], %s::bytea[], %s::bytea[], %s::double precision[], %s::bytea[])
        WITH ORDINALITY AS new (number, time, item, kind, value, digest, position)
    ORDER BY digest, position
    ON CONFLICT (digest) WHERE digest IS NOT NULL DO NOTHING
    RETURNING position
"""
NEWEST = """
    SELECT wanted.index, event.item, event.time, event.kind, event.value
    FROM unnest(%s::bytea[]) WITH ORDINALITY AS wanted (digest, index)
    JOIN segue_users AS owner ON owner.digest = wanted.digest
    CROSS JOIN LATERAL (
        SELECT * FROM segue_events WHERE number = owner.number
        ORDER BY time DESC, arrival DESC, position DESC LIMIT %s
    ) AS event
    ORDER BY wanted.index, event.time, event.arrival, event.position
"""
COPY = "COPY segue_events (number, time, arrival, position, item, kind, value) FROM STDIN (FORMAT BINARY)"
COPY_TYPES = ["int8", "int8", "int8", "int8", "bytea", "bytea", "float8"]

Link = Connection[tuple[Any, ...]]


class PostgresStore(HistoryStore):
    """A store in a database. It reconnects after a lost connection; if that takes more than a few seconds it raises."""

    ANY_EVENT = "SELECT 1 FROM segue_events LIMIT 1"
    READ_PROPERTY = "SELECT value FROM segue_about WHERE name = %s"
    WRITE_PROPERTY = "INSERT INTO segue_about VALUES (%s, %s) ON CONFLICT (name) DO UPDATE SET value = excluded.value"
    DELETED_USERS = "SELECT digest FROM segue_deleted_users"
    # Query plans for an empty table would be slow.
    FINISH_FILL = ("DELETE FROM segue_deleted_users", "ANALYZE segue_users, segue_events")
    ITEMS_VERSION = "SELECT coalesce(max(version), 0) FROM segue_items"
    ITEMS_AFTER = "SELECT id, row, version FROM segue_items WHERE version > %s ORDER BY number"

    def __init__(self, url: str) -> None:
        settings = _settings(url)
        self._password = settings.get("password")
        self._address = "{}:{}/{}".format(*(settings.get(name) or "" for name in ("host", "port", "dbname")))
        conninfo = make_conninfo(url, **{name: value for name, value in DEFAULTS.items() if name not in settings})
        # Not with the pool, which does not report why a connection fails.
        with self._store_errors(), psycopg.connect(conninfo, autocommit=True) as link:
            _configure(link)
            with link.transaction():
                _lock(link)
                (exists,) = link.execute("SELECT to_regclass('segue_about') IS NOT NULL").fetchone() or (False,)
                for statement in () if exists else SCHEMA:
                    link.execute(statement)
                (version,) = link.execute("SELECT value FROM segue_about WHERE name = 'format'").fetchone() or (None,)
        if version != str(FORMAT):
            raise StoreError(
                f"The PostgreSQL store at {self._address} has format {version}, this segue reads format {FORMAT}; "
                "use the segue that made it, or name another database."
            )
        self._pool: ConnectionPool[Link] = ConnectionPool(
            conninfo,
            kwargs={"autocommit": True},  # a single statement needs no BEGIN and COMMIT around it
            configure=_configure,
            min_size=1,
            max_size=MAX_CONNECTIONS,
            timeout=WAIT_SECONDS,
            reconnect_timeout=WAIT_SECONDS,  # longer series of attempts get ever rarer; the next call starts a new one
            name="segue-store",
            open=True,
        )

    def append(self, events: Sequence[Event]) -> list[bool]:
        if not events:
            return []
        with utf8_texts():
            rows = [_encoded(to_row(event)) for event in events]
            keys = [None if event.id is None else digest(event.id) for event in events]
            users = {event.user: digest(event.user) for event in events}

        def add(link: Link) -> list[bool]:
            numbers = _user_numbers(link, users)
            columns = [list(column) for column in zip(*rows, strict=True)]
            items, times, kinds, values = columns
            added = link.execute(ADD, ([numbers[event.user] for event in events], times, items, kinds, values, keys))
            positions = {position for (position,) in added}
            return [position in positions for position in range(1, len(events) + 1)]

        return self._transaction(add)

    def newest(self, users: Sequence[str], limit: int | None) -> list[list[Row]]:
        with utf8_texts():
            keys = [digest(user) for user in users]
        histories: list[list[Row]] = [[] for _ in users]
        records = self._read(lambda link: link.execute(NEWEST, (keys, limit), binary=True).fetchall())
        for index, item, time, kind, value in records:
            histories[index - 1].append((item.decode(), time, None if kind is None else kind.decode(), value))
        return histories

    def delete_users(self, users: Sequence[str]) -> list[int]:
        """Delete users with their events and event ids; returns each user's number of events.

        No query finds them any more. The server's VACUUM frees their bytes, usually within minutes (autovacuum), which
        are overwritten when the space is reused. Its write-ahead log, archives and backups keep them as long as you
        keep those.
        """
        with utf8_texts():
            keys = [digest(user) for user in users]

        def remove(link: Link) -> list[int]:
            is_filling, counts = self._is_filling(link), dict.fromkeys(keys, 0)
            for key in sorted(counts):  # in one order, so that two deletions cannot deadlock
                if is_filling:
                    link.execute("INSERT INTO segue_deleted_users VALUES (%s) ON CONFLICT DO NOTHING", (key,))
                number = link.execute("SELECT number FROM segue_users WHERE digest = %s FOR UPDATE", (key,)).fetchone()
                if number is not None:
                    counts[key] = link.execute("DELETE FROM segue_events WHERE number = %s", number).rowcount
                    link.execute("DELETE FROM segue_users WHERE number = %s", number)
            return [counts.pop(key, 0) for key in keys]  # a user named twice has no events the second time

        return self._write(remove)

    def check(self) -> None:
        self._read(lambda link: link.execute("SELECT 1 FROM segue_about LIMIT 1").fetchone())

    def close(self) -> None:
        self._pool.close()

    def _read(self, work: Callable[[Link], T], *, within: Callable[[Link], Any] = contextlib.nullcontext) -> T:
        """Call `work` with a connection; again with a new one if its transaction was certainly rolled back."""
        with self._store_errors():
            for attempts_left in reversed(range(ATTEMPTS)):
                done = False
                try:
                    with self._pool.connection() as link, within(link):
                        result = work(link)
                        done = True
                    return result
                except (psycopg.OperationalError, psycopg.errors.IdleInTransactionSessionTimeout) as error:
                    if done and error.sqlstate in TRANSIENT:
                        raise StoreError(
                            f"The connection to the PostgreSQL store at {self._address} was lost during a commit; "
                            "whether it was saved is not known. Resend events with the same ids: none is stored twice."
                        ) from error
                    if isinstance(error, PoolTimeout) or error.sqlstate not in (*TRANSIENT, IDLE) or not attempts_left:
                        raise
                self._pool.check()  # after a restart of the server, all pooled connections are lost
        raise AssertionError("the last attempt returns or raises")

    def _transaction(self, work: Callable[[Link], T]) -> T:
        return self._read(work, within=lambda link: link.transaction())

    def _write(self, work: Callable[[Link], T]) -> T:
        def locked(link: Link) -> T:
            _lock(link)
            return work(link)

        return self._transaction(locked)

    def _add_histories(self, link: Link, histories: Sequence[UserRows]) -> None:
        numbers = _user_numbers(link, {user: digest(user) for user, _ in histories})
        (arrival,) = link.execute("SELECT nextval('segue_arrivals')").fetchone() or (0,)
        with link.cursor() as cursor, cursor.copy(COPY) as copy:
            copy.set_types(COPY_TYPES)
            for user, rows in histories:
                for position, row in enumerate(rows):
                    item, time, kind, value = _encoded(row)
                    copy.write_row((numbers[user], time, arrival, position, item, kind, value))

    def _add_items(self, link: Link, rows: Mapping[str, bytes], version: int) -> None:
        names = [name.encode() for name in rows]
        link.execute(ADD_ITEMS, (version, [digest(name) for name in rows], names, list(rows.values())))

    @contextlib.contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            raise StoreError(self._message(error)) from error

    def _message(self, error: psycopg.Error) -> str:
        store = f"The PostgreSQL store at {self._address}"
        if isinstance(error, PoolTimeout):
            return f"{store} gave no connection within {WAIT_SECONDS:.0f} seconds; check that the server is running."
        if isinstance(error, psycopg.errors.DiskFull):
            return f"{store} has a full disk: nothing was changed. Free some space there and try again."
        reason = error.diag.message_primary or re.split(r"failed: (?:FATAL:\s*)?", str(error))[-1].splitlines()[0]
        if self._password:
            reason = reason.replace(self._password, "…")
        if error.sqlstate is None:
            return f"{store} cannot be reached: {reason.rstrip('.')}. Check the URL, and that the server is running."
        return f"{store} cannot be used: {reason.rstrip('.')}."


def _settings(url: str) -> dict[str, Any]:
    """The settings in the URL. An error does not repeat the URL: any part of it may belong to the password."""
    before_query = url.partition("://")[2].partition("?")[0]
    try:
        settings = conninfo_to_dict(url)
    except psycopg.Error:
        settings = {}
    ports = str(settings.get("port") or "").split(",")
    misplaced = before_query.count("@") > 1 or "@" in before_query.partition("/")[2]
    if not settings or misplaced or not all(port == "" or port.isdecimal() for port in ports):
        raise StoreError(
            "The URL of the store cannot be read; expected postgresql://USER:PASSWORD@HOST:PORT/DATABASE, with the "
            "characters : / ? # @ % in the user and the password percent-encoded (%3A %2F %3F %23 %40 %25)."
        )
    return settings


def _configure(link: Link) -> None:
    link.isolation_level = IsolationLevel.READ_COMMITTED
    # An event is acknowledged when it is durable, whatever the server's default; a stronger default stays.
    link.execute(
        "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
    )
    # A call with the same event ids, or one that deletes a user, waits for the transaction of another replica: one that
    # hangs in the middle of it, or whose machine is gone, must not block the others for ever.
    link.execute(
        "SELECT set_config('idle_in_transaction_session_timeout', %s, false)", (str(round(1000 * IDLE_SECONDS)),)
    )


def _lock(link: Link) -> None:
    link.execute("SELECT pg_advisory_xact_lock(%s)", (LOCK,))


def _user_numbers(link: Link, users: dict[str, bytes]) -> dict[str, int]:
    """Numbers of users (id → digest). New users are inserted; all are locked against deletion meanwhile."""
    in_order = sorted(users.items(), key=lambda one: one[1])  # one order for all calls, so that they cannot deadlock
    while True:
        numbers: dict[bytes, int] = dict(
            link.execute(
                "SELECT digest, number FROM segue_users WHERE digest = ANY(%s) ORDER BY digest FOR KEY SHARE",
                ([key for _, key in in_order],),
                binary=True,
            )
        )
        missing = [(user, key) for user, key in in_order if key not in numbers]
        if not missing:
            return {user: numbers[key] for user, key in in_order}
        link.execute(
            "INSERT INTO segue_users (digest, id) SELECT * FROM unnest(%s::bytea[], %s::bytea[]) "
            "ON CONFLICT (digest) DO NOTHING",
            ([key for _, key in missing], [user.encode() for user, _ in missing]),
        )


def _encoded(one: Row) -> tuple[bytes, int, bytes | None, float | None]:
    item, time, kind, value = one
    return item.encode(), time, None if kind is None else kind.encode(), value
