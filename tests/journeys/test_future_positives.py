"""Positives by kind and over a window of days, from Python."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import segue
from segue.errors import SettingsError

AHEAD = [
    "objective.task=dense-all-action",
    "objective.task.days=0.5",
    "objective.task.labels=4",
    'objective.task.positive=[{kind = "buy", min_value = 0.5}]',
    "objective.loss=sampled-softmax",
    "objective.sampler=targets+uniform",
    "objective.sampler.negatives=20",
    "objective.equal_users=true",
]
EPOCHS = ["train.patience=9", "train.averaging=0.9"]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> segue.Data:
    """Each user looks at ten of twelve items, one per hour, and buys every third a minute later, at home or away."""
    folder, rng = tmp_path_factory.mktemp("shop"), np.random.default_rng(1)
    rows = ["user,item,timestamp,kind,value"]
    for user in range(40):
        for step, item in enumerate(rng.permutation(12)[:10]):
            now = 1_600_000_000 + 3600 * step
            rows.append(f"u{user},i{item},{now},look,")
            if item % 3 == 0:
                rows.append(f"u{user},i{item},{now + 60},buy@{'home' if item % 2 else 'away'},{1 + user % 2}")
    (folder / "log.csv").write_text("\n".join(rows) + "\n")
    return segue.prepare(folder / "log.csv", out=folder / "data", kind="kind", value="value", min_item=1)


def test_training_on_future_positives_is_resumed_exactly(shop: segue.Data, quick_recipe: Path, tmp_path: Path) -> None:
    """Target counts and positives are saved with the training state."""
    whole, short = tmp_path / "whole", tmp_path / "short"
    segue.train(shop, out=whole, recipe=quick_recipe, overrides=[*AHEAD, *EPOCHS, "train.epochs=4"])
    segue.train(shop, out=short, recipe=quick_recipe, overrides=[*AHEAD, *EPOCHS, "train.epochs=2"])
    segue.train(shop, out=short, resume=True, overrides=["train.epochs=4"])
    for name in ("weights.safetensors", "history.jsonl"):
        assert (whole / name).read_bytes() == (short / name).read_bytes()
    assert 'positive = [{kind = "buy", min_value = 0.5}]' in (short / "settings.toml").read_text()


def test_kinds_and_values_that_the_log_does_not_have_are_refused_without_a_folder(
    shop: segue.Data, cycle_data: Path, quick_recipe: Path, tmp_path: Path
) -> None:
    task = "objective.task=next-action"
    with pytest.raises(SettingsError, match="'sell', which the log does not have; it has buy@away, buy@home, look"):
        segue.train(
            shop, out=tmp_path / "run", recipe=quick_recipe, overrides=[task, 'objective.task.positive=[{kind="sell"}]']
        )
    for entry, missing in (('{kind="buy"}', "no kinds"), ("{min_value=1}", "no values")):
        with pytest.raises(SettingsError, match=missing):
            segue.train(
                cycle_data,
                out=tmp_path / "run",
                recipe=quick_recipe,
                overrides=[task, f"objective.task.positive=[{entry}]"],
            )
    assert not list(tmp_path.iterdir())
