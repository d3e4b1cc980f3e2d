"""Live users: every event changes the next answer, rules hold exactly, a deleted user leaves nothing."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_service import (
    Client,
    assert_problem,
    guarded,
    ids,
    in_process_client,
    models_of,
    post_events,
    small_service,
    tiny_recommender,
)

from segue.errors import StoreError
from segue.recommend.recommender import Recommender
from segue.serving.engine import engine as engine_module
from segue.serving.engine.channel import LocalEngine
from segue.serving.http.bodies import MAX_EVENTS, MAX_ID
from segue.serving.http.keys import Keys
from segue.serving.service import Service

ITEMS = [f"i{number:02}" for number in range(14)]
UNTRAINED = ITEMS[12:]  # in the catalogue, without events
KINDS = [["red", "green", "blue"][number % 3] for number in range(14)]
IN_STOCK = [number % 4 != 0 for number in range(14)]
YEARS = [2000 + number // 5 for number in range(14)]
ANSWERABLE = ITEMS[:12]

users = (f"user-{number}" for number in itertools.count())


@pytest.fixture(name="recommender", scope="module")
def recommender_fixture() -> Recommender:
    return tiny_recommender(
        ITEMS, untrained=2, title=[f"Title {name}" for name in ITEMS], kind=KINDS, stock=IN_STOCK, year=YEARS
    )


@pytest.fixture(name="service", scope="module")
def service_fixture(recommender: Recommender, tmp_path_factory: pytest.TempPathFactory) -> Service:
    other = tiny_recommender(ITEMS, untrained=2, seed=4, seen="kept")
    return small_service(tmp_path_factory.mktemp("store") / "events.sqlite", recommender, other)


@pytest.fixture(name="client", scope="module")
def client_fixture(service: Service) -> Iterator[Client]:
    with in_process_client(guarded(service)) as client:
        yield client


def answer(client: Client, user: str, **options: Any) -> dict[str, Any]:
    response = client.get(f"/users/{quote(user, safe='')}/recommendations", params={"k": 100, **options})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def scores_in(body: dict[str, Any]) -> list[tuple[str, float]]:
    return [(item["id"], item["score"]) for item in body["items"]]


# --- events ---------------------------------------------------------------------------------------------------------


def test_every_event_changes_the_next_answer(client: Client, recommender: Recommender) -> None:
    user = next(users)
    before = answer(client, user)
    assert (before["fallback"], before["unknown"], before["model"]) == ("popularity", [], "first")
    assert [name for name, _ in scores_in(before)] == ANSWERABLE, "every trained item, the most frequent first"
    history: list[str] = []
    for item in ["i03", "i07", "i03", "i00", "i11", "i05", "i01"]:  # more than the model's length
        response = client.post("/events", json={"user": user, "item": item})
        assert response.json() == {"accepted": 1, "duplicates": 0, "unknown": []}
        history.append(item)
        after = answer(client, user)
        expected = recommender.recommend(history, k=100)
        assert [name for name, _ in scores_in(after)] == expected.ids
        assert [score for _, score in scores_in(after)] == pytest.approx(
            [item.score for item in expected.items], abs=1e-5
        )
        assert after["fallback"] is None
        assert scores_in(after) != scores_in(before)
        before = after
    assert {name for name, _ in scores_in(before)} == set(ANSWERABLE) - set(history), "seen items are excluded"


def test_a_late_event_is_sorted_by_time(client: Client) -> None:
    late, ordered = next(users), next(users)
    post_events(client, {"user": late, "item": "i02", "time": 2000}, {"user": late, "item": "i03", "time": 3000})
    post_events(client, {"user": late, "item": "i01", "time": 1000.5})
    for time_s, item in [(1000.5, "i01"), (2000, "i02"), (3000, "i03")]:
        post_events(client, {"user": ordered, "item": item, "time": time_s})
    assert answer(client, late) == answer(client, ordered)
    events = client.get(f"/users/{late}/history").json()["events"]
    assert [(event["item"], event["time"]) for event in events] == [
        ("i01", "1970-01-01T00:16:40.500000Z"),
        ("i02", "1970-01-01T00:33:20Z"),
        ("i03", "1970-01-01T00:50:00Z"),
    ]


def test_events_of_equal_time_keep_their_order_of_arrival(client: Client) -> None:
    user = next(users)
    for item in ("i05", "i01", "i09"):
        post_events(client, {"user": user, "item": item, "time": 7})
    post_events(client, *({"user": user, "item": item, "time": 7} for item in ("i03", "i00")))
    events = client.get(f"/users/{user}/history").json()["events"]
    assert [event["item"] for event in events] == ["i05", "i01", "i09", "i03", "i00"]


@pytest.mark.parametrize(
    ("time_sent", "time_stored"),
    [
        (0, "1970-01-01T00:00:00Z"),
        (1_700_000_000.25, "2023-11-14T22:13:20.250000Z"),
        (-5, "1969-12-31T23:59:55Z"),
        ("2026-01-31T12:00:00Z", "2026-01-31T12:00:00Z"),
        ("2026-01-31T12:00:00+02:00", "2026-01-31T10:00:00Z"),
        ("2026-01-31T12:00:00", "2026-01-31T12:00:00Z"),
        ("2026-01-31 12:00:00.000001Z", "2026-01-31T12:00:00.000001Z"),
        ("0001-01-01T00:00:00Z", "0001-01-01T00:00:00Z"),
        ("9999-12-31T23:59:59Z", "9999-12-31T23:59:59Z"),
    ],
)
def test_forms_of_time(client: Client, time_sent: object, time_stored: str) -> None:
    user = next(users)
    assert client.post("/events", json={"user": user, "item": "i01", "time": time_sent}).status_code == 200
    assert client.get(f"/users/{user}/history").json()["events"][0]["time"] == time_stored
    assert answer(client, user)["fallback"] is None


def test_an_event_without_a_time_gets_the_request_time(client: Client) -> None:
    user = next(users)
    before = datetime.now(UTC)
    post_events(client, {"user": user, "item": "i01"})
    event_time = datetime.fromisoformat(client.get(f"/users/{user}/history").json()["events"][0]["time"])
    assert before <= event_time <= datetime.now(UTC)


def test_an_event_id_is_stored_once(client: Client) -> None:
    user, other = next(users), next(users)
    first = {"user": user, "item": "i01", "id": "click 1"}
    assert post_events(client, first) == {"accepted": 1, "duplicates": 0, "unknown": []}
    again: list[dict[str, Any]] = [
        first,
        {"user": other, "item": "i02", "id": "click 1"},
        {"user": user, "item": "i02", "id": 2},
    ]
    assert post_events(client, *again, {"user": user, "item": "i02", "id": "2"}) == {
        "accepted": 1,
        "duplicates": 3,
        "unknown": [],
    }, "an id counts once for all users, and the number 2 is the text 2"
    assert [event["item"] for event in client.get(f"/users/{user}/history").json()["events"]] == ["i01", "i02"]
    assert client.get(f"/users/{other}/history").json()["events"] == []


def test_an_unknown_item_is_stored_and_reported(client: Client) -> None:
    user = next(users)
    report = post_events(client, *({"user": user, "item": item} for item in ("new", "i13", "new", 99)))
    assert report == {"accepted": 4, "duplicates": 0, "unknown": ["new", "i13", "99"]}
    nothing_known = answer(client, user)
    assert (nothing_known["fallback"], nothing_known["unknown"]) == ("popularity", ["new", "i13", "99"])
    assert [name for name, _ in scores_in(nothing_known)] == ANSWERABLE
    post_events(client, {"user": user, "item": "i01"})
    assert (answer(client, user)["fallback"], answer(client, user)["unknown"]) == (None, ["new", "i13", "99"])
    events = client.get(f"/users/{user}/history").json()["events"]
    assert [(event["item"], event["title"], event["known"]) for event in events] == [
        ("new", None, False),
        ("i13", "Title i13", False),
        ("new", None, False),
        ("99", None, False),
        ("i01", "Title i01", True),
    ]


def test_kind_and_value_come_back(client: Client) -> None:
    user = next(users)
    post_events(client, {"user": user, "item": "i01", "time": 0, "kind": "buy", "value": 2.5})
    (event,) = client.get(f"/users/{user}/history").json()["events"]
    assert event == {
        "item": "i01",
        "title": "Title i01",
        "time": "1970-01-01T00:00:00Z",
        "kind": "buy",
        "value": 2.5,
        "known": True,
    }


@pytest.mark.parametrize("value", [1e300, -1e300, 1e-300, 0, 2**53])
def test_any_number_is_a_value(client: Client, value: float) -> None:
    user = next(users)
    post_events(client, {"user": user, "item": "i01", "value": value})
    assert client.get(f"/users/{user}/history").json()["events"][0]["value"] == value
    assert answer(client, user)["fallback"] is None
    entry = {"item": "i01", "value": value}
    assert client.post("/recommendations", json={"history": [entry]}).status_code == 200


GOOD = {"user": "nobody", "item": "i01"}


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({}, "An event needs a user and an item"),
        ({"user": "nobody"}, "An event needs a user and an item"),
        ({"user": "nobody", "item": None}, "An event needs a user and an item"),
        ({**GOOD, "events": [GOOD]}, r"several events are sent as {events: \[...\]} alone"),
        ({"events": [GOOD], "time": 1}, r"several events are sent as {events: \[...\]} alone"),
        ({**GOOD, "colour": "red"}, "unknown field `colour`"),
        ({"user": "", "item": "i01"}, r"length >= 1 - at `\$.user`"),
        ({"user": "nobody", "item": ""}, r"length >= 1 - at `\$.item`"),
        ({**GOOD, "id": ""}, r"length >= 1 - at `\$.id`"),
        ({"user": "u" * (MAX_ID + 1), "item": "i01"}, r"length <= 1024 - at `\$.user`"),
        ({"user": "nobody", "item": "i" * (MAX_ID + 1)}, r"length <= 1024 - at `\$.item`"),
        ({**GOOD, "id": "e" * (MAX_ID + 1)}, r"length <= 1024 - at `\$.id`"),
        ({**GOOD, "kind": "k" * (MAX_ID + 1)}, r"length <= 1024 - at `\$.kind`"),
        ({"user": 10**MAX_ID, "item": "i01"}, "1024"),
        ({"user": 1.5, "item": "i01"}, r"got `float` - at `\$.user`"),
        ({"user": True, "item": "i01"}, r"got `bool` - at `\$.user`"),
        ({"user": ["nobody"], "item": "i01"}, r"got `array` - at `\$.user`"),
        ({**GOOD, "value": "2"}, r"got `str` - at `\$.value`"),
        ({**GOOD, "kind": 3}, r"got `int` - at `\$.kind`"),
        ({**GOOD, "time": "yesterday"}, "seconds since 1970 or ISO 8601"),
        ({**GOOD, "time": True}, r"got `bool` - at `\$.time`"),
        ({**GOOD, "time": 1_700_000_000_000}, "divide milliseconds by 1000"),
        ({**GOOD, "time": -99_999_999_999}, "not within the years 1 to 9999"),
        ({**GOOD, "time": "0001-01-01T00:00:00+14:00"}, "not within the years 1 to 9999"),
        ({"events": [GOOD] * (MAX_EVENTS + 1)}, "length <= 1000"),
        ({"events": [GOOD, {"user": "nobody"}]}, r"missing required field `item` - at `\$.events\[1\]`"),
        ({"events": [GOOD, {**GOOD, "time": 1e13}]}, "divide milliseconds by 1000"),
        ({"events": GOOD}, "Expected `array | null`, got `object`"),
    ],
)
def test_a_bad_event_refuses_its_whole_batch(client: Client, body: dict[str, Any], sentence: str) -> None:
    assert_problem(client.post("/events", json=body), 400, sentence)
    assert client.get("/users/nobody/history").json()["events"] == []


def test_the_largest_batch_and_the_longest_ids_are_stored(client: Client) -> None:
    user = "u" * MAX_ID
    event = {"user": user, "item": "i" * MAX_ID, "kind": "k" * MAX_ID, "id": "e" * MAX_ID}
    assert post_events(client, event)["accepted"] == 1
    assert client.get(f"/users/{user}/history").json()["events"][0]["kind"] == "k" * MAX_ID
    assert post_events(client, *({"user": next(users), "item": "i01"} for _ in range(MAX_EVENTS)))["accepted"] == 1000
    assert post_events(client) == {"accepted": 0, "duplicates": 0, "unknown": []}


# --- histories ------------------------------------------------------------------------------------------------------


def test_a_history_is_cut_to_the_newest(client: Client) -> None:
    user = next(users)
    post_events(client, *({"user": user, "item": f"x{number}", "time": number} for number in range(103)))

    def page(**options: int) -> tuple[list[str], bool]:
        body = client.get(f"/users/{user}/history", params=options).json()
        assert body["user"] == user
        return [event["item"] for event in body["events"]], body["more"]

    everything = [f"x{number}" for number in range(103)]
    assert page() == (everything[3:], True)
    assert page(limit=1) == (["x102"], True)
    assert page(limit=102) == (everything[1:], True)
    assert page(limit=103) == (everything, False)
    assert page(limit=10_000) == (everything, False)


def test_a_deleted_user_leaves_nothing(client: Client, service: Service) -> None:
    user, other = next(users), next(users)
    secret = f"forget-me-{user}"
    post_events(
        client,
        {"user": secret, "item": "i01", "id": f"event of {secret}"},
        {"user": secret, "item": f"item of {secret}"},
        {"user": other, "item": "i01"},
    )
    assert answer(client, secret)["fallback"] is None
    assert client.delete(f"/users/{secret}").json() == {"removed": 2}
    assert client.get(f"/users/{secret}/history").json() == {"user": secret, "events": [], "more": False}
    answer_after = answer(client, secret)
    assert (answer_after["fallback"], answer_after["unknown"], [name for name, _ in scores_in(answer_after)]) == (
        "popularity",
        [],
        ANSWERABLE,
    )
    explanation = client.post("/explanations", json={"user": secret}).json()
    assert (explanation["fallback"], explanation["contributions"]) == ("popularity", [])
    store = Path(service.store._path)  # type: ignore[attr-defined]  # a SQLite store; nothing else tells its files
    for file in store.parent.glob(f"{store.name}*"):
        assert secret.encode() not in file.read_bytes(), file.name
    assert client.delete(f"/users/{secret}").json() == {"removed": 0}
    assert answer(client, other)["fallback"] is None, "other users are not affected"
    assert post_events(client, {"user": secret, "item": "i02", "id": f"event of {secret}"})["accepted"] == 1
    assert client.get(f"/users/{secret}/history").json()["events"][0]["item"] == "i02"
    client.delete(f"/users/{secret}")


# --- rules ----------------------------------------------------------------------------------------------------------


def test_seen_items_follow_the_run_or_the_request(client: Client) -> None:
    user = next(users)
    post_events(client, *({"user": user, "item": item} for item in ("i03", "i04")))
    unseen = set(ANSWERABLE) - {"i03", "i04"}
    path = f"/users/{user}/recommendations?k=100"
    assert set(ids(client.get(path))) == unseen
    assert set(ids(client.get(f"{path}&keep_seen=true"))) == set(ANSWERABLE)
    assert set(ids(client.get(f"{path}&model=second"))) == set(ANSWERABLE), "the other run keeps seen items by default"
    assert set(ids(client.get(f"{path}&model=second&keep_seen=false"))) == unseen


def test_exclude_only_and_filters_of_a_user(client: Client) -> None:
    user = next(users)
    post_events(client, {"user": user, "item": "i03"})
    path = f"/users/{user}/recommendations?k=100"

    def answer_ids(query: str) -> set[str]:
        return set(ids(client.get(f"{path}&{query}")))

    assert answer_ids("exclude=i01&exclude=i02&exclude=ghost") == set(ANSWERABLE) - {"i01", "i02", "i03"}
    assert answer_ids("only=i01&only=i03&only=i13&only=ghost") == {"i01"}
    assert answer_ids("only=ghost") == set()
    assert answer_ids("where=kind:red") == {"i06", "i09", "i00"}
    assert answer_ids("where=kind:red&where=kind:green") == {"i06", "i09", "i00", "i01", "i04", "i07", "i10"}
    assert answer_ids("where=kind:red&where=stock:true") == {"i06", "i09"}
    assert answer_ids("where=year:2000&where=stock:false") == {"i00", "i04"}
    assert answer_ids("where=year:2000.0&only=i00&only=i05") == {"i00"}
    assert answer_ids("where=kind:purple") == set()
    response = client.get(f"{path}&where=colour:red")
    assert_problem(response, 400, "no column 'colour' to filter by; its columns are: kind, stock, year.")


def test_filters_of_a_request(client: Client) -> None:
    def answer_ids(**where: list[Any]) -> set[str]:
        return set(ids(client.post("/recommendations", json={"history": ["i03"], "k": 100, "where": where})))

    assert answer_ids(kind=["red"], stock=[True]) == {"i06", "i09"}
    assert answer_ids(year=[2000, "2001"], kind=["blue"]) == {"i02", "i05", "i08"}
    assert answer_ids(kind=[]) == set()
    assert answer_ids() == set(ANSWERABLE) - {"i03"}
    body = {"history": ["i03"], "where": {"colour": ["red"]}}
    assert_problem(client.post("/recommendations", json=body), 400, "no column 'colour' to filter by")
    for where in ({"kind": "red"}, {"kind": [None]}, ["kind:red"]):
        body = {"history": ["i03"], "where": where}
        assert_problem(client.post("/recommendations", json=body), 400, "got")


anything = st.sampled_from([*ITEMS, "ghost", "new"])
rules = st.fixed_dictionaries(
    {},
    optional={
        "exclude": st.lists(anything, max_size=14),
        "only": st.lists(anything, max_size=14),
        "keep_seen": st.booleans(),
        "where": st.fixed_dictionaries(
            {},
            optional={
                "kind": st.lists(st.sampled_from([*KINDS, "purple"]), max_size=2),
                "stock": st.lists(st.booleans(), max_size=2),
                "year": st.lists(st.sampled_from(YEARS), max_size=2),
            },
        ),
    },
)


@settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(history=st.lists(anything, max_size=9), limits=rules, k=st.integers(1, 14))
def test_rules_hold_exactly_and_leave_k_answers_if_k_remain(
    client: Client, recommender: Recommender, history: list[str], limits: dict[str, Any], k: int
) -> None:
    """The whole catalogue is ranked without any rule; the rules are then applied one by one, in plain Python."""
    ranking = recommender.recommend(history, k=100, keep_seen=True)
    assert sorted(ranking.ids) == ANSWERABLE

    def is_allowed(item: str) -> bool:
        facts: dict[str, list[Any]] = {"kind": KINDS, "stock": IN_STOCK, "year": YEARS}
        row = ITEMS.index(item)
        return (
            (limits.get("keep_seen", False) or item not in history)
            and item not in limits.get("exclude", ())
            and ("only" not in limits or item in limits["only"])
            and all(facts[column][row] in values for column, values in limits.get("where", {}).items())
        )

    expected = [item for item in ranking.ids if is_allowed(item)][:k]
    assert ids(client.post("/recommendations", json={"history": history, "k": k, **limits})) == expected
    user = next(users)
    post_events(client, *({"user": user, "item": item, "time": time_us} for time_us, item in enumerate(history)))
    query: dict[str, Any] = {
        "k": k,
        **{name: limits[name] for name in ("exclude", "only", "keep_seen") if name in limits},
    }
    where = limits.get("where", {})
    query["where"] = [f"{column}:{str(value).lower()}" for column, values in where.items() for value in values]
    if all(where.values()) and limits.get("only") != []:  # an empty list has no form in a URL query
        assert ids(client.get(f"/users/{user}/recommendations", params=query)) == expected


def test_every_item_of_a_long_history_counts_as_seen(client: Client) -> None:
    """Also items older than the events read at first."""
    user = next(users)
    newest = [{"user": user, "item": "i02", "time": number} for number in range(1, 1001)]
    post_events(client, *newest)
    post_events(client, {"user": user, "item": "i07", "time": 0})
    assert {name for name, _ in scores_in(answer(client, user))} == set(ANSWERABLE) - {"i02", "i07"}


@pytest.mark.parametrize("events", [2, 3, 4, 8])
def test_around_the_number_of_events_read_at_first(
    client: Client, events: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "FIRST_READ", 3)
    user = next(users)
    post_events(client, *({"user": user, "item": item} for item in ITEMS[:events]))
    assert {name for name, _ in scores_in(answer(client, user))} == set(ANSWERABLE) - set(ITEMS[:events])
    assert len(client.post("/explanations", json={"user": user}).json()["contributions"]) == events


def test_an_explanation_of_a_user_uses_the_stored_history(client: Client) -> None:
    user = next(users)
    history = ["i03", "ghost", "i04"]
    post_events(client, *({"user": user, "item": item} for item in history))
    one = client.post("/explanations", json={"user": user}).json()
    assert one == client.post("/explanations", json={"history": history}).json()
    assert one["item"]["id"] == scores_in(answer(client, user))[0][0]
    other = client.post("/explanations", json={"user": user, "model": "second"}).json()
    assert other["item"]["score"] != one["item"]["score"]


# --- two models, the catalogue --------------------------------------------------------------------------------------


def test_two_models_side_by_side(client: Client, service: Service) -> None:
    user = next(users)
    post_events(client, {"user": user, "item": "i03"})
    first_answer, second_answer = answer(client, user), answer(client, user, model="second")
    assert (first_answer["model"], second_answer["model"]) == ("first", "second")
    assert answer(client, user, model="first") == first_answer
    assert scores_in(first_answer) != scores_in(second_answer)
    body = {"history": ["i03"], "k": 100, "model": "second"}
    assert client.post("/recommendations", json=body).json()["items"] == second_answer["items"]
    assert client.get("/items/i03/similar?model=second").json()["model"] == "second"
    assert ids(client.get("/items/i03/similar?model=second")) != ids(client.get("/items/i03/similar"))
    for response in (
        client.get(f"/users/{user}/recommendations?model=third"),
        client.post("/recommendations", json={**body, "model": "third"}),
        client.get("/items/i03/similar?model=third"),
        client.post("/explanations", json={"user": user, "model": "third"}),
    ):
        assert_problem(response, 404, "No model called 'third' is being served; there is: first, second.")
    status = client.get("/model").json()
    assert (status["active"], status["previous"], status["switchable"]) == ("first", None, [])
    assert [card["name"] for card in status["models"]] == ["first", "second"]
    assert status["models"][0] == {
        "name": "first",
        "seen": "excluded",
        "items": 14,
        "length": 5,
        "attention": True,
        "plan": False,
        "columns": ["kind", "stock", "year"],
        "added": 0,
        "left_out": 0,
        "left_out_because": None,
        "manifest": {"data": {}, "recipe": ""},
        "report": None,
    }
    assert_problem(client.put("/model", json={"run": "second"}), 409, "start it with --runs FOLDER")
    assert_problem(client.post("/model/rollback"), 409, "no run to go back to")
    assert models_of(service).active.name == "first"


def test_the_catalogue_is_searched(client: Client) -> None:
    first = client.get("/items?limit=1").json()["items"][0]
    assert first == {
        "id": "i00",
        "title": "Title i00",
        "count": 12,
        "details": {"kind": "red", "stock": False, "year": 2000},
    }
    assert ids(client.get("/items"))[:3] == ["i00", "i01", "i02"]
    assert ids(client.get("/items?search=I1")) == ["i10", "i11", "i12", "i13"]
    assert ids(client.get("/items?search=title i05")) == ["i05"]
    assert ids(client.get("/items?search=i0&limit=2")) == ["i00", "i01"]
    assert ids(client.get("/items?search=.*")) == []


# --- failures and roles ---------------------------------------------------------------------------------------------


def test_a_failing_store_is_503_without_details(
    client: Client, service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise StoreError("The store /secret/place cannot be used.") from sqlite3.OperationalError("secret")

    for name in ("append", "newest", "delete_users", "check"):
        monkeypatch.setattr(service.store, name, broken)
    for response in (
        client.post("/events", json={"user": "u", "item": "i01"}),
        client.get("/users/u/recommendations"),
        client.get("/users/u/history"),
        client.delete("/users/u"),
        client.post("/explanations", json={"user": "u"}),
        client.get("/health/ready"),
    ):
        assert_problem(response, 503, "The store of histories is not available at the moment")
        assert response.headers["retry-after"] == "5"
        assert "secret" not in response.text
    assert client.get("/health/live").status_code == 200
    assert client.post("/recommendations", json={"history": ["i01"]}).status_code == 200, "no store needed"
    assert client.get("/items").status_code == 200
    assert "/secret/place" in caplog.text
    monkeypatch.undo()
    assert client.get("/health/ready").status_code == 200
    metrics = client.get("/metrics").text
    assert 'segue_unavailable_total{reason="store"} 6.0' in metrics
    assert "segue_store_errors_total 6.0" in metrics


def test_metrics_count_requests_and_events(client: Client) -> None:
    def count(name: str) -> float:
        lines = client.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    names = (
        'segue_events_total{outcome="accepted"}',
        'segue_events_total{outcome="duplicate"}',
        'segue_answers_total{fallback="popularity"}',
        'segue_answers_total{fallback="none"}',
        'segue_requests_total{method="POST",route="/events",status="200"}',
    )
    before = [count(name) for name in names]
    user = next(users)
    answer(client, user)
    event = {"user": user, "item": "i01", "id": f"event of {user}"}
    post_events(client, event, event)
    answer(client, user)
    assert [count(name) - earlier for name, earlier in zip(names, before, strict=True)] == [1, 1, 1, 1, 1]
    text = client.get("/metrics").text
    assert user not in text
    assert 'segue_model_info{digest="",name="first"} 1.0' in text


KEYS = {"read": "reader-0123456789", "write": "writer-0123456789", "admin": "admins-0123456789"}
GUARDED: list[tuple[str, str, str, Any]] = [
    ("read", "GET", "/users/kept/recommendations", None),
    ("read", "GET", "/users/kept/history", None),
    ("read", "GET", "/items", None),
    ("read", "GET", "/items/i01/similar", None),
    ("read", "GET", "/model", None),
    ("read", "GET", "/metrics", None),
    ("read", "POST", "/recommendations", {"history": ["i01"]}),
    ("read", "POST", "/explanations", {"history": ["i01"]}),
    ("write", "POST", "/events", {"user": "kept", "item": "i02", "id": "again"}),
    ("write", "DELETE", "/users/kept", None),
    ("admin", "PUT", "/model", {"run": "first"}),
    ("admin", "POST", "/model/rollback", None),
]


def test_keys_give_their_role_and_a_refusal_changes_nothing(recommender: Recommender, tmp_path: Path) -> None:
    service = small_service(tmp_path / "s", recommender)
    keys = Keys({"read": [KEYS["read"]], "write": [KEYS["write"]], "admin": [KEYS["admin"]]})
    senders: list[str | None] = [None, "nobody-0123456789", *KEYS.values()]
    with in_process_client(guarded(service, keys=keys)) as client:

        def ask(key: str | None, method: str, path: str, body: Any = None) -> Any:
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            return client.request(method, path, json=body, headers=headers)

        event = {"user": "kept", "item": "i01"}
        assert ask(KEYS["write"], "POST", "/events", event).status_code == 200
        history = ask(KEYS["read"], "GET", "/users/kept/history").json()
        model = ask(KEYS["read"], "GET", "/model").json()
        for role, method, path, body in GUARDED:
            for key in senders:
                if key == KEYS[role]:
                    continue
                response = ask(key, method, path, body)
                known = key in KEYS.values()
                assert_problem(response, 403 if known else 401, f"role {role}" if known else "needs a key")
                assert ("www-authenticate" in response.headers) is not known
        assert ask(KEYS["read"], "GET", "/users/kept/history").json() == history, "no refusal changed the history"
        assert ask(KEYS["read"], "GET", "/model").json() == model
        for role, method, path, body in GUARDED:
            status = ask(KEYS[role], method, path, body).status_code
            assert status == (409 if role == "admin" else 200), "this service has fixed runs"
        for path in ("/", "/schema", "/schema/openapi.json", "/page/page.css", "/health/live", "/health/ready"):
            assert ask(None, "GET", path).status_code == 200, path


def test_an_explanation_is_for_now_unless_a_time_is_given(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like answers: with another time, a model with times would explain another answer."""
    query_times: list[Any] = []
    explain = Recommender.explain

    def recording(self: Recommender, *arguments: Any, now: Any = None, **rest: Any) -> Any:
        query_times.append(now)
        return explain(self, *arguments, now=now, **rest)

    monkeypatch.setattr(Recommender, "explain", recording)
    for option in ({}, {"now": 1000}):
        assert client.post("/explanations", json={"history": ["i01"], **option}).status_code == 200
    assert abs(query_times[0] - time.time()) < 60 and query_times[1] == 1000


def test_events_do_not_wait_for_a_restarting_engine(
    client: Client, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are stored without the engine, and later requests would queue behind them."""
    user = next(users)

    class Restarting(LocalEngine):
        async def call(self, channel: Any, method: str, *arguments: Any) -> Any:
            if method == "unknown":
                await asyncio.sleep(60)
            return await super().call(channel, method, *arguments)

    local = service._engine
    assert isinstance(local, LocalEngine)
    monkeypatch.setattr("segue.serving.service.UNKNOWN_DEADLINE", 0.05)
    with monkeypatch.context() as patch:
        patch.setattr(service, "_engine", Restarting(local.engine))
        assert post_events(client, {"user": user, "item": "not met before"})["accepted"] == 1
    assert [event["item"] for event in client.get(f"/users/{user}/history").json()["events"]] == ["not met before"]
