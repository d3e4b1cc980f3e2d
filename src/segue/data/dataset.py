"""An opened data folder: vocabulary, users, sequences and split, without reading the arrays."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from segue.data.sequences import Sequences
from segue.data.split import Split, split_last, split_time
from segue.data.vocabulary import Vocabulary
from segue.errors import FolderError
from segue.folders import complete_folder, read_manifest, verify_contents


class UserIds:
    """User ids by number and numbers by id; ids are sorted by their bytes."""

    def __init__(self, ids: pl.Series) -> None:
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    def number(self, identifier: str) -> int | None:
        """The number of a user, None if the data has no such user."""
        number = int(self._ids.search_sorted(identifier))
        return number if number < len(self._ids) and self._ids[number] == identifier else None

    def ids(self, numbers: np.ndarray) -> list[str]:
        """The ids of user numbers."""
        return list(self._ids.gather(np.asarray(numbers, dtype=np.int64)).to_list())


class Data:
    """An opened data folder."""

    def __init__(self, folder: Path, manifest: dict[str, Any], sequences: Sequences) -> None:
        self.folder = folder
        self.manifest = manifest
        self.sequences = sequences

    @classmethod
    def open(cls, path: str | Path) -> Data:
        """Open a data folder by memory map; sizes are checked, contents only by `verify`."""
        folder = Path(path)
        manifest = read_manifest(folder, "data")
        arrays: dict[str, np.ndarray] = {}
        for name in ("offsets", "items", "times", "kinds", "values"):
            path = folder / f"{name}.npy"
            if path.name in manifest["files"]:
                with _explained_reading(path):
                    arrays[name] = np.load(path, mmap_mode="r", allow_pickle=False)
        sizes = {len(arrays.get(name, ())) for name in ("items", "times")}
        if "offsets" not in arrays or sizes != {int(arrays["offsets"][-1])}:
            raise FolderError(
                f"{folder} is damaged: its arrays do not fit each other; make it again with `segue prepare`."
            )
        return cls(folder, manifest, Sequences(**arrays))

    @cached_property
    def vocabulary(self) -> Vocabulary:
        path = self.folder / "items.parquet"
        with _explained_reading(path):
            return Vocabulary(pl.read_parquet(path))

    @cached_property
    def users(self) -> UserIds:
        return UserIds(self._user_ids(0, self.sequences.n_users))

    def some_users(self, begin: int, end: int) -> tuple[pl.Series, Sequences]:
        """The ids and the events of the users begin … end - 1, as copies: every page that is read through a memory map
        of the whole log would stay in memory."""
        return self._user_ids(begin, end), self.some_events(begin, end)

    def _user_ids(self, begin: int, end: int) -> pl.Series:
        path = self.folder / "users.parquet"
        with _explained_reading(path):
            return pl.scan_parquet(path).slice(begin, end - begin).collect()["id"]

    def some_events(self, begin: int, end: int) -> Sequences:
        """The events of the users begin … end - 1, renumbered from 0."""
        log = self.sequences
        first, last = int(log.offsets[begin]), int(log.offsets[end])
        return Sequences(
            offsets=np.asarray(log.offsets[begin : end + 1]) - first,
            items=_rows(log.items, first, last),
            times=_rows(log.times, first, last),
            kinds=None if log.kinds is None else _rows(log.kinds, first, last),
            values=None if log.values is None else _rows(log.values, first, last),
        )

    @cached_property
    def split(self) -> Split:
        stored = self.manifest["split"]
        if stored["kind"] == "last":
            return split_last(self.sequences)
        return split_time(self.sequences, valid_from=stored["valid_from"], test_from=stored["test_from"])

    @property
    def kinds(self) -> list[str]:
        """The names of the kinds of events, by number; empty if the log has none."""
        return list(self.manifest["kinds"])

    @property
    def digest(self) -> str:
        """One digest for all that training and testing depend on: the arrays, the ids and the split."""
        files = self.manifest["files"]
        parts = [files[name]["sha256"] for name in sorted(files) if name != "rejected.parquet"]
        return hashlib.sha256(repr((parts, sorted(self.manifest["split"].items()))).encode()).hexdigest()

    def verify(self) -> None:
        """Raise FolderError if a file does not have its digest."""
        verify_contents(self.folder, self.manifest, "data")

    def save(self, path: str | Path, *, overwrite: bool = False) -> Data:
        """Copy the folder, for example from a temporary one, and open the copy."""
        with complete_folder(Path(path), overwrite="data" if overwrite else False) as staging:
            shutil.copytree(self.folder, staging, dirs_exist_ok=True)
        return Data.open(path)

    def __repr__(self) -> str:
        counts = ", ".join(f"{name}={self.manifest['counts'][name]}" for name in ("users", "items", "events"))
        return f"Data({str(self.folder)!r}, {counts})"


@contextmanager
def _explained_reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, pl.exceptions.PolarsError, OSError) as error:
        raise FolderError(f"{path} is damaged ({error}); make the folder again with `segue prepare`.") from error


def _rows(array: np.ndarray, begin: int, end: int) -> np.ndarray:
    """Rows of a memory-mapped array, read from its file instead of through the map."""
    assert isinstance(array, np.memmap)
    assert array.filename is not None
    offset = array.offset + begin * array.itemsize
    return np.fromfile(array.filename, dtype=array.dtype, count=end - begin, offset=offset)
