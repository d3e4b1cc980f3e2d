"""Year, month, day, hour … → microseconds since 1970 UTC, as whole-number arithmetic that every engine can do.

Engines disagree about parsing dates and about impossible ones; they agree about slices of text and about integers.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import narwhals as nw

from segue.data.settings import named_zone

MICROSECONDS = 1_000_000
FIELDS = ("year", "month", "day", "hour", "minute", "second", "microsecond")

_DAYS_TO_1970 = 719_468  # from 1 March of the year 0
_ZONE_YEARS = (1970, 2050)
_STEP = datetime.timedelta(days=5)  # no zone keeps an offset for less


def digits(text: nw.Expr, *, where: nw.Expr | None = None) -> nw.Expr:
    """Text of digits as a number; null where the condition does not hold, as a cast may not meet anything else."""
    return (text if where is None else nw.when(where).then(text)).cast(nw.Int64)


def with_microseconds(frame: nw.LazyFrame[Any], fields: dict[str, nw.Expr], *, zone: str | None) -> nw.LazyFrame[Any]:
    """Add `microseconds` from fields by name; null where a field is, or where there is no such day or hour.

    A field that is not given is 0. `offset`, in minutes east of UTC, is null where the text has none.
    """
    zero = nw.lit(0, dtype=nw.Int64)
    columns = {f"_{name}": fields.get(name, zero) for name in FIELDS}
    columns["_offset"] = fields.get("offset", nw.lit(None, dtype=nw.Int64))
    frame = frame.with_columns(**columns)
    hour, minute, second = nw.col("_hour"), nw.col("_minute"), nw.col("_second")
    seconds = _days() * 86_400 + hour * 3600 + minute * 60 + second
    possible = _is_day() & (hour < 24) & (minute < 60) & (second < 60)
    local = nw.when(possible).then(seconds * MICROSECONDS + nw.col("_microsecond"))
    frame = frame.with_columns(local.alias("_local"))
    given = nw.col("_local") - nw.col("_offset") * (60 * MICROSECONDS)
    return frame.with_columns(nw.coalesce(given, shifted_to_utc(nw.col("_local"), zone)).alias("microseconds"))


def _days() -> nw.Expr:
    """Days from 1970 to the date; the year is counted from March, so that the leap day is its last."""
    month, march_month = nw.col("_month"), (nw.col("_month") + 9) % 12
    year = nw.col("_year") - (month < 3).cast(nw.Int64)
    leaps = year // 4 - year // 100 + year // 400
    return year * 365 + leaps + (march_month * 153 + 2) // 5 + nw.col("_day") - 1 - _DAYS_TO_1970


def _is_day() -> nw.Expr:
    year, month, day = nw.col("_year"), nw.col("_month"), nw.col("_day")
    leap = (year % 4 == 0) & ((year % 100 != 0) | (year % 400 == 0))
    short = (month == 4) | (month == 6) | (month == 9) | (month == 11)
    fits = (day <= 28) | ((day == 29) & ((month != 2) | leap)) | ((day == 30) & (month != 2))
    return (month >= 1) & (month <= 12) & (day >= 1) & (fits | ((day == 31) & (month != 2) & ~short))


def shifted_to_utc(local: nw.Expr, zone: str | None) -> nw.Expr:
    """Microseconds by a zone's wall clock → microseconds UTC. Of an hour that comes twice, the first is meant."""
    if zone is None:
        return local
    first, changes = _offsets(zone)
    shifts = [(local >= start).cast(nw.Int64) * change for start, change in changes]
    return local - first - nw.sum_horizontal(*shifts) if shifts else local - first


@lru_cache(maxsize=4)
def _offsets(name: str) -> tuple[int, list[tuple[int, int]]]:
    """The zone's first offset, and each (wall-clock moment, change of the offset), all in microseconds."""
    zone, utc = named_zone(name), datetime.UTC

    def offset(moment: datetime.datetime) -> int:
        return round((moment.astimezone(zone).utcoffset() or datetime.timedelta()).total_seconds())

    moment, end = (datetime.datetime(year, 1, 1, tzinfo=utc) for year in _ZONE_YEARS)
    first, changes = offset(moment), []
    while moment < end:
        following = moment + _STEP
        before, after = offset(moment), offset(following)
        if before != after:
            changed = _change(offset, moment, following)
            wall = int(changed.timestamp()) + max(before, after)
            changes.append((wall * MICROSECONDS, (after - before) * MICROSECONDS))
        moment = following
    return first * MICROSECONDS, changes


def _change(
    offset: Callable[[datetime.datetime], int], low: datetime.datetime, high: datetime.datetime
) -> datetime.datetime:
    """The first second with the offset of `high`."""
    second, after = datetime.timedelta(seconds=1), offset(high)
    while high - low > second:
        middle = low + second * ((high - low) // second // 2)
        low, high = (low, middle) if offset(middle) == after else (middle, high)
    return high
