"""docs/your-model.md as a program: its model is checked, trained, saved, loaded and served."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from small_service import ids, in_process_client, post_events

import segue

DOCUMENT = Path(__file__).parent.parent / "docs" / "your-model.md"
ITEMS = ["espresso", "grinder", "beans", "cups", "filter", "kettle", "scale", "milk", "tea", "honey"]


def files_of(document: Path) -> dict[str, str]:
    """The document's Python blocks by file name, which is the first line of each."""
    blocks = re.findall(
        r"^```python\n# (\w+\.py)\n(.*?)^```$", document.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    return dict(blocks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder, with the document's files and a log of one cycle of items."""
    folder = tmp_path_factory.mktemp("your-model")
    for name, source in files_of(DOCUMENT).items():
        (folder / name).write_text(source, encoding="utf-8")
    rows = [(f"u{user}", ITEMS[(user + step) % len(ITEMS)], step) for user in range(50) for step in range(12)]
    pl.DataFrame(rows, schema=["user", "item", "time"], orient="row").write_csv(folder / "events.csv")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        yield folder
        sys.modules.pop("decayed_mean", None)


def test_the_model_takes_about_a_hundred_lines() -> None:
    files = files_of(DOCUMENT)
    assert sorted(files) == [
        *("decayed_mean.py", "serve_decayed_mean.py", "test_decayed_mean.py", "train_decayed_mean.py")
    ]
    assert DOCUMENT.read_text(encoding="utf-8").count("```python") == 4, "each block has a name, so each is run"
    assert 60 <= len(files["decayed_mean.py"].splitlines()) <= 110


def test_it_passes_the_laws(folder: Path) -> None:
    runpy.run_path(str(folder / "test_decayed_mean.py"))["test_the_laws"]()


@pytest.fixture(scope="module")
def trained(folder: Path) -> dict[str, Any]:
    """The result of the training script, with fewer epochs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segue, "train", with_fewer_epochs(segue.train))
        return runpy.run_path(str(folder / "train_decayed_mean.py"))


def with_fewer_epochs(train: Any) -> Any:
    """`train` with fewer epochs."""
    quick = ["model.width=32", "model.length=20", "model.dropout=0.2", "train.epochs=12", "train.patience=12"]
    quick += ["train.threads=1", "train.learning_rate=0.01", "train.tokens=600", "train.warmup=0"]

    def train_less(data: Any, *, overrides: list[str], **options: Any) -> Any:
        return train(data, overrides=[*overrides, *quick], **options)

    return train_less


def test_it_is_trained_saved_and_loaded(folder: Path, trained: dict[str, Any]) -> None:
    model = trained["model"]
    assert model.folder == Path("runs/decayed-mean") and (folder / model.folder).is_dir()
    assert 'encoder = "decayed_mean:build"' in (model.folder / "settings.toml").read_text()
    assert segue.evaluate(model, data=trained["data"]).metrics["hit@1"] == 1, "the walk is certain"
    assert model.recommend(["espresso", "grinder"], k=1).ids == ["beans"]
    with pytest.raises(segue.errors.SettingsError, match="decayed_mean:build"):
        segue.load(model.folder)


def test_it_is_explained(trained: dict[str, Any]) -> None:
    weights = trained["model"].attention(["espresso", "grinder", "beans"])
    assert {name: rows.shape for name, rows in weights.items()} == {"layer 1": (4, 3, 3), "layer 2": (4, 3, 3)}
    assert all(rows.sum(-1) == pytest.approx(1, abs=1e-5) for rows in weights.values())


@pytest.mark.usefixtures("trained")
def test_it_is_served(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record: dict[str, Any] = {}
    monkeypatch.setattr("uvicorn.run", lambda app, **options: record.update(options, app=app))
    runpy.run_path(str(folder / "serve_decayed_mean.py"))
    assert (record["host"], record["port"]) == ("127.0.0.1", 8000)
    with in_process_client(record["app"]) as client:
        assert client.get("/model").json()["active"] == "decayed-mean"
        post_events(client, {"user": "ann", "item": "kettle"}, {"user": "ann", "item": "scale"})
        assert ids(client.get("/users/ann/recommendations", params={"k": 1})) == ["milk"]
        post_events(client, {"user": "ann", "item": "milk"})
        assert ids(client.get("/users/ann/recommendations", params={"k": 1})) == ["tea"]
        assert client.post("/explanations", json={"user": "ann"}).json()["attention"] is not None
