"""The bench's code assignments: numpy's decomposition, even bins, and the training part alone."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from code_logs import N_ITEMS, common_codes, log_of, log_of_kinds, random_log
from hypothesis import given
from hypothesis import strategies as st

from bench.recommend import code_assignment
from bench.recommend.code_assignment import Method, assigned_by, even_bins
from segue.data.sequences import Sequences
from segue.data.split import split_last
from segue.models.items import occurrences
from segue.models.items.coded import CodeSettings
from segue.training.item_codes import assign_item_codes
from segue.training.settings import TrainSettings

METHODS: tuple[Method, ...] = get_args(Method)
every_method = pytest.mark.parametrize("method", METHODS)


def codes_of(log: Sequences, method: Method, *, values: int = 8, seed: int = 1) -> np.ndarray:
    ends = split_last(log).train_end
    codes = code_assignment.codes(log, ends, N_ITEMS, parts=4, values=values, seed=seed, method=method)
    assert codes.shape == (N_ITEMS + 1, 4) and codes.dtype == np.uint8
    return codes


@pytest.mark.parametrize("events", [1, 50, 10**6], ids=["a user at a time", "some", "all"])
def test_items_are_ordered_by_numpys_decomposition(events: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(occurrences, "EVENTS", events)
    log = random_log()
    had = np.zeros((90, N_ITEMS + 1))
    for user, end in enumerate(split_last(log).train_end):
        had[user, log.items[9 * user : end]] = 1
    trained = np.flatnonzero(had.any(0))
    directions = np.linalg.svd(had)[2][:4].T[trained]
    expected = np.stack([even_bins(direction, 8) for direction in directions.T], 1)
    negated = np.stack([even_bins(-direction, 8) for direction in directions.T], 1)
    codes = codes_of(log, "svd")[trained].astype(int)
    for part in range(4):  # a singular vector has either sign, and the noise may swap nearly equal items
        errors = [np.abs(codes[:, part] - codes_expected[:, part]) for codes_expected in (expected, negated)]
        least = min(errors, key=lambda differences: int(differences.sum()))
        assert least.max() <= 1 and (least > 0).mean() < 0.15


@given(st.integers(1, 700), st.integers(2, 256), st.integers(0, 2**32))
def test_bin_sizes_differ_by_at_most_one(n: int, values: int, seed: int) -> None:
    feature = np.random.default_rng(seed).normal(size=n)
    bins = even_bins(feature, values)
    sizes = np.bincount(bins, minlength=values)
    assert sizes.max() - sizes.min() <= 1 and len(sizes) == values
    assert (np.diff(bins[np.argsort(feature)].astype(int)) >= 0).all()


@every_method
def test_held_out_events_change_no_code(method: Method) -> None:
    """The last two items of each user are shuffled among the users."""
    log, rng = random_log(), np.random.default_rng(5)
    other = log.items.copy()
    for back in (1, 2):
        positions = log.offsets[1:] - back
        other[positions] = rng.permutation(other[positions])
    assert (other != log.items).any()
    changed = Sequences(offsets=log.offsets, items=other, times=log.times)
    assert np.array_equal(codes_of(log, method), codes_of(changed, method))


@every_method
def test_only_trained_items_get_codes(method: Method) -> None:
    log = log_of([[1, 2, 3, 4, 39, 40], [4, 3, 2, 1, 39, 40]])
    codes = codes_of(log, method, values=4)
    assert all(sorted(codes[1:5, part].tolist()) == [0, 1, 2, 3] for part in range(4))
    assert not codes[5:].any()


def test_codes_depend_on_the_seed() -> None:
    log = random_log()
    for method in METHODS:
        assert np.array_equal(codes_of(log, method), codes_of(log, method))
    assert not np.array_equal(codes_of(log, "random"), codes_of(log, "random", seed=2))


def test_singular_vectors_use_users_and_not_nearness_in_time() -> None:
    near, far = common_codes(codes_of(log_of_kinds(), "svd", values=6))
    assert abs(near - far) < 0.15


@every_method
def test_one_event_is_enough_for_codes(method: Method) -> None:
    log = log_of([[7, 8, 9], [1, 2]])
    assert (codes_of(log, method)[7] < 8).all()
    none = code_assignment.codes(log, log.offsets[:-1], N_ITEMS, parts=4, values=8, seed=1, method=method)
    assert not none.any()


@every_method
def test_trainings_within_the_block_use_the_codes_of_the_bench(method: Method, tmp_path: Path) -> None:
    log = random_log()

    def trained_with() -> np.ndarray:
        ends, settings = split_last(log).train_end, CodeSettings(parts=4, values=8)
        state = tmp_path / "state"
        train = TrainSettings(seed=1)
        return assign_item_codes(settings, train, log, ends, N_ITEMS, state_file=state, progress=None)

    own = trained_with()
    with assigned_by(method):
        assert np.array_equal(trained_with(), codes_of(log, method))
    with assigned_by(None):
        assert np.array_equal(trained_with(), own)
    assert np.array_equal(trained_with(), own) and not np.array_equal(own, codes_of(log, method))
