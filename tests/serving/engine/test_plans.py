"""POST /plans: the recommender's plan, its bounds, and a sentence from a model that cannot plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from small_service import Client, assert_problem, ids, in_process_client, post_events, small_service, tiny_recommender

from segue.recommend.recommender import Recommender
from segue.serving.http.app import create_app
from segue.serving.http.bodies import MAX_BEAM, MAX_PLAN

ITEMS = ["007", "7", "a,b", "x/y/../z", "☕🫖", "é+&="]


@pytest.fixture(name="recommender", scope="module")
def planning_recommender() -> Recommender:
    return tiny_recommender(
        ITEMS, plans=True, title=[f"<b>{name}</b>" for name in ITEMS], room=["hall", "kitchen"] * 3, seen="excluded"
    )


@pytest.fixture(name="client", scope="module")
def two_models(recommender: Recommender, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """The first plans, the second does not."""
    store = tmp_path_factory.mktemp("store") / "events.sqlite"
    with in_process_client(create_app(small_service(store, recommender, tiny_recommender(ITEMS)))) as client:
        yield client


def post_plan(client: Client, **body: Any) -> list[str]:
    return ids(client.post("/plans", json={"history": ["007"], **body}))


def test_the_service_returns_the_plan_of_the_recommender(client: Client, recommender: Recommender) -> None:
    answer = client.post("/plans", json={"history": ["007", "nobody", {"item": "7"}], "n": 3}).json()
    expected = msgspec.to_builtins(recommender.plan(["007", "nobody", "7"], 3))
    assert len(expected["items"]) == 3 and expected["unknown"] == ["nobody"]
    assert answer == {**expected, "model": "first"}


def test_options_reach_the_recommender(client: Client, recommender: Recommender) -> None:
    assert post_plan(client) == recommender.plan(["007"], 5).ids
    assert post_plan(client, n=50) == recommender.plan(["007"], 50).ids
    assert set(post_plan(client, n=50)) == set(ITEMS) - {"007"}
    assert set(post_plan(client, n=50, keep_seen=True)) == set(ITEMS)
    assert set(post_plan(client, n=50, exclude=["a,b", 7])) == set(ITEMS) - {"007", "a,b", "7"}
    assert set(post_plan(client, only=["7", "☕🫖", "nobody"])) == {"7", "☕🫖"}
    assert set(post_plan(client, where={"room": ["kitchen"]})) == {"7", "x/y/../z", "é+&="}
    assert post_plan(client, where={"room": ["kitchen"]}, only=["7", "a,b"]) == ["7"]
    assert post_plan(client, only=["7"], repeats=True, n=3) == ["7"] * 3
    assert post_plan(client, now="2026-01-01T00:00:00Z", beam=1) == recommender.plan(["007"], 5, beam=1).ids


def test_the_plan_of_a_user_uses_the_stored_events(client: Client, recommender: Recommender) -> None:
    post_events(client, {"user": "u", "item": "7", "time": 100}, {"user": "u", "item": "a,b", "time": 200})
    assert ids(client.post("/plans", json={"user": "u", "n": 2})) == recommender.plan(["7", "a,b"], 2).ids
    answer = client.post("/plans", json={"user": "nobody", "n": 2}).json()
    assert (answer["fallback"], [item["id"] for item in answer["items"]]) == ("popularity", ITEMS[:2])


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        ({"history": ["7"], "model": "second"}, 400, "cannot plan.*seq2seq"),
        ({"history": ["7"], "model": "third"}, 404, "No model called 'third'"),
        ({}, 400, "either a history or a user"),
        ({"history": ["7"], "user": "u"}, 400, "either a history or a user"),
        ({"history": ["7"], "n": 0}, 400, ">= 1"),
        ({"history": ["7"], "n": MAX_PLAN + 1}, 400, f"<= {MAX_PLAN}"),
        ({"history": ["7"], "beam": 0}, 400, ">= 1"),
        ({"history": ["7"], "beam": MAX_BEAM + 1}, 400, f"<= {MAX_BEAM}"),
        ({"history": ["7"], "k": 3}, 400, "k"),
        ({"history": ["7"], "where": {"colour": ["red"]}}, 400, "no column 'colour'"),
        ({"history": ["7"], "now": 1e300}, 400, "no date"),
    ],
)
def test_invalid_plans_are_refused(client: Client, body: dict[str, Any], status: int, sentence: str) -> None:
    assert_problem(client.post("/plans", json=body), status, sentence)


def test_the_model_card_reports_whether_it_plans(client: Client) -> None:
    assert [model["plan"] for model in client.get("/model").json()["models"]] == [True, False]
