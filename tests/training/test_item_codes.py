"""Codes that are learned: by a small model, of nothing but the training part, taken up where they were stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cycle_logs import sequences_of
from settings_tables import model_settings

from segue.data.sequences import Sequences
from segue.data.split import split_last
from segue.training import item_codes as codes_module
from segue.training.item_codes import assign_item_codes
from segue.training.loop import TrainingProgress
from segue.training.settings import TrainSettings

N_ITEMS = 40
LEARNED = model_settings(width=8, items="codes", items__assignment="learned", items__parts=4, items__values=6).items


@pytest.fixture(autouse=True)
def few_negatives(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand would be twenty-five times the catalogue."""
    monkeypatch.setattr(codes_module, "NEGATIVES", 50)


def kinds_log(seed: int = 3) -> Sequences:
    """Everybody keeps to one of four kinds of ten items each, but for the last two events, which are always 1 and 2."""
    rng, kinds = np.random.default_rng(seed), np.arange(1, N_ITEMS + 1).reshape(4, 10)
    return sequences_of(*([*rng.permutation(kinds[user % 4]).tolist(), 1, 2] for user in range(80)))


def found(
    folder: Path, log: Sequences, *, n_items: int = N_ITEMS, progress: Callable[[TrainingProgress], None] | None = None
) -> np.ndarray:
    folder.mkdir(exist_ok=True)
    ends, train = split_last(log).train_end, TrainSettings(threads=1, device="cpu")
    codes = assign_item_codes(LEARNED, train, log, ends, n_items, state_file=folder / "state", progress=progress)
    assert codes.shape == (n_items + 1, 4) and codes.dtype == np.uint8 and codes.max() < 6
    return codes


def test_items_that_follow_each_other_are_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codes_module, "LEAST_STEPS", 200)
    codes, same = found(tmp_path, kinds_log())[1:], np.kron(np.eye(4), np.ones((10, 10))) > 0
    alike = (codes[:, None] == codes[None]).mean(2)
    assert alike[same & ~np.eye(N_ITEMS, dtype=bool)].mean() > 1.25 * alike[~same].mean()


def test_what_is_held_out_changes_no_code_and_what_was_not_met_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codes_module, "LEAST_STEPS", 30)
    log = kinds_log()
    other = log.items.copy()
    other[log.offsets[1:] - 1], other[log.offsets[1:] - 2] = 41, 7
    changed = Sequences(offsets=log.offsets, items=other, times=log.times)
    codes, same = (found(tmp_path / name, each, n_items=41) for name, each in (("a", log), ("b", changed)))
    assert np.array_equal(codes, same) and not codes[41].any() and codes.any()


def test_it_is_taken_up_where_it_was_stopped_and_told_apart_from_the_model_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codes_module, "LEAST_STEPS", 10)
    steps: list[TrainingProgress] = []

    def stopped(step: TrainingProgress) -> None:
        if step.epoch == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        found(tmp_path / "stopped", kinds_log(), progress=stopped)
    assert np.array_equal(
        found(tmp_path / "stopped", kinds_log(), progress=steps.append), found(tmp_path / "whole", kinds_log())
    )
    assert {step.epoch for step in steps} >= {4} and min(step.epoch for step in steps) > 1, "not from the beginning"
    assert all(step.of == "codes" and step.scores is None for step in steps)
