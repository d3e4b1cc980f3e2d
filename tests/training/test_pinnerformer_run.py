"""PinnerFormer from a log with kinds, values and times to a run, with items by id and by content."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import segue
from segue.data.dataset import Data
from segue.errors import SettingsError
from segue.models.checkpoint import load_model
from segue.recommend.recommender import Recommender

SMALL = (
    "model.width=16",
    "model.heads=2",
    "model.depth=1",
    "model.length=8",
    "objective.sampler.negatives=8",
    "train.epochs=1",
    "train.tokens=200",
    "train.threads=1",
)
IDS = [f"i{number}" for number in range(12)]
DAY = 86_400


def log_of(*, with_times: bool = True) -> pl.DataFrame:
    """Forty users of nine events each, hours to days apart."""
    rng = np.random.default_rng(5)
    users, events = 40, 9
    gaps = rng.integers(3600, 3 * DAY, (users, events))
    columns: dict[str, Any] = {
        "user": np.repeat([f"u{number}" for number in range(users)], events),
        "item": rng.choice(IDS, users * events),
        "kind": rng.choice(["buy", "look", "save@home"], users * events),
        "value": rng.integers(0, 90, users * events).astype(float),
    }
    times = {"time": (1_700_000_000 + np.cumsum(gaps, axis=1)).ravel()} if with_times else {}
    return pl.DataFrame(columns | times)


@pytest.fixture(name="data", scope="module")
def data_with_kinds(tmp_path_factory: pytest.TempPathFactory) -> Data:
    catalogue = pl.DataFrame({"item": IDS, "title": [f"thing {number % 5} of {number // 5}" for number in range(12)]})
    out = tmp_path_factory.mktemp("logs") / "data"
    return segue.prepare(log_of(), out=out, kind="kind", value="value", items=catalogue, min_item=1)


def train(data: Data, out: Path, *more: str) -> Recommender:
    return segue.train(data, out=out, recipe="pinnerformer", overrides=[*SMALL, *more])


def test_a_run_saves_the_names_of_kinds_and_distinguishes_them(data: Data, tmp_path: Path) -> None:
    run = train(data, tmp_path / "run")
    assert list(load_model(tmp_path / "run").kinds) == ["buy", "look", "save@home"] == data.kinds
    history = [
        {"item": item, "time": 1_700_000_000 + position * DAY, "kind": "buy"} for position, item in enumerate(IDS[:4])
    ]
    after_buy, after_look = run.recommend(history), run.recommend([*history[:3], {**history[3], "kind": "look"}])
    assert [item.score for item in after_buy.items] != [item.score for item in after_look.items]
    loaded = segue.load(tmp_path / "run")
    assert isinstance(loaded, Recommender) and loaded.recommend(history) == after_buy
    assert segue.evaluate(tmp_path / "run", data=data).cases == 40


def test_items_may_be_known_by_their_content(data: Data, tmp_path: Path) -> None:
    """The item network has another width than tokens."""
    content = (
        "model.items=vectors",
        'model.items.texts=["title"]',
        "model.items.text_encoder.width=8",
        "model.items.hidden=12",
    )
    run = train(data, tmp_path / "run", *content, "model.output.item_width=6")
    assert run.model.item_vectors().shape == (13, 6)
    np.testing.assert_allclose(run.model.item_vectors()[1:].norm(dim=1).numpy(), 1, atol=1e-5)
    assert len(run.recommend(IDS[:3], keep_seen=False).items) == 9


def test_a_log_without_times_is_refused_if_times_are_inputs(tmp_path: Path) -> None:
    data = segue.prepare(log_of(with_times=False), out=tmp_path / "data", kind="kind", min_item=1)
    with pytest.raises(SettingsError, match=r"needs times, and .* has only an order: prepare"):
        train(data, tmp_path / "run")
    assert not list(tmp_path.glob("run*"))
    run = train(data, tmp_path / "run", "model.inputs.times=[]", "objective.task=next-item")
    assert not run.recommend(IDS[:3]).untimed
