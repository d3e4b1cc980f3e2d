"""Numbered events → the files of a data folder, written as they are sorted; no array is whole in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

import numpy as np
import polars as pl

from segue.data.rules.rejected import Rejected
from segue.data.sequences import Sequences
from segue.data.write.events import Chunk
from segue.errors import InputError


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    """Running numbers → final numbers, by the bytes of the ids, so that they do not depend on the order of the rows."""

    ids: pl.Series  # [n in the core] sorted by bytes
    counts: np.ndarray  # [n in the core] events of each
    final: np.ndarray  # [all] uint32: the index in `ids`, or len(ids) and above for those left out


def final_numbers(texts: pl.Series, core: np.ndarray, counts: np.ndarray) -> Numbers:
    """Order the running numbers of the core, with their event counts, by id."""
    ids = texts.gather(core)
    order = ids.arg_sort().to_numpy()  # polars compares text by its bytes
    final = np.full(len(texts), len(core), dtype=np.uint32)
    final[core[order]] = np.arange(len(core), dtype=np.uint32)
    left_out = np.flatnonzero(final == len(core))
    final[left_out] = len(core) + np.arange(len(left_out), dtype=np.uint32)
    return Numbers(ids=ids.gather(order), counts=counts[order], final=final)


class SortedEvents(Protocol):
    """The events of the core, by user, time and order, in final numbers; some whole users at a time."""

    duplicates: int
    """How many good rows of the log repeat another; known after the last event."""

    def __iter__(self) -> Iterator[Chunk]: ...


@dataclass(frozen=True, slots=True, eq=False)
class Core:
    """The part of a log that is written."""

    users: Numbers
    items: Numbers
    kinds: pl.Series | None  # by their final numbers
    valued: bool
    rows: int
    rejected: Rejected
    events: SortedEvents

    def __post_init__(self) -> None:
        if len(self.items.ids) == 1:
            raise InputError(
                f"Only one item is left ({self.items.ids[0]!r}), and one item cannot be ranked against anything; "
                "give a log with more items, or lower --min-user and --min-item."
            )


class _Array:
    """An npy file that grows at its end; its length is known before."""

    def __init__(self, file: IO[bytes], dtype: type[np.generic], length: int) -> None:
        self._file, self._dtype = file, np.dtype(dtype)
        description = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": (length,)}
        np.lib.format.write_array_header_1_0(file, description)

    def append(self, values: np.ndarray) -> None:
        self._file.write(np.ascontiguousarray(values, dtype=self._dtype).data)


def write_sequences(
    folder: Path, core: Core, *, on_written: Callable[[Sequences], None], progress: Callable[[str, int, int], None]
) -> None:
    """Write offsets, items, times, kinds and values. on_written: called with every group of whole users written."""
    dtypes: dict[str, type[np.generic]] = {"item": np.int32, "time": np.int64}
    dtypes |= {"kind": np.uint16} if core.kinds is not None else {}
    dtypes |= {"value": np.float32} if core.valued else {}
    offsets = np.concatenate(([0], np.cumsum(core.users.counts))).astype(np.int64)
    np.save(folder / "offsets.npy", offsets)
    done, total = 0, int(offsets[-1])
    with contextlib.ExitStack() as stack:
        files = {column: stack.enter_context((folder / f"{column}s.npy").open("wb")) for column in dtypes}
        arrays = {column: _Array(files[column], dtype, total) for column, dtype in dtypes.items()}
        for events in core.events:
            columns = events.columns() | {"item": events.item.astype(np.int32)}
            for column, array in arrays.items():
                array.append(columns[column])
            starts = np.flatnonzero(np.diff(events.user, prepend=~events.user[:1]))
            on_written(Sequences(offsets=np.append(starts, len(events)), items=columns["item"], times=events.time))
            done += len(events)
            progress("sorting and writing", done, total)


def write_table(path: Path, table: pl.DataFrame) -> None:
    """Write a table as Parquet; equal tables give equal bytes."""
    table.write_parquet(path, compression="zstd", statistics=False)
