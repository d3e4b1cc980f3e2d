"""Learned item codes: from a small model, from the training part alone, and resumed after a stop."""

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
def fewer_negatives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default of 1,000 is twenty-five times this catalogue."""
    monkeypatch.setattr(codes_module, "NEGATIVES", 50)


def grouped_log(seed: int = 3) -> Sequences:
    """Each user stays in one of four groups of ten items, except for the last two events, always 1 and 2."""
    rng, groups = np.random.default_rng(seed), np.arange(1, N_ITEMS + 1).reshape(4, 10)
    return sequences_of(*([*rng.permutation(groups[user % 4]).tolist(), 1, 2] for user in range(80)))


def learned_codes(
    folder: Path, log: Sequences, *, n_items: int = N_ITEMS, progress: Callable[[TrainingProgress], None] | None = None
) -> np.ndarray:
    folder.mkdir(exist_ok=True)
    ends, train = split_last(log).train_end, TrainSettings(threads=1, device="cpu")
    codes = assign_item_codes(LEARNED, train, log, ends, n_items, state_file=folder / "state", progress=progress)
    assert codes.shape == (n_items + 1, 4) and codes.dtype == np.uint8 and codes.max() < 6
    return codes


def test_items_of_the_same_users_have_similar_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codes_module, "LEAST_STEPS", 200)
    codes, same_group = learned_codes(tmp_path, grouped_log())[1:], np.kron(np.eye(4), np.ones((10, 10))) > 0
    agreement = (codes[:, None] == codes[None]).mean(2)
    assert agreement[same_group & ~np.eye(N_ITEMS, dtype=bool)].mean() > 1.25 * agreement[~same_group].mean()


def test_held_out_events_change_no_code_and_cold_items_have_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codes_module, "LEAST_STEPS", 30)
    log = grouped_log()
    items = log.items.copy()
    items[log.offsets[1:] - 1], items[log.offsets[1:] - 2] = 41, 7
    changed = Sequences(offsets=log.offsets, items=items, times=log.times)
    codes, codes_after_change = (
        learned_codes(tmp_path / name, sequences, n_items=41) for name, sequences in (("a", log), ("b", changed))
    )
    assert np.array_equal(codes, codes_after_change) and not codes[41].any() and codes.any()


def test_learning_codes_resumes_and_its_progress_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codes_module, "LEAST_STEPS", 10)
    steps: list[TrainingProgress] = []

    def interrupt(step: TrainingProgress) -> None:
        if step.epoch == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learned_codes(tmp_path / "stopped", grouped_log(), progress=interrupt)
    assert np.array_equal(
        learned_codes(tmp_path / "stopped", grouped_log(), progress=steps.append),
        learned_codes(tmp_path / "whole", grouped_log()),
    )
    assert {step.epoch for step in steps} >= {4} and min(step.epoch for step in steps) > 1, "not from the beginning"
    assert all(step.of == "codes" and step.scores is None for step in steps)
