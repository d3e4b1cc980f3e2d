"""Codes of items: by numpy's own decomposition, shared out evenly, and of nothing but the training part."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from segue.data.sequences import Sequences
from segue.data.split import split_last
from segue.models.items import code_assignment as assign
from segue.models.items import svd as decomposition
from segue.models.items.code_assignment import assigned_codes, even_bins, learned_codes, shared_codes
from segue.models.items.svd import right_directions

N_ITEMS = 40
Way = Literal["clusters", "svd", "random"]
WAYS: tuple[Way, ...] = get_args(Way)


def log_of(items: list[list[int]]) -> Sequences:
    lengths = [len(user) for user in items]
    return Sequences(
        offsets=np.r_[0, np.cumsum(lengths)],
        items=np.concatenate(items).astype(np.int32),
        times=np.arange(sum(lengths)),
    )


def random_log(users: int = 90, *, n_items: int = N_ITEMS, seed: int = 0) -> Sequences:
    """Items of one half go together, mostly, popular ones more often; some come twice."""
    rng = np.random.default_rng(seed)
    chances = 1 / np.arange(1, n_items // 2 + 1)
    places = rng.choice(n_items // 2, (users, 9), p=chances / chances.sum())
    halves = (np.arange(users)[:, None] + (rng.random((users, 9)) < 0.2)) % 2
    return log_of((places * 2 + halves + 1).tolist())


def found(log: Sequences, *, way: Way = "clusters", values: int = 8, seed: int = 1) -> np.ndarray:
    ends = split_last(log).train_end
    codes = assigned_codes(log, ends, N_ITEMS, parts=4, values=values, seed=seed, method=way)
    assert codes.shape == (N_ITEMS + 1, 4) and codes.dtype == np.uint8
    return codes


@pytest.mark.parametrize("events", [1, 50, 10**6], ids=["a user at a time", "some", "all"])
def test_items_stand_in_the_order_of_numpys_own_decomposition(events: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assign, "EVENTS", events)
    log = random_log()
    had = np.zeros((90, N_ITEMS + 1))
    for user, end in enumerate(split_last(log).train_end):
        had[user, log.items[9 * user : end]] = 1
    trained = np.flatnonzero(had.any(0))
    directions = np.linalg.svd(had)[2][:4].T[trained]
    expected = np.stack([even_bins(direction, 8) for direction in directions.T], 1)
    turned = np.stack([even_bins(-direction, 8) for direction in directions.T], 1)
    codes = found(log, way="svd")[trained].astype(int)
    for part in range(4):  # a direction may point either way, and what is nearly equal may be changed by the noise
        apart = [np.abs(codes[:, part] - way[:, part]) for way in (expected, turned)]
        least = min(apart, key=lambda differences: int(differences.sum()))
        assert least.max() <= 1 and (least > 0).mean() < 0.15


@given(st.integers(1, 700), st.integers(2, 256), st.integers(0, 2**32))
def test_bins_have_as_many_items_each_up_to_one(n: int, values: int, seed: int) -> None:
    feature = np.random.default_rng(seed).normal(size=n)
    bins = even_bins(feature, values)
    sizes = np.bincount(bins, minlength=values)
    assert sizes.max() - sizes.min() <= 1 and len(sizes) == values
    assert (np.diff(bins[np.argsort(feature)].astype(int)) >= 0).all()


@pytest.mark.parametrize("way", WAYS)
def test_what_is_held_out_changes_no_code(way: Way) -> None:
    """Whatever the last two items of a user are, in any order among the users."""
    log, rng = random_log(), np.random.default_rng(5)
    other = log.items.copy()
    for back in (1, 2):
        places = log.offsets[1:] - back
        other[places] = rng.permutation(other[places])
    assert (other != log.items).any()
    changed = Sequences(offsets=log.offsets, items=other, times=log.times)
    assert np.array_equal(found(log, way=way), found(changed, way=way))


@pytest.mark.parametrize("way", WAYS)
def test_only_items_that_were_met_take_values(way: Way) -> None:
    """So that those of the others are not wasted on what is never answered."""
    log = log_of([[1, 2, 3, 4, 39, 40], [4, 3, 2, 1, 39, 40]])
    codes = found(log, values=4, way=way)
    assert all(sorted(codes[1:5, part].tolist()) == [0, 1, 2, 3] for part in range(4))
    assert not codes[5:].any()


def test_the_same_seed_gives_the_same_codes_and_another_others() -> None:
    log = random_log()
    for way in WAYS:
        assert np.array_equal(found(log, way=way), found(log, way=way))
    other = found(log, way="random", seed=2)
    assert not np.array_equal(found(log, way="random"), other)


def test_fewer_items_than_values() -> None:
    log = log_of([[1, 2, 3, 1, 2], [3, 2, 1, 3, 1]])
    codes = assigned_codes(log, split_last(log).train_end, 3, parts=4, values=256, seed=1)
    assert codes.max() == 2


def test_clusters_are_of_items_that_come_close_together() -> None:
    """Everybody had all forty, ten of a kind at a time: who had what says nothing, what is near says all."""
    rng = np.random.default_rng(3)
    kinds = np.arange(1, N_ITEMS + 1).reshape(4, 10)
    log = log_of(
        [[*np.concatenate([rng.permutation(kind) for kind in rng.permutation(kinds)]), 1, 2] for _ in range(60)]
    )

    def common(way: Way) -> tuple[float, float]:
        """Codes that two items of a kind have in common, and two of different kinds."""
        codes, same = found(log, values=6, way=way)[1:], np.kron(np.eye(4), np.ones((10, 10))) > 0
        alike = (codes[:, None] == codes[None]).mean(2)
        return float(alike[same].mean()), float(alike[~same].mean())

    near, far = common("clusters")
    assert near > 2 * far
    near, far = common("svd")
    assert abs(near - far) < 0.15


def test_every_stretch_of_a_history_counts() -> None:
    """Kinds that are never among the first ten events, between others that are: still they are kept apart."""
    rng = np.random.default_rng(6)
    first, kinds = np.arange(1, 21), np.arange(21, 41).reshape(2, 10)
    rows = [[*rng.permutation(first)[:10], *rng.permutation(kinds[user % 2]), 1, 2] for user in range(60)]
    codes = found(log_of(rows), values=6)[21:].reshape(2, 10, 4)
    within = np.mean([(kind[:, None] == kind[None]).mean() for kind in codes])
    assert within > 1.25 * (codes[0][:, None] == codes[1][None]).mean()


def test_items_that_always_come_together_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the log tells such a pair apart, but the model could not learn what comes after each of them."""
    rng = np.random.default_rng(4)
    log = log_of([np.stack((pairs, pairs + 20), 1).ravel().tolist() for pairs in rng.integers(1, 21, (80, 7))])
    codes, items = found(log), np.arange(1, N_ITEMS + 1)
    assert shared_codes(codes, items) < 6
    assert (codes[1:21] != codes[21:]).sum(1).mean() < 2.5, "still more alike than two items by lot: 3.5"
    monkeypatch.setattr(assign, "PUSHES", 0)
    assert shared_codes(found(log), items) == N_ITEMS


@pytest.mark.parametrize("way", WAYS)
def test_one_event_is_enough_and_none_gives_no_codes(way: Way) -> None:
    assert (found(log_of([[7, 8, 9], [1, 2]]), way=way)[7] < 8).all()
    log = log_of([[7, 8, 9], [1, 2]])
    none = assigned_codes(log, log.offsets[:-1], N_ITEMS, parts=4, values=8, seed=1, method=way)
    assert not none.any()


def test_items_that_cannot_be_told_apart_are_counted() -> None:
    codes = np.array([[1, 1], [1, 1], [2, 1], [1, 1], [3, 3], [1, 1]], dtype=np.uint8)
    assert shared_codes(codes, np.array([1, 2, 3, 4])) == 2
    assert shared_codes(codes, np.array([1, 2, 4])) == 0
    assert shared_codes(codes, np.arange(1, 6)) == 3


def test_a_tall_matrix_has_the_same_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done by products, in place, is what the libraries' own decompositions do."""
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
    """One item of three was met; and none."""
    vectors = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    codes = learned_codes(vectors, np.array([0, 0, 5, 0]), parts=4, values=8, seed=1)
    assert codes.shape == (4, 4) and codes.dtype == np.uint8 and not codes.any(), "the one value that there is"
    assert not learned_codes(vectors, np.zeros(4, dtype=np.int64), parts=4, values=8, seed=1).any()
    every = learned_codes(vectors, np.array([0, 9, 1, 1]), parts=4, values=8, seed=1)
    assert all(sorted(every[1:, part].tolist()) == [0, 1, 2] for part in range(4)), "a value for each"
