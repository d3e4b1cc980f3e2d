"""A run with item codes: trained, resumed, continued, explained and exported."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from command_line import CommandLine
from planted_logs import cycle_log

import segue
from segue.index.codes import CodeIndex
from segue.models.checkpoint import load_model
from segue.models.items.coded import CodeTable
from segue.slim import SlimRecommender
from segue.training import item_codes as codes

CODED = ("model.items=codes", "model.items.parts=4", "model.items.values=8", "train.epochs=12", "train.patience=12")


@pytest.fixture(name="run", scope="module")
def coded_run(cycle_data: Path, quick_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("coded") / "run"
    segue.train(cycle_data, out=out, recipe=quick_recipe, overrides=[*CODED, "evaluate.seen=keep"])
    return out


def codes_of(run: Path) -> np.ndarray:
    items = load_model(run).items
    assert isinstance(items, CodeTable)
    return items.codes.numpy()


def test_recommendations_follow_the_scores(run: Path) -> None:
    recommender = segue.load(run)
    assert isinstance(recommender, segue.Recommender) and isinstance(recommender.index, CodeIndex)
    assert recommender.manifest["index"] == {"kind": "codes"} and recommender.manifest["codes"]["shared"] >= 0
    ids = recommender.vocabulary.table["id"].to_list()
    report = segue.evaluate(recommender)
    assert report.metrics["hit@10"] > 0.9 and report.metrics["ndcg@10"] > report.baselines["popularity"]["ndcg@10"]
    answer = recommender.recommend(ids[:4], k=3)
    assert answer.items[0].id == ids[4], "the next item of the cycle"
    similar = recommender.similar(ids[0], k=len(ids))
    assert len(similar.items) == len(ids) - 1 and all(-1.001 < item.score < 1.001 for item in similar.items)


def test_a_run_of_codes_is_explained_and_exported(run: Path, line: CommandLine) -> None:
    recommender = segue.load(run)
    assert isinstance(recommender, segue.Recommender)
    history = recommender.vocabulary.table["id"].to_list()[:3]
    assert line.answers("explain", run, "--history", ",".join(history))["contributions"]
    export = line.answers("export", run, "--onnx", "model.onnx")
    assert export["note"] is None, "search with codes is exact"
    slim = SlimRecommender.open(line.folder / "model.onnx")
    answers = [(item.id, round(item.score, 3)) for item in slim.recommend(history, k=5).items]
    assert answers == [(item.id, round(item.score, 3)) for item in recommender.recommend(history, k=5).items]


def test_no_item_can_be_added(run: Path, line: CommandLine) -> None:
    (line.folder / "new.csv").write_text("item,title\nnew,New\n")
    line.refuses("add-items", run, "new.csv", "--out", "more", says=("by codes, which come from the log",))


@pytest.mark.parametrize("assignment", ["clusters", "learned"])
def test_resumed_training_keeps_its_codes(
    assignment: str, cycle_data: Path, quick_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine may round the decomposition differently, so codes are not computed again."""
    monkeypatch.setattr(codes, "LEAST_STEPS", 20)
    overrides = [*CODED[:3], f"model.items.assignment={assignment}", "train.epochs=1"]
    segue.train(cycle_data, out=tmp_path / "run", recipe=quick_recipe, overrides=overrides, all_events=True)
    first = codes_of(tmp_path / "run")
    saved_codes = [np.load(tmp_path / "run" / name) for name in ("codes.npy", "codes-all.npy")]
    assert np.array_equal(first, saved_codes[1])
    monkeypatch.setattr(codes, "assign_item_codes", lambda *_, **__: pytest.fail("codes are assigned once"))
    segue.train(cycle_data, out=tmp_path / "run", resume=True, overrides=["train.epochs=2"], all_events=True)
    assert np.array_equal(codes_of(tmp_path / "run"), first)


def test_continuing_an_all_events_run_starts_from_the_codes_of_the_training_part(
    cycle_data: Path, quick_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The served model has codes from every event, which do not fit the weights of validation."""
    monkeypatch.setattr(codes, "LEAST_STEPS", 300)
    overrides = [*CODED, "model.items.assignment=learned", "evaluate.seen=keep"]
    run = segue.train(cycle_data, out=tmp_path / "run", recipe=quick_recipe, overrides=overrides, all_events=True)
    codes_of_training_part, codes_of_all_events = (
        np.load(tmp_path / "run" / name) for name in ("codes.npy", "codes-all.npy")
    )
    assert not np.array_equal(codes_of_training_part, codes_of_all_events) and np.array_equal(
        codes_of(tmp_path / "run"), codes_of_all_events
    )
    scores = [json.loads(line)["ndcg@10"] for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    monkeypatch.setattr(codes, "learned_codes", lambda *_, **__: pytest.fail("known items keep their codes"))
    segue.train(cycle_data, out=tmp_path / "next", from_run=run, overrides=["train.epochs=1"], all_events=True)
    first = json.loads((tmp_path / "next" / "history.jsonl").read_text().splitlines()[0])
    assert first["epoch"] == 0 and first["ndcg@10"] == pytest.approx(max(scores))
    assert np.array_equal(codes_of(tmp_path / "next"), codes_of_all_events)


def test_items_held_out_before_get_codes_in_the_next_run(quick_recipe: Path, tmp_path: Path) -> None:
    """Items of the test part alone have no codes until training has them: in the next run, or with --all."""
    late_events = [f"u{user:03},late{user % 6},{1_650_000_000 + user}" for user in range(60)]
    later_events = [
        f"u{user:03},i{step:02},{1_660_000_000 + 9 * user + step}" for user in range(60) for step in range(2)
    ]
    days = []
    for number, more in enumerate((late_events, [*late_events, *later_events])):
        (tmp_path / f"{number}.csv").write_text("\n".join([*cycle_log().splitlines(), *more]) + "\n")
        days.append(segue.prepare(tmp_path / f"{number}.csv", out=tmp_path / f"data{number}"))
    overrides = [*CODED[:3], "train.epochs=1"]
    first = segue.train(days[0], out=tmp_path / "first", recipe=quick_recipe, overrides=overrides)
    numbers = days[0].vocabulary.numbers([f"late{number}" for number in range(6)], unknown="error")
    assert not codes_of(tmp_path / "first")[numbers].any()
    all_events_run = segue.train(days[0], out=tmp_path / "all", from_run=first, all_events=True)
    second = segue.train(days[1], out=tmp_path / "second", from_run=first)
    for run, data in ((all_events_run, days[0]), (second, days[1])):
        numbers = data.vocabulary.numbers([f"late{number}" for number in range(6)], unknown="error")
        assert run.folder is not None
        assert len(np.unique(codes_of(run.folder)[numbers], axis=0)) > 3


def test_a_continued_run_keeps_item_codes(run: Path, tmp_path: Path) -> None:
    more = [f"u{user:03},a-new-one,{1_700_000_000 + step}" for user in range(9) for step in range(2)]
    (tmp_path / "log.csv").write_text("\n".join([*cycle_log().splitlines(), *more]) + "\n")
    data = segue.prepare(tmp_path / "log.csv", out=tmp_path / "data")
    segue.train(data, out=tmp_path / "today", from_run=run, overrides=["train.epochs=1"])
    recommender = segue.load(run)
    assert isinstance(recommender, segue.Recommender)
    before = recommender.vocabulary.table["id"].to_list()
    rows = data.vocabulary.numbers(before, unknown="error")
    assert len(data.vocabulary) == len(before) + 1
    assert np.array_equal(codes_of(tmp_path / "today")[rows], codes_of(run)[1:])
    lines = (tmp_path / "today" / "history.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["epoch"] == 0 and json.loads(lines[0])["hit@10"] > 0.8, (
        "the warm start has the learned weights"
    )
