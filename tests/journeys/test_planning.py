"""From a log of fixed routes to plans: trained in seconds, five stops ahead without a mistake, on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import CommandLine
from routes import held_out_prefixes, routes_log

from segue.api import Recommender, prepare, train

QUICK = (
    "model.width=48",
    "model.depth=1",
    "model.heads=1",
    "model.length=12",
    "model.dropout=0.1",
    "objective.cuts=4",
    "train.patience=12",
    "train.tokens=250",
    "train.stride=0.0",
    "train.learning_rate=1e-2",
    "train.averaging=0.0",
    "train.warmup=0",
    "train.threads=1",
)
BODIES = {
    "transformer": ("model.feed_forward=2", "train.epochs=11"),
    "gru": ("model.body=gru", "train.epochs=7"),
}


@pytest.fixture(name="data", scope="module")
def routes_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("routes")
    (folder / "log.csv").write_text(routes_log())
    prepare(folder / "log.csv", out=folder / "data")
    return folder / "data"


@pytest.fixture(name="run", scope="module")
def recurrent_run(data: Path) -> Path:
    run = data.with_name("gru")
    train(data, out=run, recipe="seq2seq", overrides=[*QUICK, *BODIES["gru"]])
    return run


def assert_right(model: Recommender) -> None:
    """More than two hundred prefixes that begin where nobody in the log begins."""
    asked = held_out_prefixes()
    assert len(asked) > 200
    plans = model.plan_many([history for history, _ in asked], 5)
    wrong = [(history, plan.ids) for (history, right), plan in zip(asked, plans, strict=True) if plan.ids != right]
    assert not wrong


def test_recurrent_networks_continue_every_route(run: Path) -> None:
    assert_right(Recommender.open(run))


def test_attention_alone_continues_every_route(data: Path) -> None:
    assert_right(train(data, recipe="seq2seq", overrides=[*QUICK, *BODIES["transformer"]]))


def test_a_run_that_plans_ranks_and_explains_as_any_other(line: CommandLine, run: Path) -> None:
    history, right = held_out_prefixes()[3]
    row = ",".join(history)
    assert line.answers("recommend", run, "--history", row, "-k", 1)["items"][0]["id"] == right[0]
    report = line.answers("evaluate", run)
    assert report["metrics"]["ndcg@10"] > 2 * report["baselines"]["popularity"]["ndcg@10"]
    explained = line.answers("explain", run, "--history", row)
    assert explained["item"]["id"] == right[0]
    (looks,) = explained["attention"]
    assert (looks["name"], looks["rows"]) == ("decoder, layer 1, at the history", [None])
    assert looks["columns"] == [*range(len(history))]
    assert "decoder, layer 1, at the history" in line.does("explain", run, "--history", row)


def test_plans_on_the_command_line(line: CommandLine, run: Path, data: Path) -> None:
    history, right = held_out_prefixes()[3]
    row = ",".join([*history, "nobody"])
    answer = line.answers("plan", run, "--history", row)
    assert [item["id"] for item in answer["items"]] == right
    assert answer["score"] == pytest.approx(sum(item["log_probability"] for item in answer["items"]))
    assert (answer["unknown"], answer["fallback"]) == (["nobody"], None)
    printed = line.does("plan", run, "--history", row, "-n", 2, "--beam", 1)
    assert printed.splitlines()[0] == "Unknown items, left out: nobody"
    assert [text.split()[1:3] for text in printed.splitlines()[1:3]] == [stop.split() for stop in right[:2]]
    assert printed.splitlines()[3].startswith("The plan's log-probability is -")
    assert line.answers("plan", run, "--user", "7", "--data", data)["fallback"] is None
    popular = line.does("plan", run, "--history", "nobody", "-n", 1)
    assert popular.startswith("No item of the history is known: these are the most popular ones.")


def test_the_rules_of_a_plan_on_the_command_line(line: CommandLine, run: Path) -> None:
    (first, second, *_), right = held_out_prefixes()[3]
    row = f"{first},{second}"

    def planned(*options: object) -> list[str]:
        return [item["id"] for item in line.answers("plan", run, "--history", row, *options)["items"]]

    assert right[0] not in planned("-n", 8, "--exclude", right[0])
    assert sorted(planned("--only", ",".join(right[:2]))) == sorted(right[:2])
    assert planned("-n", 3, "--only", right[0], "--repeats") == [right[0]] * 3
    assert set(planned("-n", 96, "--no-keep-seen")).isdisjoint([first, second])
    assert len(planned("-n", 200, "--keep-seen", "--beam", 1)) == 96


def test_what_cannot_be_planned_is_said_in_a_sentence(line: CommandLine, run: Path, cycle_run: Path) -> None:
    line.refuses("plan", cycle_run, "--history", "i01", says=("cannot plan", "--recipe seq2seq"))
    line.refuses("plan", run, "--history", "a", "-n", 0, says=("n, the number of items in a plan", "got 0"))
    line.refuses("plan", run, "--history", "a", "--beam", -1, says=("beam", "at least 1, got -1"))
