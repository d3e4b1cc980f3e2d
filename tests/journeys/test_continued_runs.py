"""`segue train --from`: a run continued on a longer log."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from command_line import CommandLine
from planted_logs import cycle_log

import segue
from segue.models.checkpoint import load_model
from segue.recommend.jobs.embed import run_digest
from segue.training.loop import TrainingProgress

LONG = ("--set", "train.epochs=8", "--set", "train.patience=8")


def history_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]


def write_longer_log(folder: Path) -> Path:
    """Write the cycle log with one more item, whose number precedes all others."""
    first = cycle_log().splitlines()
    more = [f"u{user:03},a-new-one,{1_700_000_000 + step}" for user in range(9) for step in range(2)]
    (folder / "grown.csv").write_text("\n".join([*first, *more]) + "\n")
    return folder / "grown.csv"


@pytest.fixture(name="data", scope="module")
def longer_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grown")
    segue.prepare(write_longer_log(folder), out=folder / "data")
    return folder / "data"


@pytest.fixture(name="yesterday", scope="module")
def trained_run(cycle_data: Path, quick_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("yesterday") / "run"
    segue.train(cycle_data, out=out, recipe=quick_recipe, overrides=[LONG[1], LONG[3], "evaluate.seen=keep"])
    return out


def test_a_continued_run_starts_from_the_weights_of_the_last_one(
    line: CommandLine, yesterday: Path, data: Path
) -> None:
    result = line.answers("train", data, "--out", "today", "--from", yesterday, "--set", "train.epochs=2")
    old_run = segue.load(yesterday)
    assert isinstance(old_run, segue.Recommender)
    assert result["from"] == {"folder": str(yesterday), "digest": run_digest(old_run)}
    assert result["recipe"] == old_run.manifest["recipe"]
    today = line.folder / "today"
    line.does("train", data, "--out", "anew", "--recipe", old_run.manifest["recipe"], *("--set", "train.epochs=2"))
    warm, cold = history_of(today), history_of(line.folder / "anew")
    assert [record["epoch"] for record in warm] == [0, 1, 2]
    assert set(warm[0]) == {"epoch", "ndcg@10", "hit@10"}
    assert warm[0]["ndcg@10"] > cold[-1]["ndcg@10"], "warm start begins above the score of training from scratch"
    # The initial weights are yesterday's, with each item's row at its new number.
    (line.folder / "start").mkdir()
    shutil.copy(today / "settings.toml", line.folder / "start")
    shutil.copy(today / "warm-start.safetensors", line.folder / "start" / "weights.safetensors")
    initial_model, ids = load_model(line.folder / "start"), pl.read_parquet(today / "items.parquet")["id"].to_list()
    assert ids[0] == "a-new-one"
    old = old_run.vocabulary.numbers(ids[1:], unknown="error")
    assert np.array_equal(initial_model.item_vectors().numpy()[2:], old_run.model.item_vectors().numpy()[old])


def test_continuing_on_the_same_data_starts_with_the_same_score(
    yesterday: Path, cycle_data: Path, tmp_path: Path
) -> None:
    segue.train(cycle_data, out=tmp_path / "run", from_run=yesterday, overrides=["train.epochs=1"])
    best = max(record["ndcg@10"] for record in history_of(yesterday))
    assert history_of(tmp_path / "run")[0]["ndcg@10"] == best


class Stopped(KeyboardInterrupt):
    """Ctrl-C, raised by these tests alone."""


@pytest.mark.parametrize("epoch", [1, 2])
def test_resume_does_not_need_the_from_run(yesterday: Path, data: Path, tmp_path: Path, epoch: int) -> None:
    def stop(step: TrainingProgress) -> None:
        if step.epoch == epoch and step.scores is None:
            raise Stopped

    changes = ["train.epochs=2", "train.patience=2"]
    whole = segue.train(data, out=tmp_path / "whole", from_run=yesterday, overrides=changes)
    shutil.copytree(yesterday, tmp_path / "old")
    with pytest.raises(Stopped):
        segue.train(data, out=tmp_path / "run", from_run=tmp_path / "old", overrides=changes, progress=stop)
    shutil.rmtree(tmp_path / "old")
    resumed = segue.train(data, out=tmp_path / "run", resume=True)
    for name in ("weights.safetensors", "history.jsonl", "warm-start.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert resumed.manifest["from"] == {**whole.manifest["from"], "folder": str(tmp_path / "old")}


def test_a_continued_run_keeps_its_text_encoder(
    data: Path, cycle_data: Path, quick_recipe: Path, tmp_path: Path
) -> None:
    """Another catalogue would give another text encoder: --from keeps the old run's, also with --resume."""
    days = {"old": cycle_data, "new": data}
    for day, log in days.items():
        ids = segue.Data.open(log).vocabulary.table["id"].to_list()
        titles = [f"tea {name} {'pot' if day == 'old' else 'kettle with a saucer'}" for name in ids]
        pl.DataFrame({"id": ids, "title": titles}).write_csv(tmp_path / f"{day}.csv")
        source = log.parent / ("log.csv" if day == "old" else "grown.csv")
        segue.prepare(source, out=tmp_path / day, items=tmp_path / f"{day}.csv")
    changes = [
        "model.items=ids+vectors",
        'model.items.texts=["title"]',
        "model.items.text_encoder.width=6",
        "train.epochs=2",
    ]
    old = segue.train(tmp_path / "old", out=tmp_path / "first", recipe=quick_recipe, overrides=changes)

    def stop(_: TrainingProgress) -> None:
        raise Stopped

    with pytest.raises(Stopped):
        segue.train(tmp_path / "new", out=tmp_path / "run", from_run=old, progress=stop)
    resumed = segue.train(tmp_path / "new", out=tmp_path / "run", resume=True)
    whole = segue.train(tmp_path / "new", out=tmp_path / "whole", from_run=old)
    assert np.array_equal(resumed.embed([["i01", "i02"]]), whole.embed([["i01", "i02"]]))
    for model in (resumed.model, whole.model):
        for name in ("terms", "directions"):
            new_array, old_array = (getattr(network.items.texts, name) for network in (model, old.model))
            assert np.array_equal(new_array.numpy(), old_array.numpy())


def test_an_all_events_run_is_continued_without_leaking_the_test_part(
    yesterday: Path, cycle_data: Path, data: Path, tmp_path: Path
) -> None:
    """The weights of a run on every event saw the new test part: validation starts from the weights that did not."""
    shutil.copytree(yesterday, tmp_path / "all")
    segue.train(cycle_data, out=tmp_path / "all", resume=True, all_events=True)
    short = ["train.epochs=1"]
    segue.train(data, out=tmp_path / "plain", from_run=yesterday, overrides=short)
    run = segue.train(data, out=tmp_path / "run", from_run=tmp_path / "all", overrides=short, all_events=True)
    assert history_of(tmp_path / "run")[0] == history_of(tmp_path / "plain")[0]
    assert {"warm-start.safetensors", "warm-start-all.safetensors"} <= set(run.manifest["files"])
    assert "warm-start-all.safetensors" not in segue.load(tmp_path / "plain").manifest["files"]


def test_refused_options_and_logs(line: CommandLine, yesterday: Path, cycle_data: Path, data: Path) -> None:
    command = ("train", data, "--out", "today", "--from", yesterday)
    line.refuses(*command, "--set", "model.width=32", says=("--from cannot change model.width", "train anew"))
    line.refuses(*command, "--recipe", "sasrec", says=("--from cannot change", "model.length"))
    line.refuses(*command, "--resume", says=("leave --from out",))
    line.refuses("train", data, "--out", "today", "--from", cycle_data, says=("is a data folder, expected a run",))
    split = ("--split", "time:2020-09-14")
    line.does("prepare", write_longer_log(line.folder), "--out", "by-time", *split)
    line.refuses(
        *("train", "by-time", "--out", "today", "--from", yesterday), says=("keeps for validation and test", "--split")
    )


def test_a_run_that_was_trained_on_todays_validation_events_is_refused(line: CommandLine, quick_recipe: Path) -> None:
    """Its training part ends after today's, though before today's test part."""
    log = write_longer_log(line.folder)
    splits = {
        name: line.answers("prepare", log, "--out", name, "--split", f"time:2020-09-14T{hour}")["split"]
        for name, hour in (("later", "01:37"), ("earlier", "00:30"))
    }
    assert splits["earlier"]["valid_from"] < splits["later"]["valid_from"] < splits["earlier"]["test_from"]
    line.does("train", "later", "--out", "run", "--recipe", quick_recipe, "--set", "train.epochs=1")
    line.refuses("train", "earlier", "--out", "today", "--from", "run", says=("keeps for validation and test",))


def test_a_recipe_may_change_training_settings(line: CommandLine, yesterday: Path, data: Path) -> None:
    (line.folder / "night.toml").write_text("[train]\nepochs = 1\nthreads = 1\n[objective]\ntemperature = 0.5\n")
    result = line.answers("train", data, "--out", "today", "--from", yesterday, "--recipe", "night.toml")
    assert result["recipe"] == "night.toml"
    assert len(history_of(line.folder / "today")) == 2
    assert "temperature = 0.5" in (line.folder / "today" / "settings.toml").read_text()
