"""The active run: switched by name, refused with a sentence, followed by every replica, kept over a restart."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest
from small_service import Client, assert_problem, guarded, ids, in_process_client

from segue.errors import FolderError, InputError
from segue.folders import digest
from segue.models.checkpoint import WEIGHTS
from segue.recommend.answer import Recommendation, ScoredItem
from segue.serving.engine import models as models_module
from segue.serving.engine.channel import LocalEngine
from segue.serving.engine.engine import ServingEngine
from segue.serving.engine.models import Models
from segue.serving.engine.served_model import ServedModel
from segue.serving.http.metrics import Metrics
from segue.serving.requests import CannotSwitchError, RecommendationQuery, UnknownModelError
from segue.serving.service import Service
from segue.serving.store.store import AddedItem, Event, HistoryStore, open_store

HISTORY = ["i01", "i02"]


@pytest.fixture(name="runs", scope="module")
def runs_folder(cycle_run: Path, cycle_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs to switch between: two that can be served and answer differently, and the ones that cannot."""
    runs = tmp_path_factory.mktemp("runs")
    for name in ("one", "two", "damaged", "unmeasured", "stranger", "old"):
        shutil.copytree(cycle_run, runs / name)
        change(runs / name, seen="kept" if name == "two" else "excluded")
    shutil.copytree(cycle_data, runs / "data")
    change(runs / "one", **{"from": {"folder": str(cycle_run), "digest": "0" * 64}})
    spoil(runs / "damaged" / WEIGHTS)
    spoil(runs / "unmeasured" / "metrics.json")
    change(runs / "old", format=0)
    rename_items(runs / "stranger")
    (runs / "empty").mkdir()
    (runs / "file").write_text("no folder")
    (runs / "text").mkdir()
    (runs / "text" / "manifest.json").write_text("no JSON")
    return runs


def change(run: Path, **facts: Any) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps(manifest | facts))


def spoil(file: Path) -> None:
    """Another file of the same size."""
    content = bytearray(file.read_bytes())
    content[-2] ^= 0xFF
    file.write_bytes(content)


def rename_items(run: Path) -> None:
    """Make it a valid run of another catalogue."""
    file = run / "items.parquet"
    pl.read_parquet(file).with_columns(pl.concat_str(pl.lit("other-"), "id").alias("id")).write_parquet(file)
    files = json.loads((run / "manifest.json").read_text())["files"]
    files[file.name] = {"bytes": file.stat().st_size, "sha256": digest(file)}
    change(run, files=files)


@pytest.fixture(name="store")
def store_fixture(tmp_path: Path) -> Iterator[HistoryStore]:
    store = open_store(str(tmp_path / "events.sqlite"))
    yield store
    store.close()


def models(store: HistoryStore, runs: Path, *names: str, fixed: bool = False, joining: bool = False) -> Models:
    entries = [ServedModel.open(runs / name) for name in names]
    return Models(entries, runs=None if fixed else runs, store=store, joining=joining)


def copy_runs(runs: Path, folder: Path) -> Path:
    """Copy both runs to a folder where one may be removed."""
    for name in ("one", "two"):
        shutil.copytree(runs / name, folder / "runs" / name)
    return folder / "runs"


@contextmanager
def service(file: Path, runs: Path, *names: str) -> Iterator[Client]:
    """A replica; several may share a store."""
    store = open_store(str(file))
    live = Service(LocalEngine(ServingEngine(models(store, runs, *names), store)), store, Metrics())
    with in_process_client(guarded(live)) as client:
        yield client


def serves(client: Client) -> str:
    body = client.post("/recommendations", json={"history": HISTORY, "k": 100})
    name: str = body.json()["model"]
    assert ("i01" in ids(body)) == (name == "two"), "the second run keeps seen items, the first does not"
    return name


# --- over HTTP ------------------------------------------------------------------------------------------------------


def test_the_model_card(runs: Path, tmp_path: Path) -> None:
    with service(tmp_path / "s", runs, "one", "two") as client:
        response = client.get("/model")
    body = response.json()
    assert (body["active"], body["previous"]) == ("one", None)
    assert {"one", "two"} <= set(body["switchable"])
    assert not {"empty", "file"} & set(body["switchable"])
    card, other = body["models"]
    assert (card["name"], card["seen"], other["name"], other["seen"]) == ("one", "excluded", "two", "kept")
    assert (card["items"], card["length"], card["attention"], card["columns"]) == (12, 20, True, [])
    report = json.loads((runs / "one" / "metrics.json").read_text())
    assert card["report"] == report
    assert {"metrics", "baselines", "cases"} <= set(report)
    assert (card["manifest"]["kind"], card["manifest"]["recipe"]) == ("run", "quick.toml")
    assert "files" not in card["manifest"]
    assert card["manifest"]["from"] == {"digest": "0" * 64}, "the digest of the parent run, not its path"
    assert str(tmp_path.parent) not in response.text, "no path of this machine"
    assert "/tmp" not in response.text
    assert "u007" not in response.text


def test_switch_and_rollback(runs: Path, tmp_path: Path) -> None:
    with service(tmp_path / "s", runs, "one") as client:
        assert serves(client) == "one"
        assert_problem(client.post("/model/rollback"), 409, "no run to go back to")
        response = client.put("/model", json={"run": "two"})
        assert (response.status_code, response.json()) == (200, {"active": "two", "previous": "one"})
        assert serves(client) == "two"
        assert client.put("/model", json={"run": "two"}).json() == {"active": "two", "previous": "one"}
        status = client.get("/model").json()
        assert (status["active"], status["previous"]) == ("two", "one")
        assert [card["name"] for card in status["models"]] == ["two"]
        assert 'name="two"} 1.0' in client.get("/metrics").text
        assert client.post("/model/rollback").json() == {"active": "one", "previous": "two"}
        assert serves(client) == "one"
        assert client.post("/model/rollback").json() == {"active": "two", "previous": "one"}
        assert serves(client) == "two"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("../one", "no run called '../one' under --runs; there is: "),
        ("./one", "no run called"),
        ("one/", "no run called"),
        ("ABSOLUTE", "no run called"),
        (".", "no run called '.'"),
        ("..", "no run called"),
        ("", "no run called ''"),
        ("one\0", "no run called"),
        ("\n", "no run called"),
        ("x" * 255, "no run called"),
        ("nothing", "no run called 'nothing'"),
        ("file", "no run called 'file'"),
        ("empty", "no run called 'empty'"),
        ("data", "data folder"),
        ("text", "damaged"),
        ("damaged", "damaged"),
        ("unmeasured", "damaged"),
        ("old", "format 0"),
        ("stranger", "knows 0 of the 12 items being served: it was trained on another catalogue"),
    ],
)
def test_a_bad_run_is_refused_and_the_old_one_stays_active(bad: Client, runs: Path, name: str, sentence: str) -> None:
    name = str(runs / "two") if name == "ABSOLUTE" else name
    assert_problem(bad.put("/model", json={"run": name}), 409, sentence)
    assert serves(bad) == "one"
    response = bad.get("/model")
    assert response.status_code == 200, response.text
    assert (response.json()["active"], response.json()["previous"]) == ("one", None)


@pytest.fixture(name="bad", scope="module")
def client_of_refusals(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with service(tmp_path_factory.mktemp("bad") / "s", runs, "one") as client:
        yield client


@pytest.mark.parametrize("body", [{}, {"run": None}, {"run": ["two"]}, {"run": "x" * 256}, {"run": "two", "path": "/"}])
def test_a_body_that_names_no_run(bad: Client, body: dict[str, Any]) -> None:
    assert_problem(bad.put("/model", json=body), 400, "cannot be used")
    assert serves(bad) == "one"


def test_removed_runs(runs: Path, tmp_path: Path) -> None:
    """The folder of runs is removed, and the active run with it."""
    folder = tmp_path / "runs"
    shutil.copytree(runs / "one", folder / "one")
    shutil.copytree(runs / "two", folder / "two")
    with service(tmp_path / "s", folder, "one") as client:
        client.put("/model", json={"run": "two"})
        shutil.rmtree(folder)
        assert serves(client) == "two", "the active run is in memory"
        assert_problem(client.post("/model/rollback"), 409, "The run 'one' cannot be served: .* does not exist")
        assert_problem(client.put("/model", json={"run": "one"}), 409, "cannot be served|cannot be read")
        assert serves(client) == "two"
        assert client.get("/model").status_code in (200, 409)


def test_replicas_follow_each_other_within_a_second(runs: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        first, second = (stack.enter_context(service(tmp_path / "s", runs, "one")) for _ in range(2))

        def wait_until_followed(client: Client, name: str) -> None:
            limit = time.monotonic() + 1
            while serves(client) != name:
                assert time.monotonic() < limit, f"{name} was not followed within a second"
                time.sleep(0.02)

        first.put("/model", json={"run": "two"})
        wait_until_followed(second, "two")
        assert second.get("/model").json()["previous"] == "one"
        assert 'name="two"} 1.0' in second.get("/metrics").text
        assert second.post("/model/rollback").json() == {"active": "one", "previous": "two"}
        wait_until_followed(first, "one")


def test_a_switch_loses_no_request(runs: Path, tmp_path: Path) -> None:
    answers: list[tuple[int, str]] = []
    stop = threading.Event()
    with service(tmp_path / "s", runs, "one") as client:

        def ask() -> None:
            while not stop.is_set():
                response = client.post("/recommendations", json={"history": HISTORY, "k": 100})
                answers.append((response.status_code, response.json().get("model", "")))
                assert ("i01" in ids(response)) == (answers[-1][1] == "two")

        querying = threading.Thread(target=ask)
        querying.start()
        for _ in range(3):
            assert client.put("/model", json={"run": "two"}).status_code == 200
            assert client.post("/model/rollback").status_code == 200
        stop.set()
        querying.join()
    assert {status for status, _ in answers} == {200}
    assert {name for _, name in answers} == {"one", "two"}


# --- agreement by the store -----------------------------------------------------------------------------------------


def test_a_restart_resumes_the_active_run(runs: Path, store: HistoryStore) -> None:
    models(store, runs, "one").switch("two")
    again = models(store, runs, "one")
    assert again.active.name == "two"
    assert again.status().previous == "one"
    assert again.switch(None).active == "one"


def test_a_restart_with_another_run_switches_to_it(runs: Path, store: HistoryStore) -> None:
    first = models(store, runs, "one")
    first.switch("two")
    shutil.copytree(runs / "one", runs / "three", dirs_exist_ok=True)
    other = models(store, runs, "three")
    assert (other.active.name, other.status().previous) == ("three", "two")
    assert first.follow(), "the other replicas follow"
    assert first.active.name == "three"
    assert not first.follow()
    assert first.switch(None).active == "two", "the switch can be rolled back"


def test_a_restarted_process_does_not_switch_the_others_back(runs: Path, store: HistoryStore) -> None:
    """Of two replicas the second was started with another run, which the first follows; then its engine dies."""
    models(store, runs, "one")
    second = models(store, runs, "two")
    again = models(store, runs, "one", joining=True)
    assert again.active.name == second.active.name == "two"
    assert not second.follow()
    assert second.status().previous == "one"


def test_an_unavailable_run_blocks_no_other_change(
    runs: Path, store: HistoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is retried after a pause, not at every check; a later switch is followed at once."""
    folder = copy_runs(runs, tmp_path)
    now = [0.0]
    monkeypatch.setattr(models_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    elsewhere, local = models(store, runs, "one"), models(store, folder, "one")
    elsewhere.switch("two")
    (folder / "two").rename(folder / "aside")
    with pytest.raises(CannotSwitchError):
        local.follow()
    assert not local.follow()
    store.add_items([AddedItem("new", {"title": "New"})])
    assert local.follow(), "new items are still followed"
    (folder / "aside").rename(folder / "two")
    assert not local.follow() and local.active.name == "one"
    now[0] = models_module.RETRY_SECONDS
    assert local.follow() and local.active.name == "two"
    elsewhere.switch("one")
    assert local.follow() and local.active.name == "one"


def test_a_restart_without_the_active_run_serves_its_argument(
    runs: Path, store: HistoryStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copy_runs(runs, tmp_path)
    models(store, folder, "one").switch("two")
    (folder / "two").rename(folder / "aside")
    again = models(store, folder, "one")
    assert again.active.name == "one"
    assert again.status().active == "one"
    assert "The run two was active and cannot be served" in caplog.text
    (folder / "aside").rename(folder / "two")
    assert again.switch("two").active == "two"
    assert again.active.name == "two", "it is served, not only reported"


def test_of_two_concurrent_switches_one_wins_and_the_other_fails(
    runs: Path, store: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = models(store, runs, "one"), models(store, runs, "one")
    load = ServedModel.open

    def slow(folder: Path, *, cache_bytes: int) -> ServedModel:
        monkeypatch.undo()
        second.switch("two")  # while the first is loading
        return load(folder, cache_bytes=cache_bytes)

    shutil.copytree(runs / "one", runs / "three", dirs_exist_ok=True)
    monkeypatch.setattr(ServedModel, "open", slow)
    with pytest.raises(CannotSwitchError, match="Another switch came first"):
        first.switch("three")
    assert first.active.name == "one"
    assert first.follow()
    assert first.active.name == second.active.name == "two"


def test_a_replica_reads_the_active_run_before_it_switches(runs: Path, store: HistoryStore) -> None:
    first, second = models(store, runs, "one"), models(store, runs, "one")
    first.switch("two")
    assert second.switch("one").previous == "two"
    assert first.switch(None).active == "two"


def test_an_unavailable_run_blocks_no_switch(runs: Path, store: HistoryStore, tmp_path: Path) -> None:
    folder = copy_runs(runs, tmp_path)
    elsewhere, local = models(store, runs, "one"), models(store, folder, "one")
    elsewhere.switch("two")
    shutil.rmtree(folder / "two")
    with pytest.raises(CannotSwitchError, match="no run called 'two'"):
        local.follow()
    assert local.active.name == "one"
    assert local.switch("one").active == "one", "an administrator may switch all replicas back"
    assert elsewhere.follow()
    assert elsewhere.active.name == "one"


def test_an_unavailable_run_does_not_keep_deleted_histories_cached(
    runs: Path, store: HistoryStore, tmp_path: Path
) -> None:
    shutil.copytree(runs / "one", tmp_path / "runs" / "one")
    engine = ServingEngine(models(store, tmp_path / "runs", "one"), store)
    models(store, runs, "one").switch("two")
    store.append([Event(user="anna", item=item, time=position) for position, item in enumerate(HISTORY * 8)])
    for _ in range(2):
        engine.answer([RecommendationQuery(user="anna")])
    caches = engine.models.active.kv_caches
    assert caches.users == ["anna"]
    store.delete_users(["anna"])
    with in_process_client(guarded(Service(LocalEngine(engine), store, Metrics()))):
        limit = time.monotonic() + 5
        while caches.users:
            assert time.monotonic() < limit
            time.sleep(0.02)
    assert engine.models.active.name == "one"


def test_without_a_folder_of_runs_a_switch_is_refused(runs: Path, store: HistoryStore) -> None:
    fixed = models(store, runs, "one", "two", fixed=True)
    with pytest.raises(CannotSwitchError, match="start it with --runs FOLDER to switch among them"):
        fixed.switch("two")
    assert fixed.status().switchable == []


def test_either_of_two_models_may_become_active(runs: Path, store: HistoryStore) -> None:
    both = models(store, runs, "one", "two")
    assert both.named("two").name == "two"
    both.switch("two")
    assert both.active is both.named(None) is both.named("two")
    assert both.switch(None).active == "one"
    assert [card.name for card in both.status().models] == ["one", "two"]


def test_two_models_need_different_names(runs: Path, store: HistoryStore, tmp_path: Path) -> None:
    shutil.copytree(runs / "two", tmp_path / "one")
    entries = [ServedModel.open(runs / "one"), ServedModel.open(tmp_path / "one")]
    with pytest.raises(InputError, match="two runs are both called 'one'"):
        Models(entries, runs=None, store=store)
    with pytest.raises(UnknownModelError, match="No model called 'three' is being served; there is: one"):
        Models(entries[:1], runs=None, store=store).named("three")


def test_a_model_whose_test_query_fails_is_not_served(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recommender = ServedModel.open(runs / "one").recommender
    nothing = Recommendation(items=[ScoredItem(id="i01", title=None, score=float("nan"))])
    monkeypatch.setattr(recommender, "recommend", lambda *_, **__: nothing)
    with pytest.raises(FolderError, match="The run broken does not answer its self-test; train it again"):
        ServedModel("broken", recommender)
