"""Everybody's events in a PostgreSQL database, which any number of replicas may share.

Texts are kept as bytes, because PostgreSQL's own text refuses the NUL character, and found by digests, because its
indexes refuse long keys. The tables are made in the first schema of the search path; their names begin with `segue_`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import psycopg
from psycopg import Connection, IsolationLevel
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg_pool import ConnectionPool, PoolTimeout

from segue.errors import StoreError
from segue.serving.store.store import FORMAT, AddedItem, Event, FillState, Row, RunSelection, digest, row, unicode_texts

WAIT_SECONDS = 1.5  # for a connection; less than a request waits, so that it is told why
MOST_CONNECTIONS = 4  # of a process
TRIES = 3
STUCK_SECONDS = 15.0  # in the middle of a transaction; a busy machine may well take seconds between two statements
LOCK = 0x7365677565  # "segue": the advisory lock of whoever makes tables, fills, chooses a run or adds items
# A lost or refused connection (it has no code), a server that stops or starts, a deadlock: nothing was kept.
PASSING = (None, "57P01", "57P02", "57P03", "40001", "40P01")
STUCK = "25P03"  # ended by the server for standing still in a transaction: nothing was kept, at a commit either
DEFAULTS = {
    "application_name": "segue",
    "connect_timeout": "3",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    "tcp_user_timeout": "10000",  # milliseconds; without it a vanished server is waited for a quarter of an hour
}

SCHEMA = (
    "CREATE TABLE segue_about (name text PRIMARY KEY, value text NOT NULL)",
    "CREATE TABLE segue_users (number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, "
    "digest bytea NOT NULL UNIQUE, id bytea NOT NULL)",
    "CREATE SEQUENCE segue_arrivals",
    # Events of one moment are in the order of the calls that brought them, and of one call by their place in it.
    "CREATE TABLE segue_events (number bigint, time bigint, arrival bigint, place bigint, item bytea NOT NULL, "
    "kind bytea, value double precision, digest bytea, PRIMARY KEY (number, time, arrival, place))",
    "CREATE UNIQUE INDEX segue_event_digests ON segue_events (digest) WHERE digest IS NOT NULL",
    "CREATE TABLE segue_forgotten (digest bytea PRIMARY KEY)",  # users, only while a data folder is read
)
# Also made in a store from before it: who does not know it loses nothing by it, so the format is the same.
ITEMS_TABLE = (
    "CREATE TABLE segue_items (number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, digest bytea NOT NULL UNIQUE, "
    "id bytea NOT NULL, row bytea NOT NULL, version bigint NOT NULL)",
    "CREATE INDEX segue_item_versions ON segue_items (version)",
)
ADD_ITEMS = """
    INSERT INTO segue_items (digest, id, row, version)
    SELECT digest, id, row, %s FROM unnest(%s::bytea[], %s::bytea[], %s::bytea[]) WITH ORDINALITY
        AS new (digest, id, row, place) ORDER BY place
    ON CONFLICT (digest) DO UPDATE SET row = excluded.row, version = excluded.version
"""
# Digests are inserted in their own order: two calls that bring the same ones wait for each other in turn only.
ADD = """
    INSERT INTO segue_events (number, time, arrival, place, item, kind, value, digest)
    SELECT number, time, (SELECT nextval('segue_arrivals')), place, item, kind, value, digest
    FROM unnest(%s::bigint[], %s::bigint[], %s::bytea[], %s::bytea[], %s::double precision[], %s::bytea[])
        WITH ORDINALITY AS new (number, time, item, kind, value, digest, place)
    ORDER BY digest, place
    ON CONFLICT (digest) WHERE digest IS NOT NULL DO NOTHING
    RETURNING place
"""
NEWEST = """
    SELECT asked.place, event.item, event.time, event.kind, event.value
    FROM unnest(%s::bytea[]) WITH ORDINALITY AS asked (digest, place)
    JOIN segue_users AS person ON person.digest = asked.digest
    CROSS JOIN LATERAL (
        SELECT * FROM segue_events WHERE number = person.number
        ORDER BY time DESC, arrival DESC, place DESC LIMIT %s
    ) AS event
    ORDER BY asked.place, event.time, event.arrival, event.place
"""
COPY = "COPY segue_events (number, time, arrival, place, item, kind, value) FROM STDIN (FORMAT BINARY)"
COPIED = ["int8", "int8", "int8", "int8", "bytea", "bytea", "float8"]

Link = Connection[tuple[Any, ...]]
T = TypeVar("T")


class PostgresStore:
    """A store in a database. A connection that was lost is made anew; past a few seconds it is an error."""

    def __init__(self, url: str) -> None:
        settings = _settings(url)
        self._secret = settings.get("password")
        self._place = "{}:{}/{}".format(*(settings.get(name) or "" for name in ("host", "port", "dbname")))
        conninfo = make_conninfo(url, **{name: value for name, value in DEFAULTS.items() if name not in settings})
        with self._explained(), psycopg.connect(conninfo, autocommit=True) as link:  # a pool would not say why it fails
            _configure(link)
            with link.transaction():
                self._prepare(link)
        self._pool: ConnectionPool[Link] = ConnectionPool(
            conninfo,
            kwargs={"autocommit": True},  # a single statement needs no BEGIN and COMMIT around it
            configure=_configure,
            min_size=1,
            max_size=MOST_CONNECTIONS,
            timeout=WAIT_SECONDS,
            reconnect_timeout=WAIT_SECONDS,  # longer attempts come ever more rarely; the next call begins new ones
            name="segue-store",
            open=True,
        )

    def append(self, events: Sequence[Event]) -> list[bool]:
        if not events:
            return []
        with unicode_texts():
            rows = [_encoded(row(event)) for event in events]
            keys = [None if event.id is None else digest(event.id) for event in events]
            people = {event.user: digest(event.user) for event in events}

        def add(link: Link) -> list[bool]:
            numbers = _numbers(link, people)
            columns = [list(column) for column in zip(*rows, strict=True)]
            items, times, kinds, values = columns
            added = link.execute(ADD, ([numbers[event.user] for event in events], times, items, kinds, values, keys))
            places = {place for (place,) in added}
            return [place in places for place in range(1, len(events) + 1)]

        return self._transaction(add)

    def newest(self, users: Sequence[str], limit: int | None) -> list[list[Row]]:
        with unicode_texts():
            asked = [digest(user) for user in users]
        histories: list[list[Row]] = [[] for _ in users]
        found = self._run(lambda link: link.execute(NEWEST, (asked, limit), binary=True).fetchall())
        for place, item, time, kind, value in found:
            histories[place - 1].append((item.decode(), time, None if kind is None else kind.decode(), value))
        return histories

    def delete_users(self, users: Sequence[str]) -> list[int]:
        """Remove users' events, their ids and the users' ids; gives each one's number of events.

        No query sees them any more. Their bytes are freed by the server's own VACUUM, as a rule within minutes
        (autovacuum), and overwritten as the space is used again; its write-ahead log, archives and backups keep them
        as long as you keep those.
        """
        with unicode_texts():
            keys = [digest(user) for user in users]

        def remove(link: Link) -> list[int]:
            _lock(link)  # a chunk being added may bring a user back: wait for it
            state = _said(link, "fill", FillState)
            filling = state is not None and not state.finished
            removed = dict.fromkeys(keys, 0)
            for key in sorted(removed):  # in one order, whoever else does the same
                if filling:
                    link.execute("INSERT INTO segue_forgotten VALUES (%s) ON CONFLICT DO NOTHING", (key,))
                removed[key] = _removed(link, key)
            return [removed.pop(key, 0) for key in keys]  # of one named twice nothing is left the second time

        return self._transaction(remove)

    def is_empty(self) -> bool:
        return self._run(_is_empty)

    def active(self) -> RunSelection | None:
        return self._run(lambda link: _said(link, "active", RunSelection))

    def activate(self, active: RunSelection, *, expected: int | None) -> bool:
        def choose(link: Link) -> bool:
            _lock(link)
            stored = _said(link, "active", RunSelection)
            if (None if stored is None else stored.version) != expected:
                return False
            _say(link, "active", active)
            return True

        return self._transaction(choose)

    def fill_state(self) -> FillState | None:
        return self._run(lambda link: _said(link, "fill", FillState))

    def fill(
        self, histories: Sequence[tuple[str, Sequence[Row]]], state: FillState, *, expected: FillState | None
    ) -> bool:
        with unicode_texts():
            people = {user: digest(user) for user, _ in histories}
            encoded = [(user, [_encoded(one) for one in rows]) for user, rows in histories]

        def add(link: Link) -> bool:
            _lock(link)
            if _said(link, "fill", FillState) != expected or (expected is None and not _is_empty(link)):
                return False
            forgotten = {key for (key,) in link.execute("SELECT digest FROM segue_forgotten", binary=True)}
            kept = {user: key for user, key in people.items() if key not in forgotten}
            _copy(link, [(user, rows) for user, rows in encoded if user in kept], _numbers(link, kept))
            if state.finished:
                link.execute("DELETE FROM segue_forgotten")
                link.execute("ANALYZE segue_users, segue_events")  # plans for an empty table would not do
            _say(link, "fill", state)
            return True

        return self._transaction(add)

    def add_items(self, items: Sequence[AddedItem]) -> int:
        with unicode_texts():
            rows = {item.id: (digest(item.id), item.id.encode(), msgspec.json.encode(item.row)) for item in items}
        columns = [list(column) for column in zip(*rows.values(), strict=True)]

        def add(link: Link) -> int:
            _lock(link)  # versions are committed in their order: who has seen one has seen those before it
            version = _items_version(link) + bool(rows)
            if rows:
                link.execute(ADD_ITEMS, (version, *columns))
            return version

        return self._transaction(add)

    def items(self, after: int) -> tuple[int, list[AddedItem]]:
        found = self._run(
            lambda link: link.execute(
                "SELECT id, row, version FROM segue_items WHERE version > %s ORDER BY number", (after,), binary=True
            ).fetchall()
        )
        version = max((row[2] for row in found), default=after)
        return version, [AddedItem(name.decode(), msgspec.json.decode(told)) for name, told, _ in found]

    def check(self) -> None:
        self._run(lambda link: link.execute("SELECT 1 FROM segue_about LIMIT 1").fetchone())

    def close(self) -> None:
        self._pool.close()

    def _prepare(self, link: Link) -> None:
        """Make the tables, by whoever comes first."""
        _lock(link)
        (there,) = link.execute("SELECT to_regclass('segue_about') IS NOT NULL").fetchone() or (False,)
        if not there:
            for statement in SCHEMA:
                link.execute(statement)
            link.execute("INSERT INTO segue_about VALUES ('format', %s)", (str(FORMAT),))
        (version,) = link.execute("SELECT value FROM segue_about WHERE name = 'format'").fetchone() or (None,)
        if version != str(FORMAT):
            raise StoreError(
                f"The PostgreSQL store at {self._place} has format {version}, this segue reads format {FORMAT}; "
                "use the segue that made it, or name another database."
            )
        (there,) = link.execute("SELECT to_regclass('segue_items') IS NOT NULL").fetchone() or (False,)
        if not there:
            for statement in ITEMS_TABLE:
                link.execute(statement)

    def _run(self, work: Callable[[Link], T], *, within: Callable[[Link], Any] = contextlib.nullcontext) -> T:
        """Do work on a connection, again on a new one when nothing can have been kept of it."""
        with self._explained():
            for tries_left in reversed(range(TRIES)):
                done = False
                try:
                    with self._pool.connection() as link, within(link):
                        answer = work(link)
                        done = True
                    return answer
                except (psycopg.OperationalError, psycopg.errors.IdleInTransactionSessionTimeout) as error:
                    if done and error.sqlstate in PASSING:
                        raise StoreError(self._in_doubt()) from error
                    if isinstance(error, PoolTimeout) or error.sqlstate not in (*PASSING, STUCK) or not tries_left:
                        raise
                self._pool.check()  # the server was started again: every waiting connection is lost
        raise AssertionError("the last try returns or raises")

    def _transaction(self, work: Callable[[Link], T]) -> T:
        return self._run(work, within=lambda link: link.transaction())

    def _in_doubt(self) -> str:
        return (
            f"The connection to the PostgreSQL store at {self._place} was lost at the very moment of saving; whether "
            "it was saved is not known. Send events again with the same event ids: those that are there stay single."
        )

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            raise StoreError(self._sentence(error)) from error

    def _sentence(self, error: psycopg.Error) -> str:
        store = f"The PostgreSQL store at {self._place}"
        if isinstance(error, PoolTimeout):
            return f"{store} gave no connection within {WAIT_SECONDS:.0f} seconds; check that the server is running."
        if isinstance(error, psycopg.errors.DiskFull):
            return f"{store} has a full disk: nothing was changed. Free some space there and try again."
        said = error.diag.message_primary or re.split(r"failed: (?:FATAL:\s*)?", str(error))[-1].splitlines()[0]
        reason = said.replace(self._secret, "…") if self._secret else said
        if error.sqlstate is None:
            return f"{store} cannot be reached: {reason.rstrip('.')}. Check the URL, and that the server is running."
        return f"{store} cannot be used: {reason.rstrip('.')}."


def _settings(url: str) -> dict[str, Any]:
    """What the URL says. What cannot be read is not repeated: any part of it may be of the password."""
    before_query = url.partition("://")[2].partition("?")[0]
    try:
        settings = conninfo_to_dict(url)
    except psycopg.Error:
        settings = {}
    ports = str(settings.get("port") or "").split(",")
    mistaken = before_query.count("@") > 1 or "@" in before_query.partition("/")[2]
    if not settings or mistaken or not all(port == "" or port.isdecimal() for port in ports):
        raise StoreError(
            "The URL of the store cannot be read; expected postgresql://USER:PASSWORD@HOST:PORT/DATABASE, with the "
            "characters : / ? # @ % in the user and the password percent-encoded (%3A %2F %3F %23 %40 %25)."
        )
    return settings


def _configure(link: Link) -> None:
    link.isolation_level = IsolationLevel.READ_COMMITTED
    # An event is answered when it is durable, whatever the server's habit; a stronger habit stays.
    link.execute(
        "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
    )
    # Whoever brings the same event ids, or forgets a user, waits for a transaction of another replica: one that stands
    # still in the middle of it, or whose machine is gone, must not keep the others waiting for ever.
    link.execute(
        "SELECT set_config('idle_in_transaction_session_timeout', %s, false)", (str(round(1000 * STUCK_SECONDS)),)
    )


def _removed(link: Link, key: bytes) -> int:
    """How many events of a user were deleted."""
    found = link.execute("SELECT number FROM segue_users WHERE digest = %s FOR UPDATE", (key,)).fetchone()
    if found is None:
        return 0
    removed = link.execute("DELETE FROM segue_events WHERE number = %s", found).rowcount
    link.execute("DELETE FROM segue_users WHERE number = %s", found)
    return removed


def _lock(link: Link) -> None:
    link.execute("SELECT pg_advisory_xact_lock(%s)", (LOCK,))


def _numbers(link: Link, people: dict[str, bytes]) -> dict[str, int]:
    """The numbers of users (id → digest), made where there are none, and held against being forgotten meanwhile."""
    in_order = sorted(people.items(), key=lambda one: one[1])  # the same for everybody, so that nobody waits in a ring
    while True:
        found: dict[bytes, int] = dict(
            link.execute(
                "SELECT digest, number FROM segue_users WHERE digest = ANY(%s) ORDER BY digest FOR KEY SHARE",
                ([key for _, key in in_order],),
                binary=True,
            )
        )
        missing = [(user, key) for user, key in in_order if key not in found]
        if not missing:
            return {user: found[key] for user, key in in_order}
        link.execute(
            "INSERT INTO segue_users (digest, id) SELECT * FROM unnest(%s::bytea[], %s::bytea[]) "
            "ON CONFLICT (digest) DO NOTHING",
            ([key for _, key in missing], [user.encode() for user, _ in missing]),
        )


def _encoded(one: Row) -> tuple[bytes, int, bytes | None, float | None]:
    item, time, kind, value = one
    return item.encode(), time, None if kind is None else kind.encode(), value


def _copy(link: Link, histories: Sequence[tuple[str, Sequence[tuple[Any, ...]]]], numbers: dict[str, int]) -> None:
    (arrival,) = link.execute("SELECT nextval('segue_arrivals')").fetchone() or (0,)
    with link.cursor() as cursor, cursor.copy(COPY) as copy:
        copy.set_types(COPIED)
        for user, rows in histories:
            number = numbers[user]
            for place, (item, time, kind, value) in enumerate(rows):
                copy.write_row((number, time, arrival, place, item, kind, value))


def _items_version(link: Link) -> int:
    (version,) = link.execute("SELECT coalesce(max(version), 0) FROM segue_items").fetchone() or (0,)
    return int(version)


def _is_empty(link: Link) -> bool:
    return link.execute("SELECT 1 FROM segue_events LIMIT 1").fetchone() is None


def _said(link: Link, name: str, kind: type[T]) -> T | None:
    found = link.execute("SELECT value FROM segue_about WHERE name = %s", (name,)).fetchone()
    return None if found is None else msgspec.json.decode(found[0], type=kind)


def _say(link: Link, name: str, value: RunSelection | FillState) -> None:
    link.execute(
        "INSERT INTO segue_about VALUES (%s, %s) ON CONFLICT (name) DO UPDATE SET value = excluded.value",
        (name, msgspec.json.encode(value).decode()),
    )
