"""Codes of items by clusters and from learned vectors, from the training part only."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from code_logs import N_ITEMS, common_codes, log_of, log_of_kinds, random_log

from segue.data.sequences import Sequences
from segue.data.split import split_last
from segue.models.items import code_assignment as assign
from segue.models.items import svd as decomposition
from segue.models.items.code_assignment import assigned_codes, learned_codes, shared_codes
from segue.models.items.svd import right_directions


def codes_of(log: Sequences, *, values: int = 8, seed: int = 1) -> np.ndarray:
    ends = split_last(log).train_end
    codes = assigned_codes(log, ends, N_ITEMS, parts=4, values=values, seed=seed)
    assert codes.shape == (N_ITEMS + 1, 4) and codes.dtype == np.uint8
    return codes


def test_held_out_events_change_no_code() -> None:
    """Whatever the last two items of a user are, in any order among the users."""
    log, rng = random_log(), np.random.default_rng(5)
    other = log.items.copy()
    for back in (1, 2):
        indices = log.offsets[1:] - back
        other[indices] = rng.permutation(other[indices])
    assert (other != log.items).any()
    changed = Sequences(offsets=log.offsets, items=other, times=log.times)
    assert np.array_equal(codes_of(log), codes_of(changed))


def test_only_trained_items_take_values() -> None:
    """No value is spent on items that are never recommended."""
    log = log_of([[1, 2, 3, 4, 39, 40], [4, 3, 2, 1, 39, 40]])
    codes = codes_of(log, values=4)
    assert all(sorted(codes[1:5, part].tolist()) == [0, 1, 2, 3] for part in range(4))
    assert not codes[5:].any()


def test_equal_seeds_give_equal_codes() -> None:
    log = random_log()
    assert np.array_equal(codes_of(log), codes_of(log))
    assert not np.array_equal(codes_of(log), codes_of(log, seed=2))


def test_fewer_items_than_values() -> None:
    log = log_of([[1, 2, 3, 1, 2], [3, 2, 1, 3, 1]])
    codes = assigned_codes(log, split_last(log).train_end, 3, parts=4, values=256, seed=1)
    assert codes.max() == 2


def test_clusters_are_of_items_that_come_close_together() -> None:
    """Every user has all forty items, ten of a kind at a time: only the distance in a history tells kinds apart."""
    near, far = common_codes(codes_of(log_of_kinds(), values=6))
    assert near > 2 * far


def test_every_stretch_of_a_history_counts() -> None:
    """Kinds that are never among the first ten events still have different codes."""
    rng = np.random.default_rng(6)
    first, kinds = np.arange(1, 21), np.arange(21, 41).reshape(2, 10)
    rows = [[*rng.permutation(first)[:10], *rng.permutation(kinds[user % 2]), 1, 2] for user in range(60)]
    codes = codes_of(log_of(rows), values=6)[21:].reshape(2, 10, 4)
    within = np.mean([(kind[:, None] == kind[None]).mean() for kind in codes])
    assert within > 1.25 * (codes[0][:, None] == codes[1][None]).mean()


def test_items_that_always_come_together_have_different_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the log separates such a pair, but with equal codes the model could not learn what follows each."""
    rng = np.random.default_rng(4)
    log = log_of([np.stack((pairs, pairs + 20), 1).ravel().tolist() for pairs in rng.integers(1, 21, (80, 7))])
    codes, items = codes_of(log), np.arange(1, N_ITEMS + 1)
    assert shared_codes(codes, items) < 6
    assert (codes[1:21] != codes[21:]).sum(1).mean() < 2.5, "still more alike than two random items: 3.5"
    monkeypatch.setattr(assign, "PUSHES", 0)
    assert shared_codes(codes_of(log), items) == N_ITEMS


def test_one_event_is_enough_and_none_gives_no_codes() -> None:
    assert (codes_of(log_of([[7, 8, 9], [1, 2]]))[7] < 8).all()
    log = log_of([[7, 8, 9], [1, 2]])
    none = assigned_codes(log, log.offsets[:-1], N_ITEMS, parts=4, values=8, seed=1)
    assert not none.any()


def test_items_with_equal_codes_are_counted() -> None:
    codes = np.array([[1, 1], [1, 1], [2, 1], [1, 1], [3, 3], [1, 1]], dtype=np.uint8)
    assert shared_codes(codes, np.array([1, 2, 3, 4])) == 2
    assert shared_codes(codes, np.array([1, 2, 4])) == 0
    assert shared_codes(codes, np.arange(1, 6)) == 3


def test_a_tall_matrix_has_the_same_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decomposition by products, in place, is that of the libraries."""
    matrix = torch.randn(60, 50, generator=torch.Generator().manual_seed(2)) * torch.linspace(1, 0.01, 50) ** 2
    matrix[:, 7] = 0

    def directions() -> torch.Tensor:
        generator = torch.Generator().manual_seed(3)
        return right_directions(lambda x: matrix @ x, lambda x: matrix.T @ x, (60, 50), 6, generator=generator)[0]

    plain = directions()
    monkeypatch.setattr(decomposition, "TALL", 1)
    monkeypatch.setattr(decomposition, "AT_A_TIME", 16)
    tall = directions()
    torch.testing.assert_close((plain * tall).sum(0).abs(), torch.ones(6), atol=1e-4, rtol=0)
    right = torch.linalg.svd(matrix).Vh[:6].T
    torch.testing.assert_close((right * tall).sum(0).abs(), torch.ones(6), atol=1e-4, rtol=0)


def test_learned_vectors_of_few_items_and_of_none() -> None:
    """One item of three was trained; and none."""
    vectors = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    codes = learned_codes(vectors, np.array([0, 0, 5, 0]), parts=4, values=8, seed=1)
    assert codes.shape == (4, 4) and codes.dtype == np.uint8 and not codes.any(), "the only value"
    assert not learned_codes(vectors, np.zeros(4, dtype=np.int64), parts=4, values=8, seed=1).any()
    every = learned_codes(vectors, np.array([0, 9, 1, 1]), parts=4, values=8, seed=1)
    assert all(sorted(every[1:, part].tolist()) == [0, 1, 2] for part in range(4)), "a value for each"
