"""Evaluation by time window through the command line, on a log with known targets."""

from __future__ import annotations

import json
import math
from pathlib import Path

import polars as pl
import pytest
from command_line import CommandLine

import segue
from segue.errors import InputError, SettingsError

USERS, ITEMS, EVENTS = 60, 12, 14
BEGIN, DAY = 1_600_000_000, 86_400
WHEN = BEGIN + 10 * DAY
LEARNING = ("train.epochs=15", "train.patience=15", "train.tokens=40")


def daily_walks() -> pl.DataFrame:
    """Each user follows a cycle of items, one per day: the next day's item is certain, and yesterday's embedding
    predicts today's item."""
    steps = [(user, step) for user in range(USERS) for step in range(EVENTS)]
    return pl.DataFrame(
        {
            "user": [f"u{user:02}" for user, _ in steps],
            "item": [f"i{(user * 5 + step) % ITEMS:02}" for user, step in steps],
            "time": [BEGIN + 97 * (user + 1) + DAY * step for user, step in steps],
        }
    )


@pytest.fixture(scope="module")
def daily(tmp_path_factory: pytest.TempPathFactory, quick_recipe: Path) -> Path:
    """A folder with the data and a run."""
    folder = tmp_path_factory.mktemp("daily")
    daily_walks().write_csv(folder / "log.csv")
    shelves = {"item": [f"i{item:02}" for item in range(ITEMS)], "shelf": [f"s{item % 4}" for item in range(ITEMS)]}
    pl.DataFrame(shelves).write_csv(folder / "items.csv")
    data = segue.prepare(folder / "log.csv", out=folder / "data", items=folder / "items.csv", split=f"time:{WHEN}")
    evaluation = ["evaluate.seen=keep", "evaluate.at=[1,3]", "evaluate.bootstrap=100", "evaluate.interest=shelf"]
    segue.train(data, out=folder / "run", recipe=quick_recipe, overrides=[*LEARNING, *evaluation])
    return folder


def test_older_histories_score_lower(daily: Path) -> None:
    report = segue.evaluate(daily / "run", days=1, ages=(0, 1))
    age_0, age_1 = report.ages
    assert report.users == report.targets == USERS
    assert age_0.metrics["recall@1"] > 0.9, "one in twelve by chance"
    assert age_1.metrics["recall@1"] < 0.1
    decrease = age_1.fall["recall@1"]
    assert decrease.value is not None and decrease.low is not None and decrease.value > 0.9 and decrease.low > 0.8
    assert report.baselines["popularity"]["recall@1"] < 0.2
    assert report.metrics["p90_coverage@1"] > 0.7, "users are at different positions of the cycle"
    assert report.metrics["entropy@3"] > 0


def test_validation_may_choose_the_epoch_by_a_window(daily: Path, quick_recipe: Path, tmp_path: Path) -> None:
    run, overrides = tmp_path / "run", ["train.epochs=3", "train.tokens=200", "evaluate.days=2", "evaluate.seen=keep"]
    segue.train(daily / "data", out=run, recipe=quick_recipe, overrides=overrides)
    lines = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    recalls = [line["recall@10"] for line in lines]
    training = json.loads((run / "manifest.json").read_text())["training"]
    assert training["best_score"] == max(recalls) and training["best_epoch"] == 1 + recalls.index(max(recalls))
    assert len(set(recalls)) > 1 and "ndcg@10" not in lines[0]
    with pytest.raises(SettingsError, match=r"--resume cannot change evaluate\.days"):
        segue.train(daily / "data", out=run, resume=True, overrides=["evaluate.days=1", "train.epochs=4"])


def test_the_command_prints_the_report_of_python(line: CommandLine, daily: Path) -> None:
    body = line.answers("evaluate", daily / "run", "--days", "2", "--ages", "0,1", "--at", "1,5")
    report = segue.evaluate(daily / "run", days=2, ages=(0, 1), at=(1, 5))
    assert body["metrics"] == report.metrics and body["targets"] == 2 * USERS == report.targets
    assert [age["days"] for age in body["ages"]] == [0, 1]
    assert body["split_time"] == "2020-09-23T12:26:40+00:00" and body["trained_before"] < body["split_time"]
    output = line.does("evaluate", daily / "run", "--days", "2", "--ages", "1")
    assert "60 users" in output and "session-knn" in output and "lost since age 0" in output
    assert "metrics" in line.answers("evaluate", daily / "run") and "ages" not in line.answers(
        "evaluate", daily / "run"
    )


def test_interest_may_be_named_in_evaluate(line: CommandLine, daily: Path) -> None:
    """With a column of unique values, a list of three has the entropy of three values."""
    by_id, shelves = (segue.evaluate(daily / "run", days=1, interest=name).metrics for name in ("id", "shelf"))
    assert by_id["entropy@3"] == pytest.approx(math.log(3)) and by_id["entropy@1"] == 0
    assert shelves == segue.evaluate(daily / "run", days=1).metrics, "the column of the run's settings"
    assert "entropy@3" not in segue.evaluate(daily / "run", days=1, interest="").metrics
    assert line.answers("evaluate", daily / "run", "--days", "1", "--interest", "id")["metrics"] == by_id
    error_words = ("no column 'shelv'", "it has shelf")
    line.refuses("evaluate", daily / "run", "--days", "1", "--interest", "shelv", says=error_words)
    line.refuses("evaluate", daily / "run", "--interest", "shelf", says=("--interest needs --days",))
    with pytest.raises(InputError, match="--interest needs --days"):
        segue.evaluate(daily / "run", interest="shelf")  # type: ignore[call-overload]


def test_a_misspelt_interest_is_refused_before_training(line: CommandLine, daily: Path, quick_recipe: Path) -> None:
    override, says = ("--set", "evaluate.interest=shelv"), ("no column 'shelv'", "it has shelf")
    line.refuses("train", daily / "data", "--out", "run", "--recipe", quick_recipe, *override, says=says)
    assert not list(line.folder.glob("run*"))
    more = ("--resume", "--set", "train.epochs=16")
    line.refuses("train", daily / "data", "--out", daily / "run", *more, *override, says=says)
    assert not (daily / "run.partial").exists()


def test_impossible_windows_are_refused(line: CommandLine, daily: Path, cycle_run: Path, cycle_data: Path) -> None:
    line.refuses("evaluate", cycle_run, "--days", "14", says=("--split last", "--split time:WHEN"))
    ahead = ("--set", "evaluate.days=14")
    line.refuses("train", cycle_data, "--out", "run", *ahead, says=("--split last", "--split time:WHEN"))
    line.refuses("evaluate", daily / "run", "--ages", "1", says=("--ages needs --days",))
    line.refuses("evaluate", daily / "run", "--days", "1", "--ages", "soon", says=("0,1,3,7,14", "'soon'"))
    line.refuses("evaluate", daily / "run", "--days", "0", says=("--days", "above 0"))
    line.refuses("evaluate", daily / "run", "--days", "1", "--ages", "30", says=("Nobody with an event before",))


def test_a_search_refuses_a_window(line: CommandLine, daily: Path) -> None:
    (line.folder / "ahead.toml").write_text("[evaluate]\ndays = 14.0\n")
    tune = ("tune", daily / "data", "--out", "tuned", "--recipe", "ahead.toml")
    line.refuses(*tune, says=("ndcg@10", "leave evaluate.days out"))


def test_a_log_in_order_has_no_days(line: CommandLine, quick_recipe: Path) -> None:
    log_in_order = daily_walks().with_columns(time=pl.int_range(pl.len()).over("user"))
    log_in_order.write_csv(line.folder / "log.csv")
    line.does("prepare", "log.csv", "--out", "data", "--split", "time:10")
    train = ("train", "data", "--out", "run", "--recipe", quick_recipe)
    line.refuses(*train, "--set", "evaluate.days=1", says=("an order, not dates",))
    line.does(*train)
    line.refuses("evaluate", "run", "--days", "1", says=("an order, not dates",))


def test_a_run_trained_on_the_window_is_refused(line: CommandLine, daily: Path, quick_recipe: Path) -> None:
    line.does("train", daily / "data", "--out", "run", "--recipe", quick_recipe, "--all", "--set", "train.epochs=1")
    line.refuses("evaluate", "run", "--days", "1", says=("trained on every event", "without --all"))
