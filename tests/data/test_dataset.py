from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from event_logs import digests, write_csv

from segue.data.dataset import Data
from segue.data.prepare import prepare
from segue.data.vocabulary import Vocabulary
from segue.errors import FolderError, InputError


@pytest.fixture
def data(tmp_path: Path) -> Data:
    rows = [(f"u{n % 3}", f"i{n % 4}", n) for n in range(24)]
    return prepare(write_csv(tmp_path / "log.csv", rows), out=tmp_path / "data", min_user=1, min_item=1)


def test_arrays_are_memory_mapped(data: Data) -> None:
    for array in (data.sequences.offsets, data.sequences.items, data.sequences.times):
        assert isinstance(array, np.memmap) and not array.flags.writeable
    assert data.sequences.kinds is None and data.sequences.values is None
    assert data.sequences.n_users == len(data.users) == 3 and data.sequences.n_events == 24


def test_a_copy_is_equal(data: Data, tmp_path: Path) -> None:
    copy = data.save(tmp_path / "copy")
    assert copy.manifest == data.manifest
    copy.verify()
    assert copy.users.ids(np.array([2, 0])) == ["u2", "u0"]
    with pytest.raises(FolderError, match="exists already"):
        data.save(tmp_path / "copy")
    assert digests(data.save(tmp_path / "copy", overwrite=True)) == digests(data)


def test_inconsistent_arrays_are_refused(data: Data) -> None:
    offsets = np.load(data.folder / "offsets.npy")
    offsets[-1] -= 1
    np.save(data.folder / "offsets.npy", offsets)
    with pytest.raises(FolderError, match="its arrays do not fit each other"):
        Data.open(data.folder)


def test_a_damaged_table_is_refused(data: Data) -> None:
    path = data.folder / "items.parquet"
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(FolderError, match=r"items\.parquet is damaged"):
        _ = Data.open(data.folder).vocabulary


def test_unknown_items_are_an_error_or_padding(data: Data) -> None:
    vocabulary: Vocabulary = data.vocabulary
    assert vocabulary.numbers(["i3", "no", "i0"], unknown="zero").tolist() == [4, 0, 1]
    with pytest.raises(InputError, match="The item 'no' is not in the catalogue of 4 items"):
        vocabulary.numbers(["i3", "no"], unknown="error")
