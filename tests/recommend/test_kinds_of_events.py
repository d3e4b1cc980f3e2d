"""Kinds, values and times of a history in answers: from Python, a log, the service and an exported file."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl
import pytest
import torch
from litestar.testing import TestClient
from settings_tables import model_settings
from small_exports import assert_same_answers, exported, recommender_of
from small_service import small_service

import segue
from segue.data.dataset import Data
from segue.data.vocabulary import Kinds
from segue.models.build import build_model
from segue.models.items.tables import DataFacts
from segue.recommend.history import Entry, KnownItems, pack_histories, read_history
from segue.recommend.jobs.batch import recommend_users, user_history
from segue.recommend.recommender import Recommender
from segue.serving.engine.engine import history_of_rows
from segue.serving.http.app import create_app

KINDS = ("buy", "look", "save@home")
IDS = [f"i{number}" for number in range(1, 9)]
NOON = 1_767_268_800


@cache
def run(times: tuple[str, ...] = ("absolute", "since-newest", "since-previous")) -> Recommender:
    """An untrained run without zero weights, so that every input has an effect."""
    settings = model_settings(
        kind="pinnerformer", inputs="events", width=8, heads=2, depth=1, length=6, dropout=0.0, output="mlp",
        similarity="cosine", inputs__times=times,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(4)
    model = build_model(settings, len(IDS), generator=generator, facts=DataFacts(kinds=KINDS))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    model.items.clear_padding()
    return recommender_of(model, ids=IDS)


HISTORY: list[dict[str, Any]] = [
    {"item": "i3", "time": NOON, "kind": "look", "value": 2.0},
    {"item": "i1", "time": NOON + 60, "kind": "buy"},
    {"item": "i2", "time": NOON + 3600, "kind": "save@home", "value": 20.0},
]


def history_with(position: int, **entry: Any) -> list[dict[str, Any]]:
    return [{**one, **entry} if index == position else one for index, one in enumerate(HISTORY)]


def scores(history: list[Any]) -> list[float]:
    return [item.score for item in sorted(run().recommend(history, 8, keep_seen=True).items, key=lambda one: one.id)]


def test_kinds_become_the_numbers_of_the_run_and_unknown_kinds_one_more_number() -> None:
    assert Kinds(KINDS).numbers(["save@home", "buy", "sell", None, ""]).tolist() == [2, 0, 3, 3, 3]
    assert Kinds(("", "buy")).numbers([None, "", "buy", "look"]).tolist() == [0, 0, 1, 2]


def test_kinds_stay_with_their_events() -> None:
    """Even if entries are sorted by time and those of unknown items are left out."""
    mixed = [HISTORY[2], {"item": "new", "time": NOON + 61, "kind": "look"}, HISTORY[0], HISTORY[1]]
    names, counts, known = run().vocabulary, np.ones(9, dtype=np.int64), np.arange(9) > 0
    with_kinds = KnownItems(names, counts, known, kinds=Kinds(KINDS), timed=False)
    batch, unknown = pack_histories([read_history(mixed), read_history(["i1"])], with_kinds)
    assert batch.items.tolist() == [3, 1, 2, 1] and unknown == [["new"], []]
    assert batch.kinds is not None and batch.kinds.tolist() == [1, 0, 2, 3]
    without_kinds = KnownItems(names, counts, known, kinds=Kinds(()), timed=False)
    assert pack_histories([read_history(mixed)], without_kinds)[0].kinds is None


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("entry", [{"kind": "save@home"}, {"kind": None}, {"value": 7.0}, {"time": NOON + 30}])
def test_kind_value_and_time_of_an_event_change_the_scores(position: int, entry: dict[str, Any]) -> None:
    before, after = scores(HISTORY), scores(history_with(position, **entry))
    assert (before != after) == (HISTORY[position] | entry != HISTORY[position])


def test_an_unknown_kind_equals_no_kind() -> None:
    assert scores(history_with(1, kind="haggle")) == scores(history_with(1, kind=None))


def test_an_answer_without_times_is_marked_untimed() -> None:
    bare = [{name: entry[name] for name in entry if name != "time"} for entry in HISTORY]
    answer, timed = run().recommend(bare), run().recommend(HISTORY)
    assert answer.untimed is True and not timed.untimed
    assert segue_json(answer)["untimed"] is True and "untimed" not in segue_json(timed)
    assert run().explain(bare).untimed is True and not run().explain(HISTORY).untimed
    assert not run().recommend(["new"]).untimed, "by popularity"
    assert not run(()).recommend(bare).untimed, "a model without times as input"


def segue_json(answer: Any) -> dict[str, Any]:
    return msgspec.json.decode(msgspec.json.encode(answer), type=dict[str, Any])


@pytest.fixture(name="log")
def log_with_other_kinds(tmp_path: Path) -> Data:
    """A log with kinds buy, haggle, look and save@home, whose numbers differ from the run's."""
    rows = [("anna", *row) for row in ((one["item"], one["time"], one["kind"], one.get("value")) for one in HISTORY)]
    rows += [("bert", "i4", NOON + 5, "haggle", None), ("bert", "i5", NOON + 9, "look", 1.0)]
    table = pl.DataFrame(rows, schema=["user", "item", "time", "kind", "value"], orient="row")
    return segue.prepare(table, out=tmp_path / "log", min_user=1, min_item=1, kind="kind", value="value")


def test_a_log_with_other_numbers_is_translated_by_name(log: Data, tmp_path: Path) -> None:
    assert log.kinds == ["buy", "haggle", "look", "save@home"]
    (tmp_path / "users.csv").write_text("user\nanna\nbert\n")
    recommend_users(run(), log, tmp_path / "users.csv", tmp_path / "out", k=8, keep_seen=True)
    table = pl.read_parquet(tmp_path / "out" / "*.parquet")
    for user in ("anna", "bert"):
        answer_rows = table.filter(pl.col("user") == user).sort("rank")
        expected = run().recommend(user_history(log, user), 8, keep_seen=True)
        assert answer_rows["item"].to_list() == expected.ids
        np.testing.assert_allclose(answer_rows["score"], [item.score for item in expected.items], atol=1e-6)
    assert run().recommend(HISTORY, 8).ids == run().recommend(user_history(log, "anna"), 8).ids


def test_the_service_answers_from_the_kinds_and_values_in_its_store(tmp_path: Path) -> None:
    rows = [(event["item"], event["time"] * 10**6, event["kind"], event.get("value")) for event in HISTORY]
    assert asdict(history_of_rows(rows)) == asdict(read_history([Entry(**event) for event in HISTORY]))
    with TestClient(create_app(small_service(tmp_path / "events.sqlite", run()))) as client:
        for event in HISTORY:
            assert client.post("/events", json={"user": "anna", **event}).status_code == 200
        answer = client.get("/users/anna/recommendations").json()
        untimed = client.post("/recommendations", json={"history": ["i3", "i1"]}).json()
    assert [item["id"] for item in answer["items"]] == run().recommend(HISTORY).ids
    assert [item["score"] for item in answer["items"]] == pytest.approx(
        [item.score for item in run().recommend(HISTORY).items]
    )
    assert "untimed" not in answer and untimed["untimed"] is True


def test_an_exported_file_knows_kinds_and_times(tmp_path: Path) -> None:
    slim = exported(run(), tmp_path)
    assert slim.facts.kinds == list(KINDS) and {"kinds", "values", "times"} <= set(slim.inputs)
    histories: list[list[Any]] = [
        HISTORY,
        history_with(1, kind="haggle"),
        history_with(2, value=None),
        ["i3", "i1"],
        HISTORY[:1],
    ]
    answers = slim.recommend_many(histories, 8)
    assert_same_answers(answers, run().recommend_many(histories, 8))
    assert [bool(answer.untimed) for answer in answers] == [False, False, False, True, False]


def test_explanations_leave_one_event_out_and_have_attention() -> None:
    explanation = run().explain(HISTORY, "i5")
    whole = explanation.item.score
    for position, contribution in enumerate(explanation.contributions):
        rest = [entry for index, entry in enumerate(HISTORY) if index != position]
        without = run().explain(rest, "i5").item.score
        assert contribution.contribution == pytest.approx(whole - without, abs=1e-5)
    (layer,) = explanation.attention
    assert np.array(layer.weights).shape == (2, 3, 3)
    np.testing.assert_allclose(np.sum(layer.weights, axis=2), 1, atol=1e-5)
