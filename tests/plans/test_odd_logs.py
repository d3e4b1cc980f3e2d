"""Odd logs through the command line: a run with a report, or one sentence that says what is missing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from command_line import CommandLine, Said, assert_refused, object_of

from segue.training import timing

ALL = ("--min-user", "1", "--min-item", "1")
SHORT = ("--set", "train.epochs=1", "--set", "train.epoch_events=0", "--set", "model.width=8")
MOMENT = ("--set", "train.minutes=0.005")  # 0.3 s, without any other setting

Histories = list[list[int]]


@pytest.fixture(autouse=True)
def _short_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is timed in a tenth of a second instead of two."""
    monkeypatch.setattr(timing, "SECONDS", 0.1)


def csv_of(histories: Histories, *, step: int = 3600) -> str:
    """A log with a history a user, an event every `step` seconds."""
    rows = [
        f"u{user},i{item},{1_600_000_000 + 97 * user * (step > 0) + step * position}"
        for user, history in enumerate(histories)
        for position, item in enumerate(history)
    ]
    return "user,item,timestamp\n" + "\n".join(rows) + "\n"


def random_histories(users: int, items: int, events: int, *, seed: int = 0, power: float = 0.0) -> Histories:
    """Random items, with a power above 0 few of them in most events."""
    shares = 1 / np.arange(1, items + 1) ** power
    chosen = np.random.default_rng(seed).choice(items, (users, events), p=shares / shares.sum())
    return [[int(item) for item in history] for history in chosen]


def train_on(line: CommandLine, log: str, *options: object) -> Said:
    """Prepare a log and train on it."""
    (line.folder / "log.csv").write_text(log)
    line.does("prepare", "log.csv", "--out", "data", *ALL)
    return line("train", "data", "--out", "run", *options, "--json")


def checked_report(line: CommandLine, result: Said) -> dict[str, Any]:
    """The report of a run that answers, with a verdict that agrees with its numbers."""
    body = object_of(result)
    assert result.err == "" and body["derived"]
    report: dict[str, Any] = body["report"]
    verdict = report["verdict"]
    assert verdict["score"] == pytest.approx(report["metrics"]["ndcg@10"])
    assert 0 <= verdict["score"] <= 1 and report["cases"] >= 1
    assert verdict["warning"] == verdict["sentences"][0].startswith("WARNING: ")
    if verdict["score"] < verdict["popularity"]:
        assert verdict["warning"], verdict
    assert sorted(path.name for path in line.folder.iterdir()) == ["data", "log.csv", "run"]
    assert line.answers("recommend", "run", "--history", "i0", "--keep-seen", "-k", "3")["items"]
    return report


# --- runs ---------------------------------------------------------------------------------------------------------


def test_thirty_users_without_a_setting(line: CommandLine) -> None:
    report = checked_report(line, train_on(line, csv_of(random_histories(30, 10, 8)), *MOMENT))
    assert report["cases"] == 30
    assert line.answers("evaluate", "run") == report


def test_one_user_without_a_setting(line: CommandLine) -> None:
    report = checked_report(line, train_on(line, csv_of(random_histories(1, 6, 40)), *MOMENT))
    assert report["cases"] == 1 and report["verdict"]["warning"]
    assert "1 user is too few" in report["verdict"]["sentences"][0] or report["verdict"]["score"] == 0


def test_two_events_to_learn_from(line: CommandLine) -> None:
    """Two users with four events: one target of training each."""
    report = checked_report(line, train_on(line, csv_of([[0, 1, 2, 0], [1, 2, 0, 1]]), *MOMENT))
    assert report["cases"] == 2 and report["verdict"]["warning"]


def test_many_items_and_few_users(line: CommandLine) -> None:
    histories = random_histories(300, 20_000, 20)
    every = [list(range(first, first + 67)) for first in range(0, 300 * 67, 67)]  # so that each item occurs
    log = csv_of([one + other for one, other in zip(histories, every, strict=True)])
    result = train_on(line, log, "--set", "train.epochs=1", "--set", "model.width=16", *MOMENT)
    assert checked_report(line, result)["cases"] == 300
    assert object_of(result)["items"] == 300 * 67


ODD: dict[str, str] = {
    "two items": csv_of([[user % 2, 0, 1, 1, 0, 0] for user in range(12)]),
    "one item but for one event": csv_of([[0] * 6 for _ in range(11)] + [[0, 0, 1, 0, 0, 0]]),
    "an item that only the test has": csv_of([[user % 3, 1, 2, 0, 9] for user in range(12)]),
    "histories of two events but for one": csv_of([[user % 3, 1] for user in range(20)] + [[0, 1, 2, 0, 1]]),
    "one long history": csv_of([[0, 1, 2, 3]] * 5 + random_histories(1, 4, 300)),
    "equal times": csv_of(random_histories(20, 5, 6), step=0),
    "every item once": csv_of([list(range(5 * user, 5 * user + 5)) for user in range(10)]),
    "no times": "user,item\n" + "".join(f"u{n % 9},i{n % 7}\n" for n in range(90)),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_logs_give_a_run(name: str, line: CommandLine) -> None:
    checked_report(line, train_on(line, ODD[name], *SHORT))


@pytest.mark.parametrize("seed", range(4))
def test_any_small_log_gives_a_run_or_a_sentence(seed: int, line: CommandLine) -> None:
    rng = np.random.default_rng(seed)
    items = int(rng.integers(2, 7))
    histories = [rng.integers(0, items, rng.integers(1, 8)).tolist() for _ in range(rng.integers(1, 9))]
    histories[0] += [0, 1]  # two items at the least
    result = train_on(line, csv_of(histories), *SHORT)
    if result.code:
        assert_refused(result)
    else:
        checked_report(line, result)


def test_a_score_below_popularity_is_a_warning(line: CommandLine) -> None:
    """Of a model that learned nothing, on a log whose items differ in popularity alone."""
    log = csv_of(random_histories(200, 40, 6, power=2.0))
    nothing = ("--set", "train.learning_rate=1e-9", "--set", "counts=none", "--set", "evaluate.seen=keep")
    report = checked_report(line, train_on(line, log, *SHORT, *nothing))
    verdict = report["verdict"]
    assert verdict["score"] < verdict["popularity"] and verdict["warning"]
    assert "worse than" in verdict["sentences"][0] and "popularity" in verdict["sentences"][0]
    assert line.does("evaluate", "run").startswith("WARNING: worse than ")


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("histories", "words"),
    [
        ([[0] * 8] * 20, ("Only one item", "more items")),
        ([[0]], ("Only one item", "more items")),
    ],
    ids=["one item", "one event"],
)
def test_a_log_of_one_item_is_not_prepared(histories: Histories, words: tuple[str, ...], line: CommandLine) -> None:
    (line.folder / "log.csv").write_text(csv_of(histories))
    line.refuses("prepare", "log.csv", "--out", "data", *ALL, says=words)


@pytest.mark.parametrize(
    ("histories", "words"),
    [
        ([[user % 5, 1] for user in range(50)], ("No event is left for validation", "three events")),
        ([[user % 5, 1, 2] for user in range(50)], ("No user has two events to learn from", "--min-user")),
        ([[user % 5] for user in range(50)], ("No event is left for validation", "three events")),
        ([[0, 1]], ("No event is left for validation", "three events")),
    ],
    ids=["two events a user", "three events a user", "one event a user", "two events"],
)
@pytest.mark.parametrize("options", [(), MOMENT], ids=["no flag", "minutes"])
def test_a_log_without_training_or_validation_is_refused(
    histories: Histories, words: tuple[str, ...], options: tuple[str, ...], line: CommandLine
) -> None:
    (line.folder / "log.csv").write_text(csv_of(histories))
    line.does("prepare", "log.csv", "--out", "data", *ALL)
    line.refuses("train", "data", "--out", "run", *options, says=words)
