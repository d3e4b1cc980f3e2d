"""One contract for the stores of histories, held by SQLite and by a real PostgreSQL."""

from __future__ import annotations

import contextlib
import importlib
import json
import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl
import psycopg
import pytest

from bench.serving.postgres import PostgresServer
from segue.data.dataset import Data
from segue.errors import InputError, StoreError
from segue.folders import write_manifest
from segue.serving.store import postgres as postgres_store
from segue.serving.store.fill import fill_store
from segue.serving.store.sqlite import SqliteStore
from segue.serving.store.store import AddedItem, Event, FillState, HistoryStore, Row, RunSelection, digest, open_store

HOSTILE = [
    "",
    " ",
    "\0",
    "a\0b",
    "a",
    "A",
    "é",
    "e\u0301",
    "☕👩‍👩‍👧",
    "'; DROP TABLE users; --",
    '"quoted", [1, 2]',
    "../../etc/passwd",
    "%s %(name)s %",
    "\\x00\\",
    "line\nbreak\r\t\x1b[31m\u2028",
    "<script>alert(1)</script>",
    "x" * 100_000,
    "x" * 99_999 + "y",
]


@pytest.fixture(params=["sqlite", "postgresql"], name="url")
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "store.db") if request.param == "sqlite" else request.getfixturevalue("postgres_url")


@pytest.fixture(name="store")
def opened_store(url: str) -> Iterator[HistoryStore]:
    store = open_store(url)
    yield store
    store.close()


def is_empty(store: HistoryStore) -> bool:
    """Whether there is no event."""
    return store._read(lambda link: link.execute(store.ANY_EVENT).fetchone() is None)


def items(store: HistoryStore, user: str, limit: int | None = None) -> list[str]:
    return [row[0] for row in store.newest([user], limit)[0]]


# Histories


def test_events_are_ordered_by_time_and_then_by_arrival(store: HistoryStore) -> None:
    store.append([Event("u", "noon", 12), Event("u", "nine", 9), Event("u", "noon too", 12)])
    store.append([Event("u", "late ten", 10)])
    store.append([Event("u", "noon again", 12), Event("other", "x", 1), Event("u", "nine too", 9)])
    assert items(store, "u") == ["nine", "nine too", "late ten", "noon", "noon too", "noon again"]


def test_a_limit_keeps_the_newest(store: HistoryStore) -> None:
    store.append([Event("u", "c", 2), Event("u", "a", -5), Event("u", "d", 3), Event("u", "b", 2), Event("v", "z", 9)])
    by_limit = {limit: "".join(items(store, "u", limit)) for limit in (None, 9, 4, 3, 2, 1, 0)}
    assert by_limit == {None: "acbd", 9: "acbd", 4: "acbd", 3: "cbd", 2: "bd", 1: "d", 0: ""}


def test_all_fields_come_back_exactly(store: HistoryStore) -> None:
    values = [0.1 + 0.2, 1e308, 5e-324, -2.5, 0.0, 3.0]
    store.append([Event("u", f"i{n}", n, kind="view", value=value) for n, value in enumerate(values)])
    assert store.newest(["u"], None) == [[(f"i{n}", n, "view", value) for n, value in enumerate(values)]]
    store.append([Event("v", "i", 1_767_225_600_123_456)])
    assert store.newest(["v"], 1) == [[("i", 1_767_225_600_123_456, None, None)]]


def test_nan_and_infinity_are_no_value(store: HistoryStore) -> None:
    store.append([Event("u", "i", n, value=float(text)) for n, text in enumerate(["nan", "inf", "-inf"])])
    assert [row[3] for row in store.newest(["u"], None)[0]] == [None, None, None]


def test_times_are_any_signed_64_bit_integer(store: HistoryStore) -> None:
    store.append([Event("u", "last", 2**63 - 1), Event("u", "first", -(2**63))])
    assert store.newest(["u"], None)[0] == [("first", -(2**63), None, None), ("last", 2**63 - 1, None, None)]
    for time_us in (2**63, -(2**63) - 1):
        with pytest.raises(InputError, match="time of an event"):
            store.append([Event("u", "i", time_us)])
    assert len(items(store, "u")) == 2


def test_hostile_texts_stay_distinct_and_come_back_unchanged(store: HistoryStore) -> None:
    events = [Event(text, text, n, kind=text, id=text) for n, text in enumerate(HOSTILE)]
    assert store.append(events) == [True] * len(HOSTILE)
    assert store.append(events) == [False] * len(HOSTILE)
    expected: list[list[Row]] = [[(text, n, text, None)] for n, text in enumerate(HOSTILE)]
    assert store.newest(HOSTILE, 5) == expected
    assert store.delete_users(HOSTILE[::2]) == [1] * len(HOSTILE[::2])
    assert store.newest(HOSTILE, 5) == [[] if n % 2 == 0 else rows for n, rows in enumerate(expected)]


@pytest.mark.parametrize("event", [Event("\ud800", "i", 1), Event("u", "\udfff", 1), Event("u", "i", 1, id="\ud800")])
def test_a_lone_surrogate_refuses_the_whole_call(store: HistoryStore, event: Event) -> None:
    with pytest.raises(InputError, match="half a character"):
        store.append([Event("good", "i", 1), event])
    assert is_empty(store)
    for call in (lambda: store.newest(["\ud800"], 1), lambda: store.delete_users(["\ud800"])):
        with pytest.raises(InputError, match="half a character"):
            call()


def test_many_users_at_once_with_unknown_and_repeated_ones(store: HistoryStore) -> None:
    store.append([Event(f"u{n}", f"i{n}.{position}", position) for n in range(150) for position in range(n % 3 + 1)])
    users = [f"u{n}" for n in range(200)] + ["u7", "nobody", "u7"]
    histories = store.newest(users, 2)
    assert [[row[0] for row in rows] for rows in histories[:200]] == [
        [f"i{n}.{position}" for position in range(n % 3 + 1)][-2:] if n < 150 else [] for n in range(200)
    ]
    assert histories[200:] == [histories[7], [], histories[7]]
    assert store.newest([], 10) == []
    assert store.append([]) == []


def test_a_store_reopened_holds_everything(url: str) -> None:
    store = open_store(url)
    assert is_empty(store)
    store.append([Event("u", "a", 1, id="one"), Event("u", "b", 2)])
    selection = RunSelection("spring", None, "winter", 1)
    store.activate(selection, expected=None)
    store.close()
    with pytest.raises(StoreError):
        store.newest(["u"], 1)
    again = open_store(url)
    assert not is_empty(again)
    assert items(again, "u") == ["a", "b"]
    assert again.active() == selection
    assert again.append([Event("u", "a", 1, id="one"), Event("u", "c", 2)]) == [False, True]
    assert items(again, "u") == ["a", "b", "c"]
    again.check()
    again.close()


# The same event twice


def test_an_event_id_counts_once(store: HistoryStore) -> None:
    assert store.append([Event("u", "a", 1, id="x"), Event("u", "b", 2), Event("u", "c", 3, id="x")]) == [
        True,
        True,
        False,
    ]
    assert store.append([Event("u", "d", 4, id="x"), Event("v", "e", 5, id="x"), Event("u", "f", 6, id="y")]) == [
        False,
        False,
        True,
    ]
    assert items(store, "u") == ["a", "b", "f"]
    assert items(store, "v") == []


def test_events_without_an_id_are_each_one_event(store: HistoryStore) -> None:
    assert store.append([Event("u", "a", 1)] * 3) == [True] * 3
    assert store.append([Event("u", "a", 1)]) == [True]
    assert store.newest(["u"], None) == [[("a", 1, None, None)] * 4]


# Deleting users


def test_a_deleted_user_is_unknown_and_may_come_back(store: HistoryStore) -> None:
    store.append([Event("u", "a", 1, id="x"), Event("u", "b", 2), Event("v", "c", 3, id="y")])
    assert store.delete_users(["nobody", "u", "u"]) == [0, 2, 0]
    assert store.newest(["u", "v"], None) == [[], [("c", 3, None, None)]]
    assert store.delete_users(["u", "nobody"]) == [0, 0]
    assert store.append([Event("u", "new", 9, id="x"), Event("v", "d", 4, id="y")]) == [True, False]
    assert items(store, "u") == ["new"]


def shuffled_store(path: Path, *, users: int) -> SqliteStore:
    """Users whose events arrive interleaved in many calls, so that SQLite moves rows between pages."""
    store = SqliteStore(str(path))
    rng = random.Random(5)
    events = [
        Event(f"USER{user:03}.", f"ITEM{user:03}.{'y' * rng.choice([1, 30, 300])}", rng.getrandbits(48), id=f"{n}")
        for n, user in enumerate(rng.choices(range(users), k=users * 30))
    ]
    for start in range(0, len(events), 200):
        store.append(events[start : start + 200])
    return store


def traces(path: Path, users: range, ids: dict[int, list[bytes]]) -> list[bytes]:
    """The ids of these users and their items that are in the store's files."""
    files = b"".join(file.read_bytes() for file in path.parent.glob(f"{path.name}*"))
    words = [word for user in users for word in (b"USER%03d." % user, b"ITEM%03d." % user, *ids[user])]
    return [word for word in words if word in files]


def event_digests(path: Path) -> dict[int, list[bytes]]:
    with sqlite3.connect(path) as link:
        rows = link.execute("SELECT id, digest FROM events JOIN users ON number = user").fetchall()
    link.close()
    return {number: [key for user, key in rows if user == f"USER{number:03}."] for number in range(200)}


def test_no_byte_of_a_deleted_user_stays_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = shuffled_store(path, users=200)
    digests = event_digests(path)
    assert len(traces(path, range(200), digests)) == 200 * 2 + sum(map(len, digests.values()))
    for user in range(20):
        assert store.delete_users([f"USER{user:03}."]) == [len(digests[user])] != [0]
    assert traces(path, range(20), digests) == []
    assert (tmp_path / "store.db-wal").stat().st_size == 0
    assert len(traces(path, range(20, 200), digests)) == 180 * 2 + sum(len(digests[user]) for user in range(20, 200))
    store.close()


def test_a_concurrent_reader_delays_only_the_wiping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("segue.serving.store.sqlite.ERASE_MILLISECONDS", 50)
    path = tmp_path / "store.db"
    store = shuffled_store(path, users=5)
    digests = event_digests(path)
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM events").fetchone()
    assert store.delete_users(["USER003."]) == [len(digests[3])]
    assert items(store, "USER003.") == []
    reader.close()
    assert traces(path, range(3, 4), digests) != []
    store.close()
    assert traces(path, range(3, 4), digests) == []


# The active run


def test_active_changes_only_from_the_version_expected(store: HistoryStore) -> None:
    first = RunSelection("a", None, "a", 1)
    second = RunSelection("b", "a", "a", 2)
    assert store.active() is None
    assert not store.activate(second, expected=1)
    assert store.activate(first, expected=None)
    assert not store.activate(second, expected=None)
    assert not store.activate(second, expected=2)
    assert store.active() == first
    assert store.activate(second, expected=1)
    assert store.active() == second


def test_of_concurrent_activations_one_wins(store: HistoryStore) -> None:
    def raise_version(name: int) -> int:
        successes = 0
        while successes < 5:
            selection = store.active()
            version = 0 if selection is None else selection.version
            successes += store.activate(
                RunSelection(f"run {name}", None, "run", version + 1), expected=None if selection is None else version
            )
        return successes

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(raise_version, range(4))) == 20
    selection = store.active()
    assert selection is not None and selection.version == 20


# Added items


def test_an_item_is_there_once_with_its_newest_row(store: HistoryStore) -> None:
    tea, cup = AddedItem("tea", {"title": "Tea"}), AddedItem("cup", {"title": "Cup", "price": 2.5})
    assert store.items(0) == (0, [])
    assert store.add_items([tea, cup]) == 1
    assert store.items(0) == (1, [tea, cup])
    green = AddedItem("tea", {"title": "Green tea", "vector": [0.1, -2.0]})
    assert store.add_items([AddedItem("pot", {}), green, AddedItem("pot", {"title": "Pot"})]) == 2
    pot = AddedItem("pot", {"title": "Pot"})
    assert store.items(0) == (2, [green, cup, pot])  # in the order of their first arrival
    assert store.items(1) == (2, [green, pot])
    assert store.items(2) == (2, [])
    assert store.add_items([]) == 2
    assert is_empty(store)  # of events


def test_rows_of_items_come_back_exactly(url: str) -> None:
    items = [AddedItem(text, {text: text, "vector": [0.1 + 0.2, 1e-300, -0.0], "no": None}) for text in HOSTILE]
    with contextlib.closing(open_store(url)) as store:
        store.add_items(items)
    with contextlib.closing(open_store(url)) as again:
        assert again.items(0) == (1, items)


@pytest.mark.parametrize("item", [AddedItem("\ud800", {}), AddedItem("a", {"title": "\udfff"})])
def test_a_lone_surrogate_in_an_item_refuses_all_items(store: HistoryStore, item: AddedItem) -> None:
    with pytest.raises(InputError, match="half a character"):
        store.add_items([AddedItem("good", {}), item])
    assert store.items(0) == (0, [])


def test_a_reader_that_follows_the_versions_misses_no_item(store: HistoryStore) -> None:
    def add(name: int) -> None:
        for number in range(10):
            store.add_items([AddedItem(f"{name}.{number}", {"n": number}), AddedItem("shared", {"by": name})])

    rows: dict[str, dict[str, Any]] = {}
    version = 0
    with ThreadPoolExecutor(4) as threads:
        writers = [threads.submit(add, name) for name in range(4)]
        while True:
            complete = all(writer.done() for writer in writers)
            version, new = store.items(version)
            rows |= {item.id: item.row for item in new}
            if complete:
                break
    assert version == 40
    assert rows == {item.id: item.row for item in store.items(0)[1]}
    assert len(rows) == 41


# Several threads and processes


def test_a_call_is_visible_as_a_whole_or_not_at_all(store: HistoryStore) -> None:
    stop = threading.Event()

    def read() -> set[int]:
        lengths: set[int] = set()
        while not stop.is_set():
            lengths.add(len(store.newest(["u"], None)[0]))
        return lengths

    def write(name: str) -> None:
        for time_us in range(15):
            store.append([Event("u", name, time_us)] * 10)

    with ThreadPoolExecutor(4) as threads:
        readers = [threads.submit(read) for _ in range(2)]
        writers = [threads.submit(write, name) for name in "ab"]
        for writer in writers:
            writer.result()
        stop.set()
        lengths = set().union(*(reader.result() for reader in readers))
    assert len(items(store, "u")) == 300
    assert all(length % 10 == 0 for length in lengths)
    assert len(lengths) > 2


def test_deleting_during_writes_removes_exactly_the_counted_events(store: HistoryStore) -> None:
    def write(name: str) -> int:
        return sum(sum(store.append([Event("u", name, n), Event(f"{name}{n}", "x", n)])) for n in range(25))

    with ThreadPoolExecutor(3) as threads:
        writers = [threads.submit(write, name) for name in "ab"]
        n_removed = sum(store.delete_users(["u"])[0] for _ in range(10))
        assert [writer.result() for writer in writers] == [50, 50]
    assert n_removed + len(items(store, "u")) == 50
    assert all(store.newest([f"{name}{n}" for name in "ab" for n in range(25)], None))


def test_several_processes_may_create_a_store_at_once(url: str) -> None:
    start = threading.Barrier(6)

    def make(number: int) -> None:
        start.wait()
        store = open_store(url)
        store.append([Event("u", f"{number}", number)])
        store.close()

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(make, range(6)))
    store = open_store(url)
    assert items(store, "u") == list("012345")
    store.close()


WRITER = """
import json, sys
from segue.serving.store.store import Event, open_store
url, name = sys.argv[1:]
store = open_store(url)
print("ready", flush=True)
sys.stdin.readline()
answers = []
for n in range(40):
    own = [Event("u", f"{name}{n}", n), Event(f"{name} alone", f"{n}", n)]
    answers.append(store.append([*own, Event("u", "shared", n, id=f"{n}"), Event(f"new {n}", name, n)]))
store.close()
print(json.dumps(answers))
"""


def test_two_processes_append_without_loss_or_duplicates(url: str) -> None:
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, url, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for name in "ab"
    ]
    try:
        assert [writer.stdout.readline() for writer in writers if writer.stdout] == ["ready\n"] * 2
        for writer in writers:
            assert writer.stdin is not None
            writer.stdin.write("go\n")
            writer.stdin.flush()
        answers = [json.loads(writer.communicate(timeout=60)[0]) for writer in writers]
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    for own, alone, _, new in [answer for output in answers for answer in output]:
        assert own and alone and new
    assert [first[2] + second[2] for first, second in zip(*answers, strict=True)] == [1] * 40
    store = open_store(url)
    expected = sorted([f"{name}{n}" for name in "ab" for n in range(40)] + ["shared"] * 40)
    assert sorted(items(store, "u")) == expected
    assert [row[1] for row in store.newest(["u"], None)[0]] == [n for n in range(40) for _ in range(3)]
    assert items(store, "a alone") == [f"{n}" for n in range(40)]
    assert [sorted(items(store, f"new {n}")) for n in range(40)] == [["a", "b"]] * 40
    store.close()


# Filling from a data folder

DAY = 86_400_000_000
LOG = {  # user → items, a day each but for capitals, which have the time of the item before; sorted by bytes
    "": "ab",
    "007": "abcdef",
    "7": "d",
    "a\0b": "fBa",
    'who "is", she': "efCD",
    "x" * 3000: "a",
    "☕": "cb",
}
KINDS = ["", "view", "buy"]


@pytest.fixture(name="data")
def data_folder(tmp_path: Path) -> Data:
    """A data folder as `prepare` writes it, with LOG in it."""
    folder = tmp_path / "data"
    folder.mkdir()
    flat = [row for rows in history_of_log().values() for row in rows]
    np.save(folder / "offsets.npy", np.cumsum([0, *map(len, LOG.values())]))
    np.save(folder / "items.npy", np.array([ord(item) - ord("a") + 1 for item, *_ in flat], dtype=np.int32))
    np.save(folder / "times.npy", np.array([time for _, time, *_ in flat]))
    np.save(folder / "kinds.npy", np.array([KINDS.index(kind or "") for *_, kind, _ in flat], dtype=np.uint16))
    np.save(
        folder / "values.npy", np.array([np.nan if value is None else value for *_, value in flat], dtype=np.float32)
    )
    pl.DataFrame({"id": list("abcdef"), "count": 1}).write_parquet(folder / "items.parquet")
    pl.DataFrame({"id": list(LOG)}).write_parquet(folder / "users.parquet")
    write_manifest(folder, "data", {"split": {"kind": "last"}, "kinds": KINDS, "has_time": True, "counts": {}})
    return Data.open(folder)


def history_of_log() -> dict[str, list[Row]]:
    """The expected rows of a filled store."""
    histories: dict[str, list[Row]] = {}
    for user, log_items in LOG.items():
        day = 0
        histories[user] = []
        for position, item in enumerate(log_items):
            day += item.islower()
            histories[user].append(
                (item.lower(), day * DAY, KINDS[position % 3] or None, None if position % 2 else position + 0.5)
            )
    return histories


def rows_of(store: HistoryStore) -> dict[str, list[Row]]:
    return dict(zip(LOG, store.newest(list(LOG), None), strict=True))


@pytest.fixture
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("segue.serving.store.fill"), "CHUNK_EVENTS", 3)


def test_a_store_is_filled_once(store: HistoryStore, data: Data) -> None:
    calls: list[int] = []
    report = fill_store(store, data, calls.append)
    assert (report.users, report.events) == (7, 19)
    assert "19 events of 7 users" in report.message
    assert calls == [19]
    assert rows_of(store) == history_of_log()
    again = fill_store(store, data)
    assert (again.users, again.events) == (0, 0)
    assert "already" in again.message
    assert rows_of(store) == history_of_log()
    state = store.fill_state()
    assert state == FillState(data.digest, 7, finished=True)


@pytest.mark.usefixtures("_small_chunks")
def test_a_fill_stopped_after_every_chunk_ends_as_an_uninterrupted_one(url: str, data: Data) -> None:
    calls: list[int] = []

    def stop(events: int) -> None:
        calls.append(events)
        raise KeyboardInterrupt

    for _ in range(20):
        store = open_store(url)
        try:
            report = fill_store(store, data, stop)
        except KeyboardInterrupt:
            store.close()
        else:
            break
    assert calls == [2, 8, 9, 12, 16, 19]  # at most three events a chunk, but users stay whole
    assert "already" in report.message
    assert rows_of(store) == history_of_log()
    store.close()


@pytest.mark.usefixtures("_small_chunks")
def test_events_that_arrive_during_the_fill_are_kept(store: HistoryStore, data: Data) -> None:
    expected = history_of_log()
    first, later = [("007", 3), ("☕", 7)], [("☕", 6), ("", 5)]

    def live(events: int) -> None:
        if events == 2:  # before either of these users is in the store
            store.append([Event(user, f"live {n}", DAY, id=f"{n}") for user, n in first])
        elif events == 9:
            store.append([Event(user, f"live {n}", DAY, id=f"{n}") for user, n in later])

    fill_store(store, data, live)
    # Events with the same time are in order of arrival.
    expected["007"].insert(0, ("live 3", DAY, None, None))
    expected["☕"][:0] = [("live 7", DAY, None, None), ("live 6", DAY, None, None)]
    expected[""].insert(1, ("live 5", DAY, None, None))
    assert rows_of(store) == expected
    assert store.append([Event("007", "twice", 1, id="3")]) == [False]


@pytest.mark.usefixtures("_small_chunks")
def test_a_user_deleted_during_the_fill_stays_deleted(store: HistoryStore, data: Data) -> None:
    def forget(events: int) -> None:
        if events == 8:
            assert store.delete_users(["007", "☕"]) == [6, 0]
            store.append([Event("☕", "new life", 1)])

    fill_store(store, data, forget)
    assert rows_of(store) == history_of_log() | {"007": [], "☕": [("new life", 1, None, None)]}
    assert fill_store(store, data).events == 0
    assert items(store, "007") == []


@pytest.mark.usefixtures("_small_chunks")
def test_two_concurrent_fills_fill_the_store_once(url: str, data: Data) -> None:
    stores = [open_store(url) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        reports = list(threads.map(lambda store: fill_store(store, data), stores))
    assert sum(report.events for report in reports) == 19
    assert rows_of(stores[0]) == history_of_log()
    for store in stores:
        store.close()


def test_a_chunk_that_fails_writes_nothing(store: HistoryStore) -> None:
    state, next_state = FillState("d", 0, finished=False), FillState("d", 2, finished=False)
    assert store.fill([], state, expected=None)
    with pytest.raises(InputError):
        store.fill([("good", [("i", 1, None, None)]), ("\ud800", [("i", 1, None, None)])], next_state, expected=state)
    assert is_empty(store)
    assert store.fill_state() == state
    assert not store.fill([("good", [("i", 1, None, None)])], next_state, expected=next_state)
    assert is_empty(store)


def test_a_store_with_events_of_its_own_is_not_filled(store: HistoryStore, data: Data) -> None:
    store.append([Event("7", "own", 1)])
    report = fill_store(store, data)
    assert (report.events, report.users) == (0, 0)
    assert "left as it is" in report.message
    assert store.newest(["7", "007"], None) == [[("own", 1, None, None)], []]
    assert store.fill_state() is None


@pytest.mark.parametrize("finished", [True, False])
def test_a_store_filled_from_other_data_is_not_changed(store: HistoryStore, data: Data, finished: bool) -> None:
    other = FillState("another digest", 3, finished=finished)
    assert store.fill([("7", [("other", 1, None, None)])], other, expected=None)
    assert "other data" in fill_store(store, data).message
    assert store.newest(["7", "007"], None) == [[("other", 1, None, None)], []]
    assert store.fill_state() == other


# File errors


def error_of(url: str, *words: str) -> str:
    with pytest.raises(StoreError) as refusal:
        open_store(url)
    sentence = str(refusal.value)
    missing = [word for word in words if word not in sentence]
    assert not missing, sentence
    assert sentence.endswith((".", ").")) and "\n" not in sentence
    return sentence


def test_files_that_are_not_a_store_are_refused_unchanged(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("not a database " * 100)
    foreign = tmp_path / "foreign.db"
    with sqlite3.connect(foreign) as link:
        link.execute("CREATE TABLE theirs (x)")
    link.close()
    before = (text.read_bytes(), foreign.read_bytes())
    error_of(str(text), "notes.txt", "not a SQLite database")
    error_of(str(foreign), "foreign.db", "another program")
    error_of(str(tmp_path), "is a folder", "store.db")
    error_of(str(tmp_path / "no" / "store.db"), "does not exist", "make it")
    error_of("/proc/store.db", "/proc/store.db", "permissions")  # where not even root may write
    error_of("", "name of a file")
    error_of(":memory:", "name of a file")
    error_of("mysql://root:s3cr3t@host/db", "postgresql://", "mysql")
    assert (text.read_bytes(), foreign.read_bytes()) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["foreign.db", "notes.txt"]


def test_a_store_of_another_format_is_error_of(url: str) -> None:
    open_store(url).close()
    if url.startswith("postgresql"):
        with psycopg.connect(url) as link:
            link.execute("UPDATE segue_about SET value = '7' WHERE name = 'format'")
    else:
        with sqlite3.connect(url) as file:
            file.execute("PRAGMA user_version = 7")
        file.close()
    error_of(url, "format 7", "format 2")


def test_sqlite_urls_name_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url in ("sqlite:///here.db", f"sqlite:///{tmp_path}/there.db", "plain.db"):
        open_store(url).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here.db", "plain.db", "there.db"]


def test_a_full_disk_loses_no_stored_event(tmp_path: Path) -> None:
    store = SqliteStore(str(tmp_path / "store.db"))
    store.append([Event("u", "kept", 1)])
    store._writer.execute("PRAGMA max_page_count = 1")  # SQLite reports a full disk
    with pytest.raises(StoreError, match=r"disk is full.*Free some space"):
        store.append([Event("u", "y" * 100_000, 2)])
    assert items(store, "u") == ["kept"]
    store._writer.execute("PRAGMA max_page_count = 100000")
    assert store.append([Event("u", "next", 3)]) == [True]
    assert items(store, "u") == ["kept", "next"]
    store.close()


def test_a_locked_store_is_retried_and_then_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("segue.serving.store.sqlite.BUSY_SECONDS", 0.1)
    store = SqliteStore(str(tmp_path / "store.db"))
    other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match=r"busy.*Try again"):
        store.append([Event("u", "a", 1)])
    assert items(store, "u") == []
    other.close()
    assert store.append([Event("u", "a", 1)]) == [True]
    store.close()


def test_a_removed_file_is_an_error(tmp_path: Path) -> None:
    store = SqliteStore(str(tmp_path / "store.db"))
    store.check()
    (tmp_path / "store.db").unlink()
    with pytest.raises(StoreError, match="removed"):
        store.check()
    store.close()


# Server errors


def test_an_unreachable_server_is_named(postgres_server: PostgresServer, tmp_path: Path) -> None:
    error_of("postgresql://me@127.0.0.1:1/shop", "127.0.0.1:1/shop", "Connection refused", "Check the URL")
    error_of(f"postgres:///shop?host={tmp_path}", str(tmp_path), "cannot be reached")
    error_of(postgres_server.url("nowhere"), '"nowhere" does not exist')
    error_of("postgresql://nobody.invalid/shop", "nobody.invalid")


@pytest.mark.parametrize(
    "credentials",
    [
        "guarded:wr0ng",
        "guarded:wr@0ng",
        "guarded:wr/0ng",
        "guarded:wr:0ng",
        "guarded:12/wr0ng",
        "guarded:wr?0ng",
        "g:%",
    ],
)
def test_a_password_is_never_in_an_error(postgres_server: PostgresServer, credentials: str) -> None:
    sentence = error_of(postgres_server.url("postgres", user=credentials))
    assert "0ng" not in sentence and "wr" not in sentence.replace("write", ""), sentence


def test_a_wrong_password_is_reported(postgres_server: PostgresServer) -> None:
    error_of(postgres_server.url("postgres", user="guarded:wr0ng"), "password authentication failed", "guarded")
    error_of(postgres_server.url("postgres", user="guarded:"), "no password")


def test_without_the_extra_the_error_has_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "segue.serving.store.postgres")
    monkeypatch.setitem(sys.modules, "psycopg", None)
    error_of("postgresql://localhost/shop", "pip install 'segue[postgres]'")


def test_a_user_without_rights_gets_an_error(postgres_server: PostgresServer) -> None:
    error_of(postgres_server.url("postgres", user="guarded:s3cr3t"), "cannot be used", "permission denied")


def test_connections_are_restored_after_a_server_restart(postgres_server: PostgresServer, postgres_url: str) -> None:
    store = open_store(postgres_url)
    with ThreadPoolExecutor(4) as threads:  # so that the pool holds several connections, which the restart closes
        list(threads.map(lambda n: store.append([Event("u", f"{n}", n)]), range(12)))
    postgres_server.restart()
    assert store.append([Event("u", "after", 99)]) == [True]
    postgres_server.restart()
    assert items(store, "u") == [*map(str, range(12)), "after"]
    store.close()


def test_a_server_that_is_down_is_an_error_within_seconds_until_it_is_back(
    postgres_server: PostgresServer, postgres_url: str
) -> None:
    store = postgres_store.PostgresStore(postgres_url)
    store.append([Event("u", "before", 1)])
    store._pool.timeout = store._pool.reconnect_timeout = 0.5  # seconds, to keep the test short
    postgres_server.stop()
    try:
        calls: list[Callable[[], Any]] = [
            store.check,
            lambda: store.newest(["u"], 1),
            lambda: store.append([Event("u", "lost", 2)]),
        ]
        for call in calls:
            start = time.monotonic()
            with pytest.raises(StoreError, match="that the server is running"):
                call()
            assert time.monotonic() - start < 8
    finally:
        postgres_server.start()
    deadline = time.monotonic() + 20
    while True:
        try:
            store.check()
            break
        except StoreError:
            assert time.monotonic() < deadline
    assert items(store, "u") == ["before"]
    store.close()


def test_a_commit_whose_answer_is_lost_is_not_retried(postgres_url: str) -> None:
    store = open_store(postgres_url)
    with psycopg.connect(postgres_url, autocommit=True) as link:
        link.execute(
            "CREATE FUNCTION leave() RETURNS trigger LANGUAGE plpgsql AS "
            "'BEGIN PERFORM pg_terminate_backend(pg_backend_pid()) WHERE NEW.item = ''fatal''; RETURN NULL; END'"
        )
        link.execute(
            "CREATE CONSTRAINT TRIGGER leaving AFTER INSERT ON segue_events DEFERRABLE INITIALLY DEFERRED "
            "FOR EACH ROW EXECUTE FUNCTION leave()"
        )
    with pytest.raises(StoreError, match=r"not known.*Resend events with the same ids"):
        store.append([Event("u", "fatal", 1, id="x")])
    assert store.append([Event("u", "fine", 2)]) == [True]
    store.close()


def test_a_replica_paused_in_a_transaction_does_not_block_the_others(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = postgres_store.PostgresStore(postgres_url)
    monkeypatch.setattr(postgres_store, "IDLE_SECONDS", 1.0)
    paused = postgres_store.PostgresStore(postgres_url)
    in_transaction, resume = threading.Event(), threading.Event()
    transaction = paused._transaction

    def pausing(work: Any) -> Any:
        def slow(link: Any) -> Any:
            result = work(link)
            in_transaction.set()
            resume.wait(30)
            return result

        return transaction(slow)

    monkeypatch.setattr(paused, "_transaction", pausing)
    event = Event("u", "a", 1, id="sent to both")
    with ThreadPoolExecutor() as pool:
        late = pool.submit(paused.append, [event])
        try:
            assert in_transaction.wait(30)
            prompt = pool.submit(other.append, [event])
            assert prompt.result(10) == [True], "the client sent it again, to another replica"
        finally:
            resume.set()
        assert late.result(30) == [False], "the retry finds the event already stored"
    assert items(other, "u") == ["a"]
    paused.close()
    other.close()


def test_synchronous_commit_is_turned_on(postgres_url: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as link:
        link.execute("ALTER ROLE CURRENT_USER SET synchronous_commit = off")
        try:
            store = postgres_store.PostgresStore(postgres_url)
            assert store._read(lambda used: used.execute("SHOW synchronous_commit").fetchone()) == ("on",)
            store.close()
        finally:
            link.execute("ALTER ROLE CURRENT_USER RESET synchronous_commit")


def test_digests_are_distinct_and_of_one_size() -> None:
    assert {len(digest(text)) for text in HOSTILE} == {16}
    assert len({digest(text) for text in HOSTILE}) == len(HOSTILE)


def test_states_are_stored_as_json(store: HistoryStore) -> None:
    """A run's name is any name of a folder."""
    selection = RunSelection('a "b" ☕\\', "c'd", "é", 1)
    assert store.activate(selection, expected=None)
    assert msgspec.structs.asdict(store.active() or RunSelection("", None, "", 0)) == msgspec.structs.asdict(selection)
