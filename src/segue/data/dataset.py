"""An opened data folder: vocabulary, users, sequences and split, without reading the arrays."""

from __future__ import annotations

import hashlib
import shutil
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
    """A data folder that `prepare` made."""

    def __init__(self, folder: Path, manifest: dict[str, Any], sequences: Sequences) -> None:
        self.folder = folder
        self.manifest = manifest
        self.sequences = sequences

    @classmethod
    def open(cls, path: str | Path) -> Data:
        """Open a data folder by memory map; sizes are checked, contents only by `verify`."""
        folder = Path(path)
        manifest = read_manifest(folder, "data")
        arrays = {name: _array(folder, name, manifest) for name in ("offsets", "items", "times", "kinds", "values")}
        offsets, items, times = arrays["offsets"], arrays["items"], arrays["times"]
        if offsets is None or items is None or times is None or not len(items) == len(times) == int(offsets[-1]):
            raise FolderError(
                f"{folder} is damaged: its arrays do not fit each other; make it again with `segue prepare`."
            )
        sequences = Sequences(offsets=offsets, items=items, times=times, kinds=arrays["kinds"], values=arrays["values"])
        return cls(folder, manifest, sequences)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(_table(self.folder / "items.parquet"))

    @cached_property
    def users(self) -> UserIds:
        return UserIds(_table(self.folder / "users.parquet")["id"])

    def some_users(self, begin: int, end: int) -> tuple[pl.Series, Sequences]:
        """The ids and the events of the users begin … end - 1, as copies: every page that is read through a memory map
        of the whole log would stay in memory."""
        return _table(self.folder / "users.parquet", rows=slice(begin, end))["id"], self.some_events(begin, end)

    def some_events(self, begin: int, end: int) -> Sequences:
        """The events of the users begin … end - 1, who are numbered from 0 there."""
        log = self.sequences
        first, last = int(log.offsets[begin]), int(log.offsets[end])
        return Sequences(
            offsets=np.asarray(log.offsets[begin : end + 1]) - first,
            items=_read(log.items, first, last),
            times=_read(log.times, first, last),
            kinds=None if log.kinds is None else _read(log.kinds, first, last),
            values=None if log.values is None else _read(log.values, first, last),
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
        """Compare every file with its digest."""
        verify_contents(self.folder, self.manifest, "data")

    def save(self, path: str | Path, *, overwrite: bool = False) -> Data:
        """Copy the folder, for example from a temporary one, and open the copy."""
        with complete_folder(Path(path), overwrite="data" if overwrite else False) as staging:
            shutil.copytree(self.folder, staging, dirs_exist_ok=True)
        return Data.open(path)

    def __repr__(self) -> str:
        counts = ", ".join(f"{name}={self.manifest['counts'][name]}" for name in ("users", "items", "events"))
        return f"Data({str(self.folder)!r}, {counts})"


def _array(folder: Path, name: str, manifest: dict[str, Any]) -> np.ndarray | None:
    path = folder / f"{name}.npy"
    if path.name not in manifest["files"]:
        return None
    try:
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise FolderError(f"{path} is damaged ({error}); make the folder again with `segue prepare`.") from error
    return array


def _read(array: np.ndarray, begin: int, end: int) -> np.ndarray:
    """Rows of a memory-mapped array, read from its file instead of through the map."""
    assert isinstance(array, np.memmap)
    assert array.filename is not None
    offset = array.offset + begin * array.itemsize
    return np.fromfile(array.filename, dtype=array.dtype, count=end - begin, offset=offset)


def _table(path: Path, rows: slice | None = None) -> pl.DataFrame:
    """A Parquet file, whole or some rows of it."""
    try:
        if rows is not None:
            return pl.scan_parquet(path).slice(rows.start, rows.stop - rows.start).collect()
        return pl.read_parquet(path)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise FolderError(f"{path} is damaged ({error}); make the folder again with `segue prepare`.") from error
