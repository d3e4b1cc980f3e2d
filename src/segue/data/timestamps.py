"""One time as text → microseconds since 1970 UTC. Imports neither polars nor torch: the service reads single times.

`data.read.dates` reads columns by the same rule.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

MICROSECONDS = 1_000_000  # in a second
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

# Python and polars both read this pattern. Groups: date, hour, minute, second, fraction, offset.
# [0-9] because \d matches the digits of every script.
ISO = (
    r"^((?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})-[0-9]{2}-[0-9]{2})"
    r"(?:[Tt ]([01][0-9]|2[0-3])(?::([0-5][0-9])(?::([0-5][0-9])(?:[.,]([0-9]+))?)?)?"
    r"(?: ?(Z|z|UTC|[+-](?:[01][0-9]|2[0-3])(?::?[0-5][0-9])?))?)?$"
)
UNREADABLE = "unreadable time"
SKIPPED = "no such local time: the clocks skipped that hour"

_ISO = re.compile(ISO)


def read_iso(text: str, zone: str | None = None) -> int:
    """Read a date or a date and time in ISO 8601; raises ValueError with the reason if it cannot.

    zone: the time zone of a text without an offset; UTC when not given.
    """
    match = _ISO.match(text.strip())
    if match is None:
        raise ValueError(UNREADABLE)
    date, hour, minute, second, fraction, offset = match.groups()
    fraction = (fraction or "")[:6].ljust(6, "0")
    try:
        when = datetime.fromisoformat(f"{date}T{hour or '00'}:{minute or '00'}:{second or '00'}.{fraction}")
    except ValueError:
        raise ValueError(UNREADABLE) from None
    if offset is not None:
        when = when.replace(tzinfo=timezone(timedelta(microseconds=offset_microseconds(offset))))
    return utc_microseconds(when, zone)


def utc_microseconds(when: datetime, zone: str | None = None) -> int:
    """Convert a datetime; one without an offset is in `zone` (UTC when not given).

    If clocks showed a local time twice, the first is used; a local time that clocks skipped is a ValueError.
    """
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC if zone is None else ZoneInfo(zone))
        before, after = (when.replace(fold=fold).utcoffset() or timedelta() for fold in (0, 1))
        if before < after:
            raise ValueError(SKIPPED)
    since = when - EPOCH  # whole parts instead of timestamp(), a float that rounds microseconds
    return (since.days * 86_400 + since.seconds) * MICROSECONDS + since.microseconds


def iso_text(microseconds: int) -> str:
    """Write a time as ISO 8601 in UTC."""
    return (EPOCH + timedelta(microseconds=microseconds)).isoformat()


def offset_microseconds(text: str) -> int:
    """Convert an offset as ISO matches it: Z, UTC, +02, +0230 or -02:30."""
    digits = re.sub("[^0-9]", "", text).ljust(4, "0")
    minutes = int(digits[:2]) * 60 + int(digits[2:])
    return (-minutes if text.startswith("-") else minutes) * 60 * MICROSECONDS
