"""Histories in ids → one batch of item numbers, and the ids that are unknown."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from segue.data.batch import Batch, cut_by_budget
from segue.data.timestamps import MICROSECONDS, read_iso, utc_microseconds
from segue.data.vocabulary import PADDING, Kinds, Names
from segue.errors import InputError

LATEST = 100_000_000_000  # seconds, the year 5138: a larger number is in milliseconds or smaller units

Timestamp = int | float | datetime | str
"""Seconds since 1970, or a date and time; without an offset it is UTC."""


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One event of a history. A plain id is an entry without time, kind and value."""

    item: str | int
    time: float | str | None = None
    """Seconds since 1970, or a date and time (ISO 8601; UTC if it has no offset)."""
    kind: str | None = None
    """The kind of the event, such as click or buy, as named in the training log; used by models with kinds of events as
    input, such as inputs = "events". An unknown kind counts as none."""
    value: float | None = None
    """The value of the event, such as a rating or a duration; used by models with values as input."""


FIELDS = Entry.__struct_fields__


@dataclass(frozen=True, eq=False)
class KnownItems:
    """The items and the event kinds that a run knows. Number 0 is padding."""

    names: Names
    counts: np.ndarray  # [V + 1] int64: events of each item in training
    answerable: np.ndarray  # [V + 1] bool: items with a count, and items whose content the model knows
    kinds: Kinds  # the event kinds that the model distinguishes
    timed: bool  # whether the model uses the times of events

    @cached_property
    def by_count(self) -> np.ndarray:
        """All item numbers, the most frequent in training first; equal counts, the lower number first."""
        return np.argsort(-self.counts, kind="stable")


def identifier(item: Any) -> str:
    """An id as text; a whole number becomes its digits."""
    if isinstance(item, str):
        return str(item)
    if not isinstance(item, bool | np.bool_):
        try:
            return str(operator.index(item))
        except TypeError:
            pass
    raise InputError(f"An item id is a text or a whole number, got {item!r} ({type(item).__name__}).")


def identifiers(ids: Iterable[Any], name: str) -> list[str]:
    """A list of ids as texts. `name`: the argument's name, for the error message."""
    _refuse_single(ids, name)
    return [identifier(item) for item in ids]


def _refuse_single(value: Any, name: str) -> None:
    """Refuse a single id where a list is expected: a text would be iterated letter by letter."""
    if isinstance(value, str | bytes | Mapping | Entry) or not isinstance(value, Iterable):
        shown = value if isinstance(value, str) else type(value).__name__
        raise InputError(f'{name} must be a list of item ids, got {shown!r}; put ids in brackets: ["a", "b"].')


def microseconds(time: Timestamp) -> int:
    """A time as microseconds since 1970, UTC."""
    if isinstance(time, str):
        try:
            return read_iso(time)
        except ValueError:
            raise InputError(
                f"A time is seconds since 1970 or ISO 8601 (2026-01-31T12:00:00Z), got {time!r}."
            ) from None
    if isinstance(time, datetime):
        return utc_microseconds(time)
    if isinstance(time, bool) or not isinstance(time, int | float | np.integer | np.floating):
        raise InputError(f"A time is seconds since 1970 or a date, got {time!r} ({type(time).__name__}).")
    if not -LATEST <= time <= LATEST:
        raise InputError(f"The time {time!r} is no date in seconds since 1970; divide milliseconds by 1000.")
    return round(time * MICROSECONDS)


def read_entry(entry: Any) -> Entry:
    """An id, a mapping or an `Entry` → an `Entry` whose item is a text."""
    if isinstance(entry, Entry):
        return entry if isinstance(entry.item, str) else msgspec.structs.replace(entry, item=identifier(entry.item))
    if not isinstance(entry, Mapping):
        return Entry(item=identifier(entry))
    if "item" not in entry or not set(entry) <= set(FIELDS):
        raise InputError(f"A history's entry has {', '.join(FIELDS)}, of which item is needed; got {dict(entry)!r}.")
    time, kind, value = entry.get("time"), entry.get("kind"), entry.get("value")
    if kind is not None and not isinstance(kind, str):
        raise InputError(f"The kind of an event is a text, got {kind!r} ({type(kind).__name__}).")
    try:
        number = None if value is None else float(value)
    except (TypeError, ValueError):
        raise InputError(f"The value of an event is a number, got {value!r}.") from None
    seconds = microseconds(time) / MICROSECONDS if isinstance(time, str) else time
    return Entry(item=identifier(entry["item"]), time=seconds, kind=kind, value=number)


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """The events of one history, oldest first, by column."""

    items: list[str]
    times: list[int]
    """Microseconds; all zero if any entry has no time."""
    values: list[float | None]
    kinds: list[str | None]

    @property
    def has_times(self) -> bool:
        return any(self.times)


def read_history(history: Iterable[Any] | History) -> History:
    """Read the entries of a history; if every entry has a time, they are sorted by it, and ties keep their order."""
    if isinstance(history, History):
        return history
    _refuse_single(history, "A history")
    if isinstance(history, Set):
        raise InputError("A history must be a list of item ids, oldest first; a set has no order.")
    entries = [read_entry(entry) for entry in history]
    times = [microseconds(entry.time) for entry in entries if entry.time is not None]
    if len(times) == len(entries):
        order = sorted(range(len(times)), key=times.__getitem__)
        entries, times = [entries[index] for index in order], [times[index] for index in order]
    else:
        times = [0] * len(entries)
    kinds = [entry.kind for entry in entries]
    return History([str(entry.item) for entry in entries], times, [entry.value for entry in entries], kinds)


def read_histories(
    histories: Iterable[Iterable[Any] | History], now: Timestamp | None = None
) -> tuple[list[History], np.ndarray | None]:
    """Read several histories, and the request time as the query time of each in seconds [B]; None if there is none."""
    _refuse_single(histories, "The histories")
    read = [read_history(history) for history in histories]
    return read, None if now is None else np.full(len(read), microseconds(now) // MICROSECONDS)


def pack_histories(
    histories: Sequence[History], known: KnownItems, *, query_times: np.ndarray | None = None
) -> tuple[Batch, list[list[str]]]:
    """Pack whole histories into one batch, without unknown items, whose lengths may be 0; and the unknown ids of each
    history, each once, in order. `query_times` [B]: seconds."""
    ids = [item for history in histories for item in history.items]
    numbers = known.names.numbers(ids, unknown="zero")
    readable = known.answerable[numbers] & (numbers != PADDING)
    times = np.array([time for history in histories for time in history.times], dtype=np.int64) // MICROSECONDS
    kinds = [kind for history in histories for kind in history.kinds]
    owners = np.repeat(np.arange(len(histories)), [len(history.items) for history in histories])
    unknown: list[dict[str, None]] = [{} for _ in histories]
    for row in np.flatnonzero(~readable).tolist():
        unknown[owners[row]][ids[row]] = None
    values: np.ndarray | None = None
    if any(value is not None for history in histories for value in history.values):
        every = np.array([value for history in histories for value in history.values], dtype=np.float64)  # None is NaN
        with np.errstate(over="ignore"):  # too large for float32 is infinite
            values = every[readable].astype(np.float32)
    batch = Batch(
        items=numbers[readable],
        times=times[readable],
        lengths=np.bincount(owners[readable], minlength=len(histories)),
        query_times=query_times,
        kinds=known.kinds.numbers(kinds)[readable] if known.kinds else None,
        values=values,
    )
    return batch, [list(ids) for ids in unknown]


def similar_lengths(lengths: np.ndarray, longest: int, *, tokens: int, most_rows: int) -> Iterator[np.ndarray]:
    """Group the histories that are not empty by length, shortest first.

    Each group has at most `tokens` events, counting at most `longest` of a history, and `most_rows` histories.
    """
    if lengths.sum() <= tokens and len(lengths) <= most_rows and lengths.all():
        if len(lengths):
            yield np.arange(len(lengths))
        return
    rows = np.flatnonzero(lengths)
    encoded = np.minimum(lengths[rows], longest)
    order = np.argsort(encoded, kind="stable")
    for group in cut_by_budget(encoded[order], tokens):
        for begin in range(0, len(group), most_rows):
            yield rows[order[group[begin : begin + most_rows]]]
