"""A run whose items are codes: trained, resumed, continued, explained and exported like any other."""

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
    opened = segue.load(run)
    assert isinstance(opened, segue.Recommender) and isinstance(opened.index, CodeIndex)
    assert opened.manifest["index"] == {"kind": "codes"} and opened.manifest["codes"]["shared"] >= 0
    ids = opened.vocabulary.table["id"].to_list()
    report = segue.evaluate(opened)
    assert report.metrics["hit@10"] > 0.9 and report.metrics["ndcg@10"] > report.baselines["popularity"]["ndcg@10"]
    answer = opened.recommend(ids[:4], k=3)
    assert answer.items[0].id == ids[4], "what comes next in the cycle"
    alike = opened.similar(ids[0], k=len(ids))
    assert len(alike.items) == len(ids) - 1 and all(-1.001 < item.score < 1.001 for item in alike.items)


def test_it_is_explained_and_exported(run: Path, line: CommandLine) -> None:
    opened = segue.load(run)
    assert isinstance(opened, segue.Recommender)
    history = opened.vocabulary.table["id"].to_list()[:3]
    assert line.answers("explain", run, "--history", ",".join(history))["contributions"]
    exported = line.answers("export", run, "--onnx", "model.onnx")
    assert exported["note"] is None, "what codes answer is exact"
    slim = SlimRecommender.open(line.folder / "model.onnx")
    answers = [(item.id, round(item.score, 3)) for item in slim.recommend(history, k=5).items]
    assert answers == [(item.id, round(item.score, 3)) for item in opened.recommend(history, k=5).items]


def test_no_item_can_be_added(run: Path, line: CommandLine) -> None:
    (line.folder / "new.csv").write_text("item,title\nnew,New\n")
    line.refuses("add-items", run, "new.csv", "--out", "more", says=("by codes, which come from the log",))


@pytest.mark.parametrize("way", ["clusters", "learned"])
def test_resumed_training_keeps_its_codes(
    way: str, cycle_data: Path, quick_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine may round a decomposition differently, so codes are not computed again."""
    monkeypatch.setattr(codes, "LEAST_STEPS", 20)
    few = [*CODED[:3], f"model.items.assignment={way}", "train.epochs=1"]
    segue.train(cycle_data, out=tmp_path / "run", recipe=quick_recipe, overrides=few, all_events=True)
    first = codes_of(tmp_path / "run")
    kept = [np.load(tmp_path / "run" / name) for name in ("codes.npy", "codes-all.npy")]
    assert np.array_equal(first, kept[1])
    monkeypatch.setattr(codes, "assign_item_codes", lambda *_, **__: pytest.fail("codes are found once"))
    segue.train(cycle_data, out=tmp_path / "run", resume=True, overrides=["train.epochs=2"], all_events=True)
    assert np.array_equal(codes_of(tmp_path / "run"), first)


def test_continuing_an_all_events_run_starts_from_the_codes_of_the_training_part(
    cycle_data: Path, quick_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its served model has other codes, of every event, which the weights that chose the epochs do not fit."""
    monkeypatch.setattr(codes, "LEAST_STEPS", 300)
    learned = [*CODED, "model.items.assignment=learned", "evaluate.seen=keep"]
    run = segue.train(cycle_data, out=tmp_path / "run", recipe=quick_recipe, overrides=learned, all_events=True)
    chosen, every = (np.load(tmp_path / "run" / name) for name in ("codes.npy", "codes-all.npy"))
    assert not np.array_equal(chosen, every) and np.array_equal(codes_of(tmp_path / "run"), every)
    scores = [json.loads(line)["ndcg@10"] for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    monkeypatch.setattr(codes, "learned_codes", lambda *_, **__: pytest.fail("what is known keeps its codes"))
    segue.train(cycle_data, out=tmp_path / "next", from_run=run, overrides=["train.epochs=1"], all_events=True)
    first = json.loads((tmp_path / "next" / "history.jsonl").read_text().splitlines()[0])
    assert first["epoch"] == 0 and first["ndcg@10"] == pytest.approx(max(scores))
    assert np.array_equal(codes_of(tmp_path / "next"), every)


def test_items_held_out_before_get_codes_in_the_next_run(quick_recipe: Path, tmp_path: Path) -> None:
    """Items of the test part alone have no codes until they are trained on: in the next run, or with --all."""
    late = [f"u{user:03},late{user % 6},{1_650_000_000 + user}" for user in range(60)]
    later = [f"u{user:03},i{step:02},{1_660_000_000 + 9 * user + step}" for user in range(60) for step in range(2)]
    days = []
    for number, more in enumerate((late, [*late, *later])):
        (tmp_path / f"{number}.csv").write_text("\n".join([*cycle_log().splitlines(), *more]) + "\n")
        days.append(segue.prepare(tmp_path / f"{number}.csv", out=tmp_path / f"data{number}"))
    few = [*CODED[:3], "train.epochs=1"]
    first = segue.train(days[0], out=tmp_path / "first", recipe=quick_recipe, overrides=few)
    numbers = days[0].vocabulary.numbers([f"late{number}" for number in range(6)], unknown="error")
    assert not codes_of(tmp_path / "first")[numbers].any()
    again = segue.train(days[0], out=tmp_path / "all", from_run=first, all_events=True)
    second = segue.train(days[1], out=tmp_path / "second", from_run=first)
    for run, data in ((again, days[0]), (second, days[1])):
        numbers = data.vocabulary.numbers([f"late{number}" for number in range(6)], unknown="error")
        assert run.folder is not None
        assert len(np.unique(codes_of(run.folder)[numbers], axis=0)) > 3


def test_a_continued_run_keeps_item_codes(run: Path, tmp_path: Path) -> None:
    more = [f"u{user:03},a-new-one,{1_700_000_000 + step}" for user in range(9) for step in range(2)]
    (tmp_path / "log.csv").write_text("\n".join([*cycle_log().splitlines(), *more]) + "\n")
    data = segue.prepare(tmp_path / "log.csv", out=tmp_path / "data")
    segue.train(data, out=tmp_path / "today", from_run=run, overrides=["train.epochs=1"])
    opened = segue.load(run)
    assert isinstance(opened, segue.Recommender)
    before = opened.vocabulary.table["id"].to_list()
    rows = data.vocabulary.numbers(before, unknown="error")
    assert len(data.vocabulary) == len(before) + 1
    assert np.array_equal(codes_of(tmp_path / "today")[rows], codes_of(run)[1:])
    lines = (tmp_path / "today" / "history.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["epoch"] == 0 and json.loads(lines[0])["hit@10"] > 0.8, "what was learned is there"
