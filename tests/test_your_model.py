"""docs/your-model.md, run: its files are written, its laws checked, its model trained, saved, loaded and served."""

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
    """Its blocks of Python, each of which begins with the name of its file."""
    blocks = re.findall(
        r"^```python\n# (\w+\.py)\n(.*?)^```$", document.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    return dict(blocks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One stands in a folder with the document's files and a log in which everyone walks round the items."""
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


def test_it_keeps_the_laws(folder: Path) -> None:
    runpy.run_path(str(folder / "test_decayed_mean.py"))["test_the_laws"]()


@pytest.fixture(scope="module")
def trained(folder: Path) -> dict[str, Any]:
    """The training's script, run; it ends well before it stops to learn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segue, "train", quickly(segue.train))
        return runpy.run_path(str(folder / "train_decayed_mean.py"))


def quickly(train: Any) -> Any:
    """The same verb with less to do."""
    quick = ["model.width=32", "model.length=20", "train.epochs=12", "train.patience=12", "train.threads=1"]
    quick += ["train.learning_rate=0.01", "train.tokens=600", "train.warmup=0"]

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
    assert {name: looks.shape for name, looks in weights.items()} == {"layer 1": (4, 3, 3), "layer 2": (4, 3, 3)}
    assert all(looks.sum(-1) == pytest.approx(1, abs=1e-5) for looks in weights.values())


@pytest.mark.usefixtures("trained")
def test_it_is_served(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    met: dict[str, Any] = {}
    monkeypatch.setattr("uvicorn.run", lambda app, **options: met.update(options, app=app))
    runpy.run_path(str(folder / "serve_decayed_mean.py"))
    assert (met["host"], met["port"]) == ("127.0.0.1", 8000)
    with in_process_client(met["app"]) as client:
        assert client.get("/model").json()["active"] == "decayed-mean"
        post_events(client, {"user": "ann", "item": "kettle"}, {"user": "ann", "item": "scale"})
        assert ids(client.get("/users/ann/recommendations", params={"k": 1})) == ["milk"]
        post_events(client, {"user": "ann", "item": "milk"})
        assert ids(client.get("/users/ann/recommendations", params={"k": 1})) == ["tea"]
        assert client.post("/explanations", json={"user": "ann"}).json()["attention"] is not None
