"""Counts and their file: a round trip, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from counted_logs import OF_TWO_USERS, sequences_of
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save
from small_counts import counts_of

from segue.counts.counts import HEADER, Counts
from segue.counts.features import FEATURES, ItemCounts
from segue.errors import FolderError
from segue.testing.cases import batch_of

WEIGHTS = (1.5, -0.1, 1 / 3, 1e-9, 0.0, -12345.678, 2.0)


def learned() -> Counts:
    """The counts of thirty random histories of eight items."""
    rng = np.random.default_rng(8)
    sequences = sequences_of(*rng.integers(1, 9, (30, 9)).tolist())
    return Counts(ItemCounts.of(sequences, sequences.offsets[1:], 8, OF_TWO_USERS), WEIGHTS)


def written(counts: Counts, folder: Path) -> Path:
    path = folder / "counts.safetensors"
    path.write_bytes(counts.to_bytes())
    return path


def test_saved_and_opened_counts_are_equal(tmp_path: Path) -> None:
    """Weights keep every bit, and the file of the same counts is the same file."""
    counts = learned()
    opened = Counts.open(written(counts, tmp_path))
    assert opened.weights == WEIGHTS and opened.facts() == counts.facts()
    assert opened.to_bytes() == counts.to_bytes()
    for name, array in counts.arrays().items():
        other = opened.arrays()[name]
        assert other.dtype == array.dtype and np.array_equal(other, array)
    histories = batch_of([1, 2, 3], [4], [5, 5, 6, 7, 8, 1])
    one, two = counts.added(histories), opened.added(histories)
    assert np.array_equal(one.values, two.values) and np.array_equal(one.items, two.items) and len(one.items) > 10


def test_counts_without_pairs_are_saved(tmp_path: Path) -> None:
    opened = Counts.open(written(counts_of([0, 1], [{}, {}, {}], {}, repeated=1.0), tmp_path))
    assert opened.added(batch_of([2])).items.tolist() == [2]


def test_a_file_has_counts_of_items_and_nothing_of_a_user() -> None:
    """Every array is as long as the items or as the pairs of two users, and does not know how many users there are."""
    rng = np.random.default_rng(8)
    users = rng.integers(1, 9, (30, 9)).tolist()
    one, two = sequences_of(*users), sequences_of(*users, *([number] * 3 for number in range(9, 40)))
    limits = OF_TWO_USERS
    before, after = (ItemCounts.of(log, log.offsets[1:], 40, limits) for log in (one, two))
    for name, array in Counts(before, WEIGHTS).arrays().items():
        other = Counts(after, WEIGHTS).arrays()[name]
        assert array.shape == other.shape and (name == "users" or np.array_equal(array, other))


def refused(path: Path) -> None:
    """One sentence that names the file and what to do."""
    with pytest.raises(FolderError) as error:
        Counts.open(path)
    message = str(error.value)
    assert message.startswith(f"{path} holds no counts that can be read") and message.endswith("train again.")
    assert "\n" not in message and message.count(". ") == 0


@pytest.mark.parametrize("contents", [b"", b"\0" * 8, b"{}", b"no counts at all", b"\xff" * 4000])
def test_other_files_are_refused(tmp_path: Path, contents: bytes) -> None:
    path = tmp_path / "counts.safetensors"
    path.write_bytes(contents)
    refused(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    refused(tmp_path / "nothing")
    refused(tmp_path)


@settings(max_examples=20)
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_that_ends_early_is_refused(tmp_path_factory: pytest.TempPathFactory, share: float) -> None:
    whole = learned().to_bytes()
    path = tmp_path_factory.getbasetemp() / "short.safetensors"
    path.write_bytes(whole[: int(share * len(whole))])
    refused(path)


Arrays = dict[str, np.ndarray]


def without(name: str) -> Callable[[Arrays], object]:
    return lambda arrays: arrays.pop(name)


def changed(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Arrays], object]:
    return lambda arrays: arrays.update({name: np.ascontiguousarray(change(arrays[name]))})


@pytest.mark.parametrize(
    "damage",
    [
        without("users"),
        without("after-2.offsets"),
        without("together.counts"),
        changed("users", lambda users: users[:-1]),
        changed("after-1.counts", lambda counts: counts[:-1]),
        changed("after-1.items", lambda items: items[1:]),
        changed("after-3.offsets", lambda offsets: offsets[:-1]),
        changed("after-3.offsets", lambda offsets: offsets[:0]),
        changed("together.offsets", lambda offsets: offsets + 1),
        changed("together.offsets", lambda offsets: np.concatenate((offsets[:1], offsets[-2:0:-1], offsets[-1:]))),
        changed("together.items", lambda items: items * 0),
        changed("together.items", lambda items: items + 8),
        changed("together.items", lambda items: -items),
    ],
)
def test_arrays_that_do_not_fit_each_other_are_refused(tmp_path: Path, damage: Callable[[Arrays], object]) -> None:
    counts, path = learned(), tmp_path / "counts.safetensors"
    arrays = counts.arrays()
    damage(arrays)
    path.write_bytes(save(arrays, metadata={HEADER: msgspec.json.encode(counts.named_weights).decode()}))
    refused(path)


@pytest.mark.parametrize(
    "header",
    [
        None,
        {"other": "{}"},
        {HEADER: "{}"},
        {HEADER: "no json"},
        {HEADER: "[1, 2]"},
        {HEADER: '{"after-1": "much"}'},
        {HEADER: msgspec.json.encode(dict.fromkeys(FEATURES[1:], 1.0)).decode()},
        {HEADER: msgspec.json.encode(dict.fromkeys((*FEATURES, "after-4"), 1.0)).decode()},
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path: Path, header: dict[str, str] | None) -> None:
    path = tmp_path / "counts.safetensors"
    path.write_bytes(save(learned().arrays(), metadata=header))
    refused(path)
