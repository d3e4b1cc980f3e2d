"""`segue.train`: three statements, resume, more epochs, all events, and no leak."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import polars as pl
import pytest
from planted_logs import cycle_log

import segue
from segue.config.recipes import recipe_names
from segue.demo.planted import write_planted_shop
from segue.demo.shop import cache_folder, clean, fetch
from segue.errors import FolderError, InputError, SettingsError, TrainingError
from segue.training.loop import TrainingProgress

Command = Callable[..., subprocess.CompletedProcess[str]]


def files_of(run: Path) -> dict[str, bytes]:
    """Files that must be equal in equal runs: all but the manifest, which has times, and the settings, with epochs."""
    names = ("weights.safetensors", "history.jsonl", "ranks.npy", "metrics.json", "items.parquet", "index.safetensors")
    return {name: (run / name).read_bytes() for name in names}


def test_three_statements_on_the_demos_data(tmp_path: Path, quick_recipe: Path) -> None:
    try:
        raw = fetch(cache=cache_folder())
    except InputError:  # no network: use the planted shop, like the demo
        raw = tmp_path / "planted.csv"
        write_planted_shop(raw)
    shop = clean(raw, out=tmp_path)

    data = segue.prepare(shop.events)
    model = segue.train(data, recipe=quick_recipe, overrides=["train.epochs=1"])
    answer = model.recommend(["85123A", "22423"], k=10)

    assert len(answer.items) == 10
    assert {item.id for item in answer.items} <= set(data.vocabulary.table["id"])


def test_planted_cycle_is_learned(tmp_path: Path, quick_recipe: Path) -> None:
    (tmp_path / "log.csv").write_text(cycle_log())
    data = segue.prepare(tmp_path / "log.csv")
    model = segue.train(
        data, recipe=quick_recipe, overrides=["train.epochs=30", "train.patience=30", "evaluate.seen=keep"]
    )
    assert segue.evaluate(model).metrics["hit@1"] > 0.95
    assert model.recommend(["i03", "i04"], k=1).items[0].id == "i05"


def test_load_and_save(cycle_run: Path, cycle_data: Path, tmp_path: Path) -> None:
    model = segue.load(cycle_run)
    assert isinstance(model, segue.Recommender)
    model.save(tmp_path / "copy")
    copy = segue.load(tmp_path / "copy")
    assert isinstance(copy, segue.Recommender)
    assert copy.recommend(["i01", "i02"]) == model.recommend(["i01", "i02"])
    data = segue.load(cycle_data)
    assert isinstance(data, segue.Data)
    data.save(tmp_path / "data")
    assert segue.load(tmp_path / "data").digest == data.digest  # type: ignore[union-attr]
    with pytest.raises(FolderError, match="does not exist"):
        segue.load(tmp_path / "nowhere")


KILLED_TRAINING = """
import os, signal, sys
import segue

def kill(step):
    if step.epoch == 3 and step.scores is None:
        os.kill(os.getpid(), signal.SIGKILL)

segue.train(sys.argv[1], out=sys.argv[2], recipe=sys.argv[3], progress=kill)
"""


def test_resume_after_kill_equals_the_uninterrupted_run(cycle_data: Path, quick_recipe: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "dropout.toml"
    replacements = {"dropout = 0.0": "dropout = 0.3", "averaging = 0.0": "", "= 3\n": "= 6\n"}
    text = quick_recipe.read_text()
    for before, after in replacements.items():
        assert before in text
        text = text.replace(before, after)
    recipe.write_text(text)
    segue.train(cycle_data, out=tmp_path / "whole", recipe=recipe)
    command = [sys.executable, "-c", KILLED_TRAINING, *map(str, (cycle_data, tmp_path / "killed", recipe))]
    process = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    assert process.returncode == -signal.SIGKILL
    assert (tmp_path / "killed.partial").exists() and not (tmp_path / "killed").exists()
    segue.train(cycle_data, out=tmp_path / "killed", resume=True)
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")
    assert not (tmp_path / "killed.partial").exists()


def test_more_epochs_for_a_finished_run(cycle_data: Path, quick_recipe: Path, tmp_path: Path) -> None:
    patient = "train.patience=20"
    segue.train(cycle_data, out=tmp_path / "whole", recipe=quick_recipe, overrides=["train.epochs=6", patient])
    segue.train(cycle_data, out=tmp_path / "short", recipe=quick_recipe, overrides=["train.epochs=2", patient])
    short = files_of(tmp_path / "short")
    with pytest.raises(SettingsError, match=r"complete.*train\.epochs"):
        segue.train(cycle_data, out=tmp_path / "short", resume=True)
    assert files_of(tmp_path / "short") == short
    segue.train(cycle_data, out=tmp_path / "short", resume=True, overrides=["train.epochs=6"])
    assert files_of(tmp_path / "short") == files_of(tmp_path / "whole")


def test_resume_refuses_other_settings(cycle_data: Path, cycle_run: Path, quick_recipe: Path, tmp_path: Path) -> None:
    shutil.copytree(cycle_run, tmp_path / "run")
    with pytest.raises(SettingsError, match=r"cannot change model\.width"):
        segue.train(cycle_data, out=tmp_path / "run", resume=True, overrides=["model.width=8"])
    with pytest.raises(SettingsError, match=r"cannot change evaluate\.seen"):  # or the best epoch would be meaningless
        segue.train(cycle_data, out=tmp_path / "run", resume=True, overrides=["train.epochs=9", "evaluate.seen=keep"])
    with pytest.raises(FolderError, match="nothing to resume"):
        segue.train(cycle_data, out=tmp_path / "other", resume=True)
    with pytest.raises(FolderError, match="exists already"):
        segue.train(cycle_data, out=tmp_path / "run", recipe=quick_recipe)


def test_training_resumes_after_ctrl_c(cycle_data: Path, cycle_run: Path, quick_recipe: Path, tmp_path: Path) -> None:
    def stop(step: object) -> None:
        if getattr(step, "epoch", 0) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        segue.train(cycle_data, out=tmp_path / "run", recipe=quick_recipe, progress=stop)
    assert not (tmp_path / "run").exists()
    with pytest.raises(FolderError, match="unfinished training; add --resume"):
        segue.train(cycle_data, out=tmp_path / "run", recipe=quick_recipe)
    segue.train(cycle_data, out=tmp_path / "run", resume=True)
    assert files_of(tmp_path / "run") == files_of(cycle_run)


def test_resume_keeps_the_last_settings(cycle_data: Path, quick_recipe: Path, tmp_path: Path) -> None:
    """Overrides of the last call and all_events need not be repeated."""
    partial = tmp_path / "run.partial"

    def stop(_: TrainingProgress) -> None:
        if (partial / "training-all.safetensors").exists():
            raise KeyboardInterrupt

    few, more = ["train.epochs=1"], ["train.epochs=3", "train.learning_rate=2e-3"]
    segue.train(cycle_data, out=tmp_path / "run", recipe=quick_recipe, overrides=few)
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        segue.train(cycle_data, out=tmp_path / "run", resume=True, overrides=more, all_events=True, progress=stop)
    run = segue.train(cycle_data, out=tmp_path / "run", resume=True)
    segue.train(cycle_data, out=tmp_path / "whole", resume=True, overrides=more, all_events=True)
    assert run.manifest["all"] is True
    assert files_of(tmp_path / "run") == files_of(tmp_path / "whole")
    with pytest.raises(SettingsError, match="complete"):
        segue.train(cycle_data, out=tmp_path / "run", resume=True, all_events=True)


def test_a_non_finite_loss_keeps_the_last_saved_state(cycle_data: Path, quick_recipe: Path, tmp_path: Path) -> None:
    segue.train(cycle_data, out=tmp_path / "run", recipe=quick_recipe, overrides=["train.epochs=2"])
    with pytest.raises(TrainingError, match="The loss became"):
        segue.train(
            cycle_data,
            out=tmp_path / "run",
            resume=True,
            overrides=["train.epochs=20", "train.patience=20", "train.learning_rate=1e30"],
        )
    calm = ["train.epochs=4", "train.learning_rate=1e-3"]
    segue.train(cycle_data, out=tmp_path / "run", resume=True, overrides=calm)
    lines = (tmp_path / "run" / "history.jsonl").read_bytes().splitlines()
    assert [msgspec.json.decode(line)["epoch"] for line in lines] == [1, 2, 3, 4]


def test_all_events_keeps_the_report_of_the_validated_model(
    cycle_data: Path, cycle_run: Path, quick_recipe: Path, tmp_path: Path
) -> None:
    validated = segue.load(cycle_run)
    assert isinstance(validated, segue.Recommender)
    steps: list[TrainingProgress] = []
    out = tmp_path / "served"
    served = segue.train(cycle_data, out=out, recipe=quick_recipe, all_events=True, progress=steps.append)
    report, served_report = segue.evaluate(validated), segue.evaluate(served)
    assert {step.measured for step in steps} == {"", "model", *report.baselines}
    final_steps = [step for step in steps if step.measured]
    assert {(step.epoch, step.total) for step in final_steps} == {(3, report.cases)} and final_steps[
        -1
    ].done == report.cases
    assert served_report.metrics == report.metrics
    assert served_report.note is not None and "every event" in served_report.note
    assert report.note is None
    assert served.vocabulary.table["count"].sum() == 60 * 14
    assert validated.vocabulary.table["count"].sum() == 60 * 12
    assert files_of(cycle_run)["weights.safetensors"] != files_of(tmp_path / "served")["weights.safetensors"]
    with pytest.raises(SettingsError, match="cannot be tested again"):
        segue.evaluate(served, at=[3])


def test_no_leak_from_the_test_part(quick_recipe: Path, tmp_path: Path) -> None:
    """Last items are permuted among users: no weight and no best epoch may change."""
    log = pl.read_csv(cycle_log(users=200, items=40, events=12).encode()).with_columns(
        last=pl.col("timestamp") == pl.col("timestamp").max().over("user")
    )
    lasts = log.filter("last").sort("user")
    permuted_lasts = lasts.with_columns(item=pl.Series(np.random.default_rng(3).permutation(lasts["item"].to_numpy())))
    permuted_log = pl.concat([log.filter(~pl.col("last")), permuted_lasts]).drop("last")
    overrides = ["train.epochs=25", "train.patience=5", "evaluate.seen=keep"]
    for name, table in (("straight", log.drop("last")), ("permuted", permuted_log)):
        data = segue.prepare(table, out=tmp_path / f"{name}-data")
        segue.train(data, out=tmp_path / name, recipe=quick_recipe, overrides=overrides)
    for file in ("weights.safetensors", "history.jsonl"):
        assert (tmp_path / "straight" / file).read_bytes() == (tmp_path / "permuted" / file).read_bytes()
    manifests = [msgspec.json.decode((tmp_path / n / "manifest.json").read_bytes()) for n in ("straight", "permuted")]
    assert manifests[0]["training"]["best_epoch"] == manifests[1]["training"]["best_epoch"]
    straight, random = segue.evaluate(tmp_path / "straight"), segue.evaluate(tmp_path / "permuted")
    assert straight.metrics["hit@10"] > 0.95
    popularity = random.baselines["popularity"]["hit@10"]
    assert abs(random.metrics["hit@10"] - popularity) < 3 * np.sqrt(0.25 * 0.75 * 2 / 200)  # 10 of 40 items by chance


TINY = (
    "model.width=8",
    "model.depth=1",
    "model.length=6",
    "train.epochs=2",
    "train.tokens=60",
    "train.learning_rate=1e-2",
    "train.averaging=0.5",
    "train.warmup=0",
    "train.threads=1",
)
FEW_NEGATIVES = ("objective.sampler.negatives=5",)
WITHOUT_TARGET_TIME = ("model.target_time=false",)
SMALL_MIXTURE = ("model.similarity.part_width=4", "model.similarity.query_hidden=8", "model.similarity.gate_hidden=8")
NO_LEAK: dict[str, tuple[str, tuple[str, ...]]] = {
    "bert4rec": ("bert4rec", ()),
    "caser": ("caser", ("model.image_events=3",)),
    "default": ("default", ()),
    "esasrec": ("esasrec", ()),
    "gru4rec": ("gru4rec", ("model.state_width=8",)),
    "gru4rec-bprmax": ("gru4rec-bprmax", FEW_NEGATIVES),
    "gsasrec": ("gsasrec", FEW_NEGATIVES),
    "hstu": ("hstu", WITHOUT_TARGET_TIME),
    "hstu-large": ("hstu-large", (*WITHOUT_TARGET_TIME, "model.depth=3")),
    "hstu-mol": ("hstu-mol", (*WITHOUT_TARGET_TIME, *FEW_NEGATIVES, *SMALL_MIXTURE)),
    "narm": ("narm", ()),
    "nextitnet": ("nextitnet", ()),
    "pinnerformer": ("pinnerformer", FEW_NEGATIVES),
    "pinnerformer-paper": ("pinnerformer-paper", (*FEW_NEGATIVES, "model.output.item_width=4")),
    "sasrec": ("sasrec", ()),
    "sasrec-bce": ("sasrec-bce", ()),
    "sasrec-content": ("sasrec-content", ("model.items.text_encoder.width=4",)),
    "sasrec-meta": ("sasrec-meta", FEW_NEGATIVES),
    "sasrec-rss": ("sasrec-rss", ()),
    "sasrec-sampled": ("sasrec-sampled", FEW_NEGATIVES),
    "seq2seq": ("seq2seq", ()),
    "transformer": ("transformer", ()),
    "popularity": ("sasrec-sampled", (*FEW_NEGATIVES, "objective.sampler=popularity")),
    "in-batch": ("sasrec-sampled", (*FEW_NEGATIVES, "objective.sampler=in-batch")),
    "mixed": ("bert4rec", (*FEW_NEGATIVES, "objective.loss=gbce", "objective.sampler=mixed")),
    "lambdarank": ("sasrec-rss", ("objective.loss=lambdarank",)),
    "codes": ("sasrec-sampled", (*FEW_NEGATIVES, "model.items=codes", "model.items.parts=4")),
}
"""Every recipe, every sampler, and codes, which come from the log."""


def test_no_leak_covers_every_recipe() -> None:
    assert NO_LEAK.keys() >= set(recipe_names())


@pytest.fixture(scope="module")
def last_items(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Data folders that differ in users' last items alone: unchanged, and all the same, which changes counts."""
    log = pl.read_csv(cycle_log(users=30, items=12, events=8).encode()).with_columns(
        last=pl.col("timestamp") == pl.col("timestamp").max().over("user")
    )
    lasts = log.filter("last")
    others = {
        "straight": lasts["item"],
        "all the same": pl.Series(["i07"] * lasts.height),
    }
    titles = log.select("item", title=pl.lit("thing ") + pl.col("item").str.tail(1)).unique()
    folder = tmp_path_factory.mktemp("last-items")
    for name, items in others.items():
        table = pl.concat([log.filter(~pl.col("last")), lasts.with_columns(item=items)]).drop("last")
        segue.prepare(table, out=folder / name, items=titles)
    return {name: folder / name for name in others}


@pytest.mark.parametrize("name", NO_LEAK)
def test_no_leak_from_the_test_part_in_any_recipe(name: str, last_items: dict[str, Path], tmp_path: Path) -> None:
    """Not through counts, log q or sampled negatives either."""
    recipe, overrides = NO_LEAK[name]
    for last, data in last_items.items():
        segue.train(data, out=tmp_path / last, recipe=recipe, overrides=[*TINY, *overrides])
    for file in ("weights.safetensors", "history.jsonl", "items.parquet", "index.safetensors"):
        assert len({(tmp_path / last / file).read_bytes() for last in last_items}) == 1, file
    best = [msgspec.json.decode((tmp_path / last / "manifest.json").read_bytes())["training"] for last in last_items]
    assert len({training["best_epoch"] for training in best}) == 1
    assert len({(tmp_path / last / "ranks.npy").read_bytes() for last in last_items}) == 2, "only the test part differs"


def test_time_split(quick_recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(cycle_log())
    split_time = 1_600_000_000 + 3600 * 11
    data = segue.prepare(tmp_path / "log.csv", split=f"time:{split_time}")
    report = segue.evaluate(segue.train(data, recipe=quick_recipe))
    times = data.sequences.times // 1_000_000
    assert report.split == "time"
    assert report.cases == int((times >= split_time).sum())
    assert int((times[: len(times)] < split_time).sum()) + report.cases == len(times)
