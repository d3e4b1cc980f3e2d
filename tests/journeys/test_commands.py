"""Every command: its output, its output with `--json`, its options and its exit."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import polars as pl
import pytest
from command_line import CommandLine, tree
from planted_logs import cycle_log

Command = Callable[..., subprocess.CompletedProcess[str]]

ITEMS = [f"i{number:02}" for number in range(12)]

OPTIONS = {
    "demo": "--no-serve --out --port --json",
    "prepare": "--out --user --item --time --value --kind --items --min-user --min-item --split --time-format "
    "--time-zone --order --drop-duplicates --max-rejected --overwrite --engine --spark-remote --json",
    "train": "--out --recipe --set --from --minutes --resume --all --processes --json",
    "recipes": "--json",
    "evaluate": "--data --at --days --ages --interest --json",
    "compare": "--html --json",
    "recommend": "--history --user --users --out -k --data --keep-seen --no-keep-seen --exclude --only --engine "
    "--spark-remote --json",
    "embed": "--data --out --since --items --engine --spark-remote --json",
    "similar": "-k --json",
    "explain": "--history --user --item --data --keep-seen --no-keep-seen --html --layer --head --query --json",
    "plan": "--history --user -n --beam --data --keep-seen --no-keep-seen --exclude --only --repeats --json",
    "add-items": "--out --item --json",
    "export": "--onnx --json",
    "tune": "--out --recipe --trials --minutes --resume --json",
    "serve": "--data --store --runs --host --port --workers --cache-mb --keys --rate-limit --cors --log-level --json",
}


def ids(answer: dict[str, Any]) -> list[str]:
    return [item["id"] for item in answer["items"]]


# --- help and usage -----------------------------------------------------------------------------------------------


def test_version(line: CommandLine) -> None:
    assert line.does("--version") == f"segue {version('segue')}\n"


def test_help_names_every_command(line: CommandLine) -> None:
    output = line.does("--help")
    assert all(command in output for command in OPTIONS)
    assert line.does("-h") == output


@pytest.mark.parametrize("command", OPTIONS)
def test_help_names_every_option_and_no_other(line: CommandLine, command: str) -> None:
    output = line.does(command, "--help")
    assert set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", output)) - {"-h", "--help"} == set(OPTIONS[command].split())


def test_help_and_version_in_a_real_process(segue_command: Command, tmp_path: Path) -> None:
    process = segue_command("--version", cwd=tmp_path)
    assert (process.returncode, process.stdout, process.stderr) == (0, f"segue {version('segue')}\n", "")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("recommend", "run"), "exactly one of --history, --user and --users"),
        (("recommend", "run", "--history", "a", "--user", "b"), "exactly one of --history, --user and --users"),
        (("recommend", "run", "--users", "f", "--out", "o", "--user", "b"), "exactly one of"),
        (("recommend", "run", "--users", "users.csv"), "--users and --out belong together"),
        (("recommend", "run", "--history", "a", "--out", "answers"), "--users and --out belong together"),
        (("recommend", "run", "--history", "a", "-k", "many"), "'-k': Input should be a valid integer"),
        (("prepare", "log.csv"), "Missing option '--out'"),
        (("prepare", "--out", "data"), "Missing argument 'FILE...'"),
        (("prepare", "log.csv", "--out", "data", "--engine", "flink"), "'flink' is not one of"),
        (("prepare", "log.csv", "--out", "data", "--min-user", "0"), "--min-user"),
        (("train", "data"), "Missing option '--out'"),
        (("similar", "run"), "Missing argument"),
        (("compare",), "Missing argument"),
        (("serve", "run", "--port", "high"), "'--port': Input should be a valid integer"),
        (("explain", "run"), "exactly one of --history and --user"),
        (("explain", "run", "--history", "a", "--user", "b"), "exactly one of --history and --user"),
        (("serve",), "Missing argument"),
        (("serve", "run", "--workers", "0"), "--workers"),
        (("plan", "run"), "exactly one of --history and --user"),
        (("plan", "run", "--history", "a", "-n", "few"), "'-n': Input should be a valid integer"),
    ],
)
def test_wrong_usage(line: CommandLine, arguments: tuple[str, ...], says: str) -> None:
    line.refuses(*arguments, says=(says,), code=2)


def test_wrong_usage_in_a_real_process(segue_command: Command, tmp_path: Path) -> None:
    process = segue_command("prepare", "log.csv", "--colour", cwd=tmp_path)
    assert process.returncode == 2
    assert process.stdout == ""
    assert "--colour" in process.stderr
    assert tree(tmp_path) == {}


# --- prepare ------------------------------------------------------------------------------------------------------


def write_events(folder: Path, columns: dict[str, list[Any]], name: str = "log.csv") -> None:
    pl.DataFrame(columns).write_csv(folder / name)


def two_users(**more: list[Any]) -> dict[str, list[Any]]:
    """Two users with three events each, of items a, b and c in this order; further columns replace these."""
    times = [1_700_000_000 + step for step in (0, 1, 2)]
    columns: dict[str, list[Any]] = {"user": ["u"] * 3 + ["v"] * 3, "item": list("abcabc"), "time": times * 2}
    return columns | more


LOW = ("--min-user", "1", "--min-item", "1")


def prepare_log(line: CommandLine, *options: object, out: str = "data") -> tuple[dict[str, Any], Path]:
    return line.answers("prepare", "log.csv", "--out", out, *LOW, *options), line.folder / out


def array(folder: Path, name: str) -> list[Any]:
    return list(np.load(folder / f"{name}.npy").tolist())


def test_prepare_prints_a_summary(line: CommandLine) -> None:
    (line.folder / "log.csv").write_text(cycle_log())
    body = line.answers("prepare", "log.csv", "--out", "data")
    assert body["folder"] == "data"
    assert body == {"folder": "data", **json.loads((line.folder / "data" / "manifest.json").read_text())}
    assert body["counts"] == {
        "rows": 840,
        "good": 840,
        "rejected": {},
        "duplicates": 0,
        "users": 60,
        "items": 12,
        "events": 840,
    }
    output = line.does("prepare", "log.csv", "--out", "again")
    assert "user = 'user' (found), item = 'item' (found), time = 'timestamp' (found)" in output
    assert "60 users, 12 items, 840 events" in output
    assert "Next: segue train again --out RUN" in output


def test_prepare_columns_by_name(line: CommandLine) -> None:
    write_events(line.folder, {"who": list("uuuvvv"), "user": list("abcabc"), "n": [3, 2, 1, 3, 2, 1]})
    body, folder = prepare_log(line, "--user", "who", "--item", "user", "--time", "n")
    assert body["log"]["columns"] == {"user": "who", "item": "user", "time": "n"}
    assert body["log"]["found"] == []
    assert array(folder, "items") == [3, 2, 1] * 2  # c before b before a


def test_prepare_several_files_in_their_order(line: CommandLine) -> None:
    write_events(line.folder, {"user": ["u"] * 2, "item": ["c", "a"]})
    write_events(line.folder, {"user": ["u"] * 2, "item": ["b", "a"]}, "more.csv")
    body, folder = prepare_log(line, "more.csv")
    assert body["log"]["time"]["form"] == "row order"
    assert array(folder, "items") == [3, 1, 2, 1]
    assert [Path(source["path"]).name for source in body["source"]] == ["log.csv", "more.csv"]


def test_prepare_minima(line: CommandLine) -> None:
    """d occurs once and w has one event; removing them brings no other below the minima."""
    write_events(line.folder, {"user": list("uuuvvvvw"), "item": list("abcabcda")})
    all_counts = line.answers("prepare", "log.csv", "--out", "every", "--min-user", "1", "--min-item", "1")["counts"]
    assert (all_counts["users"], all_counts["items"], all_counts["events"]) == (3, 4, 8)
    users = line.answers("prepare", "log.csv", "--out", "users", "--min-user", "2", "--min-item", "1")["counts"]
    assert (users["users"], users["items"], users["events"]) == (2, 4, 7)
    items = line.answers("prepare", "log.csv", "--out", "items", "--min-user", "1", "--min-item", "2")["counts"]
    assert (items["users"], items["items"], items["events"]) == (3, 3, 7)


def test_prepare_order(line: CommandLine) -> None:
    equal_times = [1_700_000_000] * 6
    write_events(line.folder, two_users(time=equal_times, place=[3, 2, 1, 1, 2, 3]))
    body, folder = prepare_log(line, out="rows")
    assert array(folder, "items") == [1, 2, 3, 1, 2, 3]
    assert body["tie_share"] == 1.0
    _, folder = prepare_log(line, "--order", "place", out="places")
    assert array(folder, "items") == [3, 2, 1, 1, 2, 3]


def test_prepare_kind_and_value(line: CommandLine) -> None:
    write_events(line.folder, two_users(what=["view", "buy", "view"] * 2, stars=[1.5, 2.0, 3.0, 4.0, 4.5, 5.0]))
    _, folder = prepare_log(line, out="neither")
    assert not (folder / "kinds.npy").exists()
    assert not (folder / "values.npy").exists()
    body, folder = prepare_log(line, "--kind", "what", "--value", "stars")
    assert [body["kinds"][kind] for kind in array(folder, "kinds")] == ["view", "buy", "view"] * 2
    assert array(folder, "values") == [1.5, 2.0, 3.0, 4.0, 4.5, 5.0]


def test_prepare_time_zone(line: CommandLine) -> None:
    """New York is five hours behind UTC in January and four in July; an explicit offset is kept."""
    local = ["2024-01-01T00:00:00", "2024-07-01T00:00:00", "2024-07-01T12:00:00+02:00"]
    write_events(line.folder, two_users(time=local * 2))
    _, utc = prepare_log(line, out="utc")
    _, york = prepare_log(line, "--time-zone", "America/New_York", out="york")
    hours = (np.array(array(york, "times")) - np.array(array(utc, "times"))) / 3_600_000_000
    assert hours.tolist() == [5, 4, 0] * 2
    assert array(utc, "times")[0] == 1_704_067_200_000_000


def test_prepare_time_format(line: CommandLine) -> None:
    write_events(line.folder, two_users(time=["03.01.2024 10:00", "02.02.2024 10:00", "01.03.2024 10:00"] * 2))
    body, folder = prepare_log(line, "--time-format", "%d.%m.%Y %H:%M")
    assert body["counts"]["rejected"] == {}
    assert array(folder, "times")[:3] == [1_704_276_000_000_000, 1_706_868_000_000_000, 1_709_287_200_000_000]


def test_prepare_split_by_time(line: CommandLine) -> None:
    (line.folder / "log.csv").write_text(cycle_log())
    body = line.answers("prepare", "log.csv", "--out", "data", "--split", "time:2020-09-14T00:00:00Z")
    assert body["split"]["kind"] == "time"
    assert body["split"]["test_from"] == 1_600_041_600_000_000


def test_prepare_catalogue(line: CommandLine) -> None:
    write_events(line.folder, two_users())
    write_events(
        line.folder, {"id": ["a", "c", "z"], "title": ["Apple", "Cherry", "Zest"], "price": [1, 3, 9]}, "c.csv"
    )
    body, folder = prepare_log(line, "--items", "c.csv")
    table = pl.read_parquet(folder / "items.parquet")
    assert table["title"].to_list() == ["Apple", None, "Cherry"]
    assert table["price"].cast(pl.String).to_list() == ["1", None, "3"]
    assert body["counts"]["catalogue"]["described"] == 2


def test_prepare_max_rejected(line: CommandLine) -> None:
    write_events(line.folder, two_users(time=["soon", *["2024-01-01", "2024-01-02"] * 2, "2024-01-03"]))
    options = ("prepare", "log.csv", "--out", "data", *LOW)
    line.refuses(*options, says=("1 of 6 rows (16.7%)",))
    line.refuses(*options, "--max-rejected", "0.16", says=("1 of 6 rows (16.7%)",))
    assert line.answers(*options, "--max-rejected", "17%")["counts"]["good"] == 5


# --- train and recipes --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def other_run(cycle_data: Path, quick_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run like `cycle_run`, with another seed."""
    from segue.api import train

    out = tmp_path_factory.mktemp("other") / "other"
    train(cycle_data, out=out, recipe=quick_recipe, overrides=["train.seed=2"])
    return out


def test_train(line: CommandLine, cycle_data: Path, quick_recipe: Path) -> None:
    """Progress is on standard error in plain lines, the result on standard output."""
    result = line("train", cycle_data, "--out", "run", "--recipe", quick_recipe, "--set", "counts=fitted")
    assert result.code == 0
    first, second, *_ = result.out.splitlines()
    assert "the best simple method, last-item" in first and second.startswith("Shortcut: the last item alone explains")
    assert "\nCounts of what followed what" in result.out
    assert re.findall(r"^epoch +(\d)/3  loss [\d.]+  ndcg@10 [\d.]+", result.err, re.MULTILINE) == ["1", "2", "3"]
    assert "epoch" not in result.out
    assert "60 cases" in result.out
    assert "session-knn" in result.out
    assert "Next: segue recommend run" in result.out
    assert [path.name for path in line.folder.iterdir()] == ["run"]


def test_train_json(line: CommandLine, cycle_data: Path, quick_recipe: Path) -> None:
    """Standard output has the object alone, standard error nothing."""
    result = line("train", cycle_data, "--out", "run", "--recipe", quick_recipe, "--json")
    assert result.err == ""
    body = json.loads(result.out)
    assert result.out.count("\n") == 1
    report = json.loads((line.folder / "run" / "metrics.json").read_text())
    assert body == {"folder": "run", "report": report, **json.loads(Path("run/manifest.json").read_text())}


def test_train_set_and_all(line: CommandLine, cycle_data: Path) -> None:
    """The default recipe with small numbers."""
    changes = ("--set", "train.epochs=2", "--set", "model.width=8", "--set", "model.heads=1", "--set", "model.depth=1")
    body = line.answers("train", cycle_data, "--out", "run", *changes, "--all")
    assert body["recipe"] == "default"
    assert body["training"]["epochs"] == 2
    assert body["all"] is True
    assert "trained on every event" in body["report"]["note"]
    settings = Path("run/settings.toml").read_text()
    assert "width = 8" in settings
    assert "epochs = 2" in settings
    # Training for serving uses every event: the catalogue of the run has the counts of the whole log.
    assert pl.read_parquet("run/items.parquet")["count"].sum() == 840
    assert line.answers("evaluate", "run") == body["report"]


def test_recipes(line: CommandLine) -> None:
    body = line.answers("recipes")
    assert list(body) == ["recipes"]
    common = "default esasrec sasrec sasrec-bce sasrec-content sasrec-sampled gsasrec bert4rec sasrec-rss transformer"
    with_times = "hstu hstu-large hstu-mol sasrec-meta"
    others = "gru4rec gru4rec-bprmax narm caser nextitnet seq2seq pinnerformer pinnerformer-paper"
    assert set(body["recipes"]) == {*common.split(), *with_times.split(), *others.split()}
    output = line.does("recipes")
    assert all(name in output and about["summary"] in output for name, about in body["recipes"].items())


# --- evaluate and compare -----------------------------------------------------------------------------------------


def test_evaluate(line: CommandLine, cycle_run: Path) -> None:
    body = line.answers("evaluate", cycle_run)
    expected = {"split": "last", "cases": 60, "items": 12, "ties": "pessimistic", "seen": "kept"}
    expected |= {"unreachable": 0, "unknown": 0, "target_time": False}
    assert {name: body[name] for name in expected} == expected
    assert {"hit@10", "ndcg@10", "mrr@10", "coverage@10"} <= set(body["metrics"])
    low, high = body["intervals"]["ndcg@10"]
    assert low <= body["metrics"]["ndcg@10"] <= high
    assert {"popularity", "recent-popularity", "last-item", "session-knn"} == set(body["baselines"])
    assert body["baselines"]["last-item"]["hit@1"] == 1.0  # on a cycle the last item determines the next
    assert body == json.loads((cycle_run / "metrics.json").read_text())


def test_evaluate_begins_with_the_verdict(line: CommandLine, cycle_run: Path) -> None:
    output, verdict = line.does("evaluate", cycle_run), line.answers("evaluate", cycle_run)["verdict"]
    assert verdict["best"]["name"] == "last-item" and verdict["warning"] is verdict["sentences"][0].startswith(
        "WARNING"
    )
    assert output.splitlines()[:3] == [*verdict["sentences"], ""]
    assert "Counts" not in output, "the recipe has none"


def test_serve_prints_the_verdict_on_each_run(
    line: CommandLine, cycle_run: Path, other_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from segue.serving.http import server

    early = line.folder / "early"  # a run of a version whose reports have no verdict
    shutil.copytree(other_run, early)
    report = json.loads((early / "metrics.json").read_text())
    del report["verdict"]
    (early / "metrics.json").write_text(json.dumps(report))
    monkeypatch.setattr(server, "serve", lambda *_, started, **__: started("http://localhost:1"))
    verdict = json.loads((cycle_run / "metrics.json").read_text())["verdict"]
    assert line.answers("serve", cycle_run, early)["verdicts"] == {str(cycle_run): verdict}
    lines = line.does("serve", cycle_run, early).splitlines()
    assert lines[1:] == [f"{cycle_run}: {verdict['sentences'][0]}", "Events are kept in segue.sqlite."]


def test_evaluate_at(line: CommandLine, cycle_run: Path) -> None:
    metrics = line.answers("evaluate", cycle_run, "--at", "1,3,12")["metrics"]
    assert sorted(int(name[4:]) for name in metrics if name.startswith("hit@")) == [1, 3, 12]
    assert metrics["hit@12"] == 1.0  # of 12 items
    output = line.does("evaluate", cycle_run, "--at", "3")
    assert "hit@3" in output
    assert "hit@10" not in output


def test_compare(line: CommandLine, cycle_run: Path, other_run: Path) -> None:
    body = line.answers("compare", cycle_run, other_run)
    assert [run["name"] for run in body["runs"]] == ["cycle", "other"]
    ndcg = [run["report"]["metrics"]["ndcg@10"] for run in body["runs"]]
    assert body["runs"][0]["differences"] == {}
    assert body["runs"][1]["differences"]["ndcg@10"]["value"] == pytest.approx(ndcg[1] - ndcg[0])
    output = line.does("compare", cycle_run, other_run)
    assert re.search(r"^other .*\d", output, re.MULTILINE)
    assert list(line.folder.iterdir()) == []


def test_compare_page(line: CommandLine, cycle_run: Path, other_run: Path) -> None:
    output = line.does("compare", cycle_run, other_run, "--html", "page.html")
    assert "Wrote page.html." in output
    page = (line.folder / "page.html").read_text()
    assert page.lower().startswith("<!doctype html>")
    assert 'src="data:image/svg+xml;base64,' in page
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//|@import|url\(["']?https?:""", page)
    assert "<td>1 · cycle</td>" in page
    assert "<td>2 · other</td>" in page
    object_only = line("compare", cycle_run, other_run, "--html", "again.html", "--json")
    assert json.loads(object_only.out)["depths"]
    assert (line.folder / "again.html").exists()


# --- recommend and similar ----------------------------------------------------------------------------------------


def test_recommend(line: CommandLine, cycle_run: Path) -> None:
    body = line.answers("recommend", cycle_run, "--history", "i01,i02", "-k", "5")
    assert list(body) == ["items", "unknown", "fallback"]
    assert (body["unknown"], body["fallback"]) == ([], None)
    assert len(body["items"]) == 5
    assert all(list(item) == ["id", "title", "score"] for item in body["items"])
    scores = [item["score"] for item in body["items"]]
    assert scores == sorted(scores, reverse=True)
    output = line.does("recommend", cycle_run, "--history", "i01,i02", "-k", "5")
    assert [row.split()[:2] for row in output.splitlines()] == [
        [str(rank), name] for rank, name in enumerate(ids(body), start=1)
    ]


def test_recommend_unknown_ids_are_named(line: CommandLine, cycle_run: Path) -> None:
    body = line.answers("recommend", cycle_run, "--history", 'ghost,"a,b",i01,ghost')
    assert body["unknown"] == ["ghost", "a,b"]
    assert body["items"] == line.answers("recommend", cycle_run, "--history", "i01")["items"]
    assert "Unknown items, left out: ghost" in line.does("recommend", cycle_run, "--history", "ghost,i01")


@pytest.mark.parametrize("history", ["", "ghost"])
def test_recommend_without_history_is_popularity(line: CommandLine, cycle_run: Path, history: str) -> None:
    body = line.answers("recommend", cycle_run, "--history", history, "-k", "12")
    counts = dict(pl.read_parquet(cycle_run / "items.parquet").select("id", "count").iter_rows())
    assert body["fallback"] == "popularity"
    assert ids(body) == sorted(counts, key=lambda item: (-counts[item], item))
    assert [item["score"] for item in body["items"]] == [counts[item] for item in ids(body)]
    assert "most popular" in line.does("recommend", cycle_run, "--history", history)


def test_recommend_history_from_a_file(line: CommandLine, cycle_run: Path) -> None:
    expected = line.answers("recommend", cycle_run, "--history", "i01,i02,i03")
    entries = [{"item": "i03", "time": 30}, {"item": "i01", "time": 10}, {"item": "i02", "time": 20}]
    contents = {
        "row.csv": "i01,i02,i03\n",
        "rows.csv": "\ufeffi01\r\ni02\r\ni03\r\n",
        "quoted.csv": '"i01","i02"\n"i03"',
        "plain.json": '["i01", "i02", "i03"]',
        "timed.json": json.dumps(entries),
    }
    for name, content in contents.items():
        Path(name).write_text(content, encoding="utf-8", newline="")
        assert line.answers("recommend", cycle_run, "--history", f"@{name}") == expected, name
    Path("broken.json").write_text('["i01"')
    line.refuses("recommend", cycle_run, "--history", "@broken.json", says=("broken.json looks like JSON",))
    Path("entry.json").write_text('[{"article": "i01"}]')
    says = ("item, time, kind, value", "article")
    line.refuses("recommend", cycle_run, "--history", "@entry.json", says=says)


def test_recommend_limits(line: CommandLine, cycle_run: Path) -> None:
    arguments = ("recommend", cycle_run, "--history", "i01,i02", "-k", "12")
    answer = line.answers(*arguments, "--keep-seen")
    assert sorted(ids(answer)) == ITEMS
    assert line.answers(*arguments) == answer  # the log has repeats, so this is the run's default
    assert ids(line.answers(*arguments, "--no-keep-seen")) == [
        item for item in ids(answer) if item not in ("i01", "i02")
    ]
    assert ids(line.answers(*arguments, "--exclude", "i05,ghost")) == [item for item in ids(answer) if item != "i05"]
    only = [item for item in ids(answer) if item in ("i03", "i07")]
    assert ids(line.answers(*arguments, "--only", "i07,i03,ghost")) == only
    Path("only.txt").write_text("i03\ni07\n")
    assert ids(line.answers(*arguments, "--only", "@only.txt")) == only
    assert ids(line.answers(*arguments, "--only", "@only.txt", "--exclude", "@only.txt")) == []
    assert ids(line.answers("recommend", cycle_run, "--history", "", "--only", "i07,i03", "--exclude", "i03")) == [
        "i07"
    ]


def test_recommend_user(line: CommandLine, cycle_run: Path, cycle_data: Path) -> None:
    log = pl.read_csv(cycle_log().encode())
    history = log.filter(user="u007").sort("timestamp")["item"]
    expected = line.answers("recommend", cycle_run, "--history", ",".join(history))
    assert line.answers("recommend", cycle_run, "--user", "u007") == expected
    assert line.answers("recommend", cycle_run, "--user", "u007", "--data", cycle_data) == expected
    line.refuses("recommend", cycle_run, "--user", "ghost", says=("The user 'ghost' is not among the 60 users",))


def test_recommend_users(line: CommandLine, cycle_run: Path) -> None:
    log = pl.read_csv(cycle_log().encode()).sort("timestamp")
    request_time = log.filter(user="u007")["timestamp"][5]
    Path("users.csv").write_text(f"user,time\nu007,{request_time}\nghost,{request_time}\nu001,9999999999\n")
    body = line.answers("recommend", cycle_run, "--users", "users.csv", "--out", "answers", "-k", "3")
    assert body == {"folder": "answers", "users": 3, "unknown_users": 1, "fallback": 1, "rows": 9, "files": 1}
    answers = pl.read_parquet("answers/*.parquet")
    assert answers["user"].to_list() == ["u007"] * 3 + ["ghost"] * 3 + ["u001"] * 3
    assert answers["rank"].to_list() == [1, 2, 3] * 3
    histories = {
        "u007": log.filter((pl.col("user") == "u007") & (pl.col("timestamp") < request_time))["item"],
        "u001": log.filter(user="u001")["item"],
        "ghost": pl.Series([""]),
    }
    for user, history in histories.items():
        single_answer = line.answers("recommend", cycle_run, "--history", ",".join(history), "-k", "3")
        assert answers.filter(user=user)["item"].to_list() == ids(single_answer), user
    limits = ("--exclude", "i01", "--only", "i01,i02")
    line.does("recommend", cycle_run, "--users", "users.csv", "--out", "few", *limits)
    assert set(pl.read_parquet("few/*.parquet")["item"]) == {"i02"}
    output = line.does("recommend", cycle_run, "--users", "users.csv", "--out", "batch")
    assert "3 users" in output
    assert "batch" in output


def test_similar(line: CommandLine, cycle_run: Path) -> None:
    body = line.answers("similar", cycle_run, "i01", "-k", "12")
    assert sorted(ids(body)) == [item for item in ITEMS if item != "i01"]
    assert all(-1.001 <= item["score"] <= 1.001 for item in body["items"])  # cosines
    assert len(line.does("similar", cycle_run, "i01", "-k", "4").splitlines()) == 4
    line.refuses("similar", cycle_run, "ghost", says=("The item 'ghost' is not one of the 12 items",))


def test_titles_are_shown(line: CommandLine, quick_recipe: Path) -> None:
    (line.folder / "log.csv").write_text(cycle_log())
    write_events(line.folder, {"item": ITEMS, "title": [f"The {item}, [bold]" for item in ITEMS]}, "catalogue.csv")
    line.does("prepare", "log.csv", "--items", "catalogue.csv", "--out", "data")
    line.does("train", "data", "--out", "run", "--recipe", quick_recipe)
    body = line.answers("recommend", "run", "--history", "i01", "-k", "2")
    assert all(item["title"] == f"The {item['id']}, [bold]" for item in body["items"])
    assert f"The {ids(body)[0]}, [bold]" in line.does("recommend", "run", "--history", "i01", "-k", "2")


# --- processes that receive signals -------------------------------------------------------------------------------


@contextmanager
def running(*arguments: object, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """Run the command in its own process, which is killed afterwards in any case."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", "segue.cli", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    finally:
        signal.signal(signal.SIGINT, handler)
    with child as process:
        timer = threading.Timer(300, process.kill)  # generous, for a busy machine
        timer.start()
        try:
            yield process
        finally:
            timer.cancel()
            process.kill()


def test_interrupted_training_writes_a_run_and_is_resumed(
    line: CommandLine, cycle_data: Path, quick_recipe: Path
) -> None:
    without_end = ("--set", "train.epochs=1000000", "--set", "train.patience=1000000")
    with running(
        "train", cycle_data, "--out", "run", "--recipe", quick_recipe, *without_end, cwd=line.folder
    ) as process:
        state = line.folder / "run.partial" / "training.safetensors"
        while not state.exists() and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert process.returncode == 0
    assert "the best simple method" in out and "Made run." in out
    assert "Traceback" not in err
    assert f"To train further: segue train {cycle_data} --out run --resume" in err
    assert [path.name for path in line.folder.iterdir()] == ["run"]

    epochs = json.loads(Path("run/manifest.json").read_text())["training"]["epochs"]
    body = line.answers("train", cycle_data, "--out", "run", "--resume", "--set", f"train.epochs={epochs + 1}")
    assert body["training"]["epochs"] == epochs + 1
    assert [path.name for path in line.folder.iterdir()] == ["run"]
    assert line.answers("evaluate", "run") == body["report"]


def test_serve(line: CommandLine, cycle_run: Path) -> None:
    """On a terminal, ended by Ctrl-C; tests/serving/test_server.py has --json, ended by SIGTERM."""
    expected = line.answers("recommend", cycle_run, "--history", "i01,i02", "-k", "3")
    with running("serve", cycle_run, "--port", "0", cwd=line.folder) as process:
        assert process.stdout is not None
        first_line = process.stdout.readline()  # printed once the port is open
        url = re.findall(r"http://[\d.:]+", first_line)[0]
        verdict = json.loads((cycle_run / "metrics.json").read_text())["verdict"]["sentences"][0]
        assert process.stdout.readline() == f"{cycle_run}: {verdict}\n"
        assert process.stdout.readline() == "Events are kept in segue.sqlite.\n"
        with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
            health = client.get("/health/ready")
            answer = client.post("/recommendations", json={"history": ["i01", "i02"], "k": 3})
            page = client.get("/schema")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert (health.status_code, answer.status_code, page.status_code) == (200, 200, 200)
    assert answer.json() == {**expected, "model": cycle_run.name}
    assert out == ""
    assert "Traceback" not in err
    assert all(json.loads(line)["level"] == "info" for line in err.splitlines())
    assert process.returncode == 130
    assert [path.name for path in line.folder.iterdir()] == ["segue.sqlite"], "closed, and no other file"


def test_serve_on_an_impossible_port(line: CommandLine, cycle_run: Path) -> None:
    """No address is printed unless it is served."""
    line.refuses("serve", cycle_run, "--port", "70000", says=("0 to 65535", "70000", "--port"))
    public_address = ("serve", cycle_run, "--port", "0", "--host", "203.0.113.7")
    line.refuses(*public_address, says=("Without keys", "203.0.113.7", "--keys"))
    (line.folder / "keys.toml").write_text('read = ["a-key-of-sixteen-characters"]')
    (line.folder / "keys.toml").chmod(0o600)
    line.refuses(*public_address, "--keys", "keys.toml", says=("203.0.113.7", "--host"))


def test_output_is_utf8_whatever_the_terminal(tmp_path: Path) -> None:
    """Ids are read as UTF-8, so they are written as UTF-8."""
    (tmp_path / "log.csv").write_text(cycle_log())
    process = subprocess.run(
        [sys.executable, "-m", "segue.cli", "prepare", "log.csv", "--out", "😀"],
        capture_output=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert "Made 😀." in process.stdout.decode()


def test_the_reader_of_a_pipe_may_close_it(tmp_path: Path) -> None:
    command = f"{sys.executable} -m segue.cli --version | true; exit ${{PIPESTATUS[0]}}"
    process = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (process.returncode, process.stderr) == (0, "")
