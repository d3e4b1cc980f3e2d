from __future__ import annotations

import gzip
from collections import defaultdict
from pathlib import Path

import msgspec
import numpy as np
import pytest
from planted_logs import cycle_log

from bench.quality import results as quality
from bench.quality.results import Paths, make_baselines, make_row, prepared
from bench.quality.results_table import (
    BEGIN,
    END,
    Rows,
    Training,
    document_parts,
    read_results,
    read_rows,
    tables,
)
from bench.recommend import codes
from segue import api
from segue.config.recipes import read_recipe, recipe_names
from segue.config.settings import make_settings
from segue.data.sequences import Sequences
from segue.errors import InputError
from segue.evaluation.metrics import ndcg
from segue.evaluation.report import Report
from segue.training.loop import TrainingProgress

ROOT = Path(__file__).parents[2]
OURS = Paths(
    rows=ROOT / "bench" / "quality" / "results.toml",
    measured=ROOT / "bench" / "quality" / "results.json",
    document=ROOT / "docs" / "results.md",
    cache=ROOT / "none",
)

# --- the rows and the table as they are committed -------------------------------------------------------------------


def test_the_document_has_the_measured_tables() -> None:
    rows, results = read_rows(OURS.rows), read_results(OURS.measured)
    tables_in_document = document_parts(OURS.document).tables
    assert tables_in_document == tables(rows, results), "run `make results ROW=table`"
    names = {one.name for one in rows.trainings}
    assert set(results.rows) <= names and set(results.differences) <= names
    assert all(f"| `{name}` |" in tables_in_document for name in names)


def test_every_row_can_be_trained() -> None:
    rows = read_rows(OURS.rows)
    assert len(rows.trainings) >= 15
    for one in rows.trainings:
        assert make_settings(read_recipe(one.row.recipe), one.overrides).train.seed == one.seed


def test_every_recipe_has_a_row_and_esasrec_three_seeds() -> None:
    rows = read_rows(OURS.rows)
    movielens = {row.recipe for row in rows.rows if row.name.startswith("ml-1m/")}
    elsewhere = {"pinnerformer", "pinnerformer-paper", "sasrec-content"}  # measured by other benches
    assert movielens == set(recipe_names()) - elsewhere - {"default"}, "`default` has the table of strangers"
    assert [one.name for one in rows.named("ml-1m/esasrec")] == [f"ml-1m/esasrec-{seed}" for seed in (1, 2, 3)]
    assert [one.seed for one in rows.named("ml-1m/esasrec-2")] == [2]


def test_an_unknown_row_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"no row 'ml-1m/sasrek'; there are .*ml-1m/sasrec,"):
        read_rows(OURS.rows).named("ml-1m/sasrek")
    with pytest.raises(InputError, match=r"no log 'ml-2m'; there are ml-1m, beauty"):
        quality.main(["--row", "ml-2m/baselines"])


def test_the_rows_are_listed_and_a_row_without_its_log_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    quality.main([])
    assert "ml-1m/sasrec-rss " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        quality.main(["--row", "ml-1m/sasrec"])
    assert "DATA=folder with events.tsv.gz" in capsys.readouterr().err


# --- a row from the log to the table --------------------------------------------------------------------------------

LOG = """
[logs.cycle]
title = "Cycle"
url = "https://example.org/log"
about = "Planted."
users = 60
items = 12
events = 840

[sources.Nobody]
title = "Nobody, Nowhere"
url = "https://example.org/paper"
"""
# Every item of a cycle is a seen item, so seen items must stay answers.
ROW = """
[[rows]]
name = "cycle/{name}"
log = "cycle"
recipe = "{recipe}"
set = ["evaluate.seen=keep", "model.width={width}"]
{more}
"""


@pytest.fixture
def files(tmp_path: Path, quick_recipe: Path) -> Paths:
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "events.tsv.gz").write_bytes(gzip.compress(cycle_log().replace(",", "\t").encode(), mtime=0))
    published = 'published = [{ model = "Theirs", ndcg = ".5", source = "Nobody" }]\nat_least = 0.25'
    rows = [
        ROW.format(name="narrow", recipe=quick_recipe, width=8, more=published),
        ROW.format(name="wide", recipe=quick_recipe, width=16, more='against = "cycle/narrow"'),
        ROW.format(name="seeds", recipe=quick_recipe, width=8, more="seeds = [1, 2]"),
    ]
    (tmp_path / "rows.toml").write_text(LOG + "".join(rows))
    (tmp_path / "measured.json").write_text('{"rows": {}, "differences": {}}')
    (tmp_path / "results.md").write_text(f"Before.\n\n{BEGIN}\nold\n{END}\n\nAfter.\n")
    return Paths(
        rows=tmp_path / "rows.toml",
        measured=tmp_path / "measured.json",
        document=tmp_path / "results.md",
        cache=tmp_path / "cache",
    )


def read_row(name: str, files: Paths) -> tuple[Rows, Training]:
    rows = read_rows(files.rows)
    (one,) = rows.named(name)
    return rows, one


def make(name: str, files: Paths) -> None:
    rows, one = read_row(name, files)
    make_row(one, rows, files.rows.parent / "log", files)


def line_of(name: str, files: Paths) -> list[str]:
    (line,) = (line for line in files.document.read_text().splitlines() if line.startswith(f"| `{name}` |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_row_from_the_log_to_the_table(files: Paths) -> None:
    make("cycle/narrow", files)
    (run,) = (path for path in (files.cache / "runs" / "cycle").iterdir() if path.is_dir())
    ranks = np.load(run / "ranks.npy")
    row = read_results(files.measured).rows["cycle/narrow"]
    assert row.ndcg == pytest.approx(ndcg(ranks, 10).mean()) and row.hit == pytest.approx((ranks <= 10).mean())
    report = msgspec.json.decode((run / "metrics.json").read_bytes(), type=Report)
    assert row.ndcg_interval == report.intervals["ndcg@10"] and report.seen == "kept"
    seconds = msgspec.json.decode((run / "manifest.json").read_bytes())["training"]["seconds"]
    assert row.epochs == len(seconds) == 3
    assert row.minutes == pytest.approx(sum(seconds) / 60, abs=0.006)
    cells = line_of("cycle/narrow", files)
    assert cells[1].endswith("--set evaluate.seen=keep --set model.width=8 --set train.seed=1`")
    assert cells[6] == f"{row.ndcg:.4f}".lstrip("0")
    assert cells[8:] == ["at least .2500", "– / .5 Theirs ([Nobody](https://example.org/paper))"]
    assert "not measured yet" in line_of("cycle/wide", files)
    text = files.document.read_text()
    assert text.startswith("Before.\n") and text.endswith("\n\nAfter.\n") and "old" not in text


def test_baselines_follow_the_rows_of_their_log(files: Paths) -> None:
    """They equal the baselines in a run's report, and stay when a row is measured later."""
    rows, one = read_row("cycle/narrow", files)
    make_baselines(one, rows, files.rows.parent / "log", files)
    make("cycle/narrow", files)
    (run,) = (path for path in (files.cache / "runs" / "cycle").iterdir() if path.is_dir())
    report = msgspec.json.decode((run / "metrics.json").read_bytes(), type=Report)
    baselines = read_results(files.measured).baselines["cycle"]
    assert {name: (baseline.hit, baseline.ndcg) for name, baseline in baselines.items()} == {
        name: (metrics["hit@10"], metrics["ndcg@10"]) for name, metrics in report.baselines.items()
    }
    scores = [baseline.ndcg for baseline in baselines.values()]
    assert scores == sorted(scores) and scores[0] < scores[-1]
    lines = [line.split(" | ") for line in files.document.read_text().splitlines() if ", not trained" in line]
    assert [cells[0].strip("| ").split(",")[0] for cells in lines] == list(baselines)
    assert [cells[6] for cells in lines] == [f"{score:.4f}".removeprefix("0") for score in scores]


def test_an_existing_run_is_not_trained_again(files: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    make("cycle/narrow", files)
    before = files.measured.read_bytes()
    monkeypatch.setattr(api, "train", None)
    monkeypatch.setattr(api, "prepare", None)
    monkeypatch.setattr(quality, "_commit", lambda: "another commit")
    make("cycle/narrow", files)
    assert files.measured.read_bytes() == before


def test_a_row_has_the_commit_at_the_start_of_its_training(files: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "_commit", lambda: "first")
    make("cycle/narrow", files)
    files.measured.write_text('{"rows": {}, "differences": {}}')
    monkeypatch.setattr(quality, "_commit", lambda: "second")
    make("cycle/narrow", files)
    assert read_results(files.measured).rows["cycle/narrow"].commit == "first"


def test_an_interrupted_row_is_resumed(files: Paths) -> None:
    rows, one = read_row("cycle/narrow", files)
    epochs: list[int] = []

    def interrupt(step: TrainingProgress) -> None:
        epochs.append(step.epoch)
        if step.epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_row(one, rows, files.rows.parent / "log", files, progress=interrupt)
    assert not read_results(files.measured).rows
    epochs.clear()
    measurement = make_row(one, rows, files.rows.parent / "log", files, progress=lambda step: epochs.append(step.epoch))
    assert set(epochs) == {2, 3}, "the first epoch is not repeated"
    assert measurement.epochs == 3


def test_a_paired_difference_exists_only_while_both_rows_do(files: Paths) -> None:
    make("cycle/wide", files)
    assert read_results(files.measured).differences == {}
    make("cycle/narrow", files)
    results = read_results(files.measured)
    change = results.differences["cycle/wide"]
    assert change.value == pytest.approx(results.rows["cycle/wide"].ndcg - results.rows["cycle/narrow"].ndcg)
    assert change.low <= change.value <= change.high
    assert f"`cycle/wide` minus `cycle/narrow`, over the same cases: ndcg@10 {change.value:+.4f}" in (
        files.document.read_text()
    )
    files.rows.write_text(files.rows.read_text().replace("model.width=16", "model.width=4"))
    make("cycle/narrow", files)
    assert read_results(files.measured).differences == {}
    assert "(the recipe has changed since)" in line_of("cycle/wide", files)[6]


def test_seeds_have_a_row_each_and_their_mean(files: Paths) -> None:
    for seed in (1, 2):
        assert "mean" not in files.document.read_text()
        make(f"cycle/seeds-{seed}", files)
    scores = [read_results(files.measured).rows[f"cycle/seeds-{seed}"].ndcg for seed in (1, 2)]
    assert scores[0] != scores[1]
    (mean,) = (line for line in files.document.read_text().splitlines() if "`cycle/seeds`, mean" in line)
    assert f"| {sum(scores) / 2:.4f} |".replace("0.", ".") in mean


def test_another_log_is_refused(files: Paths) -> None:
    files.rows.write_text(files.rows.read_text().replace("events = 840", "events = 999611"))
    with pytest.raises(InputError, match="is not the log of cycle/narrow"):
        make("cycle/narrow", files)


def test_shuffling_reorders_only_ties(files: Paths) -> None:
    """Times are cut to two hours, so that an event is tied with the one before or after it."""
    header, *events = cycle_log().splitlines()
    lines = [f"{user}\t{item}\t{int(time) // 7200}" for user, item, time in (event.split(",") for event in events)]
    text = "\n".join([header.replace(",", "\t"), *lines, ""])
    folder = files.rows.parent / "log"
    (folder / "events.tsv.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    orders = []
    for shuffle in (None, 1, 2):
        option = "" if shuffle is None else f"shuffle_ties = {shuffle}"
        files.rows.write_text(LOG + ROW.format(name="narrow", recipe="sasrec", width=8, more=option))
        rows, one = read_row("cycle/narrow", files)
        orders.append(prepared(one, rows.logs["cycle"], folder, files.cache).sequences)
    plain, first, second = orders
    assert not np.array_equal(plain.items, first.items) and not np.array_equal(first.items, second.items)
    assert np.array_equal(plain.times, first.times) and np.array_equal(plain.offsets, first.offsets)
    assert _by_time(plain) == _by_time(first) == _by_time(second)


def _by_time(log: Sequences) -> dict[tuple[int, int], list[int]]:
    """The items of each user at each time, sorted."""
    items: dict[tuple[int, int], list[int]] = defaultdict(list)
    users = np.repeat(np.arange(60), np.diff(log.offsets))
    for user, time_us, item in zip(users, log.times, log.items, strict=True):
        items[int(user), int(time_us)].append(int(item))
    return {key: sorted(values) for key, values in items.items()}


def test_the_bytes_of_a_table_by_hand() -> None:
    """3,416 items and padding: 96 numbers each; or 8 codes each, and 8 · 256 code vectors and one for padding of 12."""
    rows = read_rows(OURS.rows)
    plain, coded = (rows.named(name)[0] for name in (codes.PLAIN_ROW, codes.CODED_ROW))
    sizes = [
        codes.table_bytes(make_settings(read_recipe(one.row.recipe), one.overrides).model, 3416)
        for one in (plain, coded)
    ]
    assert sizes == [3417 * 96 * 4, 3417 * 8 + (8 * 256 + 1) * 12 * 4]
    assert sizes[0] > 9 * sizes[1]
