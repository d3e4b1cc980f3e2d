"""Good rows → compact columns: numbers instead of text, at most about 24 bytes per event, even while they are sorted.

Each chunk is sorted by user; then the slices of some users from all chunks are joined and sorted by time. So the whole
table is never copied, and equal times keep the order of the log.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field, fields

import numpy as np
import polars as pl
import pyarrow as pa

from segue.data.read.blocks import detached

CHUNK_EVENTS = 1 << 20
GROUP_EVENTS = 1 << 20
ABSENT = np.uint32(2**32 - 1)  # the number of an unknown hash
MERGE_SHARE = 8  # recent texts are merged when they are 1/8 of the others


@dataclass(frozen=True, slots=True, eq=False)
class _TextTable:
    """Texts in the order of their numbers, and the number of each hash."""

    texts: pl.Series
    hashes: np.ndarray  # [n] uint64, sorted
    numbers: np.ndarray  # [n] uint32

    @staticmethod
    def empty() -> _TextTable:
        return _TextTable(
            pl.Series("text", dtype=pl.String), np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.uint32)
        )

    def lookup(self, queries: np.ndarray) -> np.ndarray:
        """The numbers of sorted hashes, ABSENT for unknown ones."""
        numbers = np.full(len(queries), ABSENT, dtype=np.uint32)
        indices = np.searchsorted(self.hashes, queries)
        inside = np.flatnonzero(indices < len(self.hashes))
        matches = inside[self.hashes[indices[inside]] == queries[inside]]
        numbers[matches] = self.numbers[indices[matches]]
        return numbers

    def merged(self, other: _TextTable) -> _TextTable:
        """Both tables as one, the other's texts last."""
        indices = np.searchsorted(self.hashes, other.hashes)
        return _TextTable(
            pl.concat([self.texts, other.texts], rechunk=True),
            np.insert(self.hashes, indices, other.hashes),
            np.insert(self.numbers, indices, other.numbers),
        )


class Numbering:
    """Texts → running numbers 0, 1, 2 … in arbitrary order; equal texts have equal numbers.

    Texts are looked up by a 64-bit hash in a sorted array, then compared; the few that share a hash with another text
    are in a dictionary. A hash table of the texts themselves (Arrow's, polars') took three times as long. Appending to
    an array copies it, so recent texts have a table of their own until a merge is worth the copy.
    """

    def __init__(self) -> None:
        self._merged, self._recent = _TextTable.empty(), _TextTable.empty()
        self._collided: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._merged.texts) + len(self._recent.texts)

    def texts(self) -> pl.Series:
        """The text of every number."""
        return pl.concat([self._merged.texts, self._recent.texts], rechunk=False)

    def numbers(self, texts: pl.Series) -> np.ndarray:
        """Numbers [n] uint32; unseen texts get the next ones."""
        hashes = text_hashes(texts)
        order = np.argsort(hashes)
        first = np.diff(hashes[order], prepend=~hashes[order[:1]]) != 0
        rows = order[first]  # one of each hash
        distinct = hashes[rows]
        by_hash = self._merged.lookup(distinct)
        others = np.flatnonzero(by_hash == ABSENT)
        by_hash[others] = self._recent.lookup(distinct[others])
        new = others[by_hash[others] == ABSENT]
        if len(new):
            by_hash[new] = np.arange(len(self), len(self) + len(new))
            self._add(texts.gather(rows[new]), distinct[new], by_hash[new])
        numbers = np.empty(len(texts), dtype=np.uint32)
        numbers[order] = by_hash[np.cumsum(first) - 1]
        different = (self.texts().gather(numbers) != texts).to_numpy()
        for row in np.flatnonzero(different).tolist():
            text = texts[row]
            if text not in self._collided:
                self._collided[text] = len(self)
                self._add(pl.Series([text]), np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.uint32))
            numbers[row] = self._collided[text]
        return numbers

    def _add(self, texts: pl.Series, hashes: np.ndarray, numbers: np.ndarray) -> None:
        copied = detached(pl.DataFrame({"text": texts}))["text"]
        self._recent = self._recent.merged(_TextTable(copied, hashes, numbers))
        if len(self._recent.texts) * MERGE_SHARE > len(self._merged.texts):
            self._merged, self._recent = self._merged.merged(self._recent), _TextTable.empty()


def text_hashes(texts: pl.Series) -> np.ndarray:
    """64-bit hashes [n] uint64, equal for equal texts within one process."""
    return np.asarray(texts.hash().to_numpy())


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Events in the order of the log, or sorted by user; columns that the log lacks are None."""

    user: np.ndarray  # [n] uint32
    item: np.ndarray  # [n] uint32
    time: np.ndarray  # [n] int64, microseconds
    kind: np.ndarray | None = None  # [n] uint16
    value: np.ndarray | None = None  # [n] float32
    order: np.ndarray | None = None  # [n] int64

    def __len__(self) -> int:
        return len(self.user)

    def columns(self) -> dict[str, np.ndarray]:
        """The columns that are not None."""
        named = ((column.name, getattr(self, column.name)) for column in fields(self))
        return {name: column for name, column in named if column is not None}

    def take(self, rows: np.ndarray | slice) -> Chunk:
        return Chunk(**{name: column[rows] for name, column in self.columns().items()})

    def put(self, rows: slice, other: Chunk) -> None:
        """Write the events of another chunk over these rows."""
        for name, column in self.columns().items():
            column[rows] = other.columns()[name]


@dataclass(slots=True)
class EventTable:
    """All good events of a log, in chunks that follow the log's order.

    The chunks are in memory maps outside the heap: small long-lived arrays between short-lived blocks of text would
    fragment the heap.
    """

    chunks: list[Chunk] = field(default_factory=list)
    _free: Chunk | None = None
    _filled: int = 0

    def __len__(self) -> int:
        return sum(map(len, self.chunks))

    def append(self, events: Chunk) -> None:
        """Copy events to the end."""
        done = 0
        while done < len(events):
            if self._free is None or self._filled == CHUNK_EVENTS:
                types = {name: column.dtype for name, column in events.columns().items()}
                memory = {name: mmap.mmap(-1, CHUNK_EVENTS * dtype.itemsize) for name, dtype in types.items()}
                self._free = Chunk(**{name: np.frombuffer(memory[name], dtype) for name, dtype in types.items()})
                self._filled = 0
                self.chunks.append(self._free)
            size = min(CHUNK_EVENTS - self._filled, len(events) - done)
            self._free.put(slice(self._filled, self._filled + size), events.take(slice(done, done + size)))
            self._filled, done = self._filled + size, done + size
            self.chunks[-1] = self._free.take(slice(0, self._filled))

    def frame(self) -> pl.DataFrame:
        """Users and items for the rules, over the same memory."""
        frames = [pl.DataFrame({"user": _shared(chunk.user), "item": _shared(chunk.item)}) for chunk in self.chunks]
        return pl.concat(frames, rechunk=False)

    def clear(self) -> None:
        """Release the memory."""
        self.chunks.clear()
        self._free = None

    def renumber_users(self, numbers: np.ndarray) -> None:
        """Renumber the users and sort each chunk by user, in place."""
        for chunk in self.chunks:
            chunk.user[:] = numbers[chunk.user]
            chunk.put(slice(None), chunk.take(stable_order(chunk.user)))

    def drop_repeated(self, n_users: int, *, timed: bool) -> int:
        """Remove events that equal an earlier one, and return how many."""
        self.renumber_users(np.arange(n_users, dtype=np.uint32))
        marks = [np.zeros(len(chunk), dtype=bool) for chunk in self.chunks]
        for slices, events in self._user_groups(self.user_counts(n_users)):
            duplicates, begin = repeated(events, timed=timed), 0
            for index, rows in enumerate(slices):
                size = rows.stop - rows.start
                marks[index][rows] = duplicates[begin : begin + size]
                begin += size
        for index, chunk in enumerate(self.chunks):
            remaining = slice(0, len(chunk) - int(marks[index].sum()))
            chunk.put(remaining, chunk.take(~marks[index]))
            self.chunks[index] = chunk.take(remaining)
        return sum(int(mark.sum()) for mark in marks)

    def user_counts(self, n_users: int) -> np.ndarray:
        counts = np.zeros(n_users, dtype=np.int64)
        for chunk in self.chunks:
            counts += np.bincount(chunk.user, minlength=n_users)
        return counts

    def by_user_and_time(self, n_users: int) -> Iterator[Chunk]:
        """All events, sorted, some users at a time; the chunks must be sorted by user (`renumber_users`)."""
        for _, events in self._user_groups(self.user_counts(n_users)):
            order = stable_order(events.time if events.order is None else events.order)
            for column in (events.user,) if events.order is None else (events.time, events.user):
                order = order[stable_order(column[order])]
            yield events.take(order)

    def _user_groups(self, counts: np.ndarray) -> Iterator[tuple[list[slice], Chunk]]:
        """(the rows of each chunk, these rows joined) of groups of consecutive users, counts[u] events each."""
        ends = np.cumsum(counts)
        begin = 0
        while begin < len(counts):
            before = ends[begin - 1] if begin else 0
            end = max(begin + 1, int(np.searchsorted(ends, before + GROUP_EVENTS, side="right")))
            limits = np.array([begin, end], dtype=np.uint32)  # the type of users, to avoid a copy of them
            slices = [slice(*np.searchsorted(chunk.user, limits).tolist()) for chunk in self.chunks]
            yield slices, concatenated([chunk.take(rows) for chunk, rows in zip(self.chunks, slices, strict=True)])
            begin = end


def tied(events: Chunk) -> np.ndarray:
    """Mask [n] of the events, sorted by user and time, that share both with a neighbour."""
    same = (events.user[1:] == events.user[:-1]) & (events.time[1:] == events.time[:-1])
    marks = np.zeros(len(events), dtype=bool)
    marks[1:] |= same
    marks[:-1] |= same
    return marks


def repeated(events: Chunk, *, timed: bool) -> np.ndarray:
    """Mask [n] of the events that equal an earlier one in user, item, time, kind and value."""
    columns = [events.user, events.item]
    columns += [events.time] if timed else []
    columns += [events.kind] if events.kind is not None else []
    columns += [events.value.view(np.int32)] if events.value is not None else []
    order = np.lexsort(columns[::-1])
    same = np.ones(max(0, len(order) - 1), dtype=bool)
    for column in columns:
        ordered = column[order]
        same &= ordered[1:] == ordered[:-1]
    marks = np.zeros(len(order), dtype=bool)
    marks[order[1:]] = same
    return marks


def stable_order(column: np.ndarray) -> np.ndarray:
    """A stable argsort of whole numbers.

    If number and index fit into one 64-bit key, the keys are sorted, which is several times faster.
    """
    if not len(column):
        return np.zeros(0, dtype=np.int64)
    keys = (column - column.min()).astype(np.uint64)
    for unit in (1_000_000, 1000):  # most times are whole seconds or milliseconds
        if column.dtype == np.int64 and not (keys % unit).any():
            keys //= np.uint64(unit)
            break
    bits = np.uint64(len(column).bit_length())
    if int(keys.max()).bit_length() + int(bits) > 64:
        return np.asarray(np.argsort(column, kind="stable"))
    keys <<= bits
    keys |= np.arange(len(column), dtype=np.uint64)
    keys.sort()
    keys &= (np.uint64(1) << bits) - np.uint64(1)
    return np.asarray(keys.astype(np.int64))


def _shared(column: np.ndarray) -> pl.Series:
    """A polars column that shares the array's memory."""
    dtype = pa.from_numpy_dtype(column.dtype)
    return pl.Series(pl.from_arrow(pa.Array.from_buffers(dtype, len(column), [None, pa.py_buffer(column)])))


def concatenated(chunks: list[Chunk]) -> Chunk:
    """The events of several chunks, one after another."""
    parts = [chunk.columns() for chunk in chunks]
    return Chunk(**{name: np.concatenate([part[name] for part in parts]) for name in parts[0]})
