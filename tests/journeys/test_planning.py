"""`segue plan`: the same plans as from Python, as JSON and as text, with every option."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import CommandLine

from segue.api import Recommender, train

# Two epochs are enough: plans need not be right here.
QUICK = (
    "model.body=gru",
    "model.width=16",
    "model.depth=1",
    "model.length=12",
    "train.epochs=2",
    "train.tokens=500",
    "train.threads=1",
)
HISTORY = ["i01", "i02", "i03"]
ROW = ",".join(HISTORY)


@pytest.fixture(name="run", scope="module")
def planning_run(cycle_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("planning") / "run"
    train(cycle_data, out=run, recipe="seq2seq", overrides=QUICK)
    return run


def test_a_run_that_plans_also_ranks_and_explains(line: CommandLine, run: Path) -> None:
    best = line.answers("recommend", run, "--history", ROW, "-k", 1)["items"][0]["id"]
    explanation = line.answers("explain", run, "--history", ROW)
    assert (explanation["item"]["id"], explanation["rank"]) == (best, 1)
    (layer,) = explanation["attention"]
    assert (layer["name"], layer["rows"]) == ("decoder, layer 1, at the history", [None] * 5)
    steps = [item["id"] for item in explanation["plan"]]
    assert steps == Recommender.open(run).plan(HISTORY, 5, beam=1).ids and steps[0] == best
    assert layer["columns"] == [0, 1, 2]
    assert "decoder, layer 1, at the history" in line.does("explain", run, "--history", ROW)
    assert line.answers("evaluate", run)["metrics"]["ndcg@10"] > 0


def test_plans_on_the_command_line(line: CommandLine, run: Path, cycle_data: Path) -> None:
    answer, model = line.answers("plan", run, "--history", f"{ROW},nobody"), Recommender.open(run)
    expected = model.plan(HISTORY, 5)
    assert [item["id"] for item in answer["items"]] == expected.ids and len(expected.ids) == 5
    assert answer["score"] == pytest.approx(expected.score)
    assert answer["score"] == pytest.approx(sum(item["log_probability"] for item in answer["items"]))
    assert (answer["unknown"], answer["fallback"]) == (["nobody"], None)
    output = line.does("plan", run, "--history", f"{ROW},nobody", "-n", 2, "--beam", 1).splitlines()
    assert output[0] == "Unknown items, left out: nobody"
    assert [text.split()[:2] for text in output[1:3]] == [
        [str(position), item] for position, item in enumerate(model.plan(HISTORY, 2, beam=1).ids, start=1)
    ]
    assert output[3].startswith("The plan's log-probability is -")
    assert line.answers("plan", run, "--user", "u007", "--data", cycle_data)["fallback"] is None
    popular = line.does("plan", run, "--history", "nobody", "-n", 1)
    assert popular.startswith("No item of the history is known: these are the most popular ones.")


def test_the_rules_of_a_plan_on_the_command_line(line: CommandLine, run: Path) -> None:
    def plan_of(*options: object) -> list[str]:
        return [item["id"] for item in line.answers("plan", run, "--history", ROW, *options)["items"]]

    first = plan_of("-n", 1)[0]
    assert first not in plan_of("-n", 12, "--exclude", first)
    assert sorted(plan_of("--only", "i07,i05")) == ["i05", "i07"]
    assert plan_of("-n", 3, "--only", "i07", "--repeats") == ["i07"] * 3
    assert set(plan_of("-n", 12, "--no-keep-seen")) == {f"i{number:02}" for number in range(12)} - set(HISTORY)
    assert len(plan_of("-n", 200, "--keep-seen", "--beam", 1)) == 12


def test_impossible_plans_are_refused(line: CommandLine, run: Path, cycle_run: Path) -> None:
    line.refuses("plan", cycle_run, "--history", "i01", says=("cannot plan", "--recipe seq2seq"))
    line.refuses("plan", run, "--history", "a", "-n", 0, says=("n, the number of items in a plan", "got 0"))
    line.refuses("plan", run, "--history", "a", "--beam", -1, says=("beam", "at least 1, got -1"))
