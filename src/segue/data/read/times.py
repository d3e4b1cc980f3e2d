"""A column of times → microseconds UTC, with one unit for the whole column.

`votes` counts what the values look like, `decide` takes the form that most of them have, and `read_times` turns the
values of that form into microseconds and gives every other one its reason. All are narwhals expressions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import narwhals as nw

from segue.data.read.civil import MICROSECONDS, digits, shifted_to_utc, with_microseconds
from segue.data.read.time_format import TimeFormat, microseconds_of_fraction, offset_minutes
from segue.data.settings import PrepareSettings

Form = Literal["order", "s", "ms", "us", "ns", "iso", "format", "instant"]


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit of epoch time: the numbers that are read as it, and microseconds = number * times // per."""

    name: str
    least: int
    below: int
    times: int = 1
    per: int = 1


# Dates between 1973 and 5138 in each unit; what is smaller than any of them counts something and is no date.
UNITS: dict[str, Unit] = {
    "order": Unit("an order", 0, 10**8, times=MICROSECONDS),
    "s": Unit("seconds", 10**8, 10**11, times=MICROSECONDS),
    "ms": Unit("milliseconds", 10**11, 10**14, times=1000),
    "us": Unit("microseconds", 10**14, 10**17),
    "ns": Unit("nanoseconds", 10**17, 9 * 10**18, per=1000),
}
NAMES: dict[str, str] = {name: unit.name for name, unit in UNITS.items()} | {"iso": "ISO 8601"}

# Nothing that matches WHOLE overflows 64 bits; [0-9] because \d takes every script's digits.
WHOLE = r"^-?(?:[0-9]{1,18}|[1-8][0-9]{18})$"
DECIMAL = r"^-?[0-9]{1,18}(?:\.[0-9]+(?:[eE][+-]?[0-9]{1,2})?|[eE][+-]?[0-9]{1,2})$"
ISO = (
    r"^[0-9]{4}-[0-9]{2}-[0-9]{2}"
    r"(?:[T ][0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:[.,][0-9]{1,9})?)?(?: ?(?:Z|UTC|[+-][0-9]{2}(?::?[0-9]{2})?))?)?$"
)
COMMON = 0.001  # a form with this share of the rows is no stray mistake


@dataclass(frozen=True, slots=True)
class TimeRule:
    """How this column's times are read."""

    form: Form
    decimals: bool = False
    tails: bool = False
    """Whether any ISO time has a fraction or an offset."""
    format: str | None = None
    zone: str | None = None
    forced: bool = False
    """The unit was named with --time-format, so any number is taken as it."""

    @property
    def dated(self) -> bool:
        return self.form != "order"

    def description(self) -> str:
        """For the summary: what the times were taken for."""
        if self.form == "order":
            return "an order (small numbers), not dates"
        name = {"instant": "dates and times of the file's own type", "format": f"written as {self.format}"}
        text = name.get(self.form) or ("ISO 8601" if self.form == "iso" else f"epoch {UNITS[self.form].name}")
        if self.form in ("iso", "format", "instant"):
            text += f"; without an offset: {self.zone or 'UTC'}"
        return text


def looks_like_number_or_time(text: str) -> bool:
    """Whether one text could be a time, for telling columns and headers apart."""
    text = text.strip()
    return bool(re.match(WHOLE, text) or re.match(DECIMAL, text) or re.match(ISO, text))


def looks_like_date(text: str) -> bool:
    """The same for what can hardly be anything but a moment: ISO 8601, or an epoch number of our days."""
    text = text.strip()
    if re.match(WHOLE, text):
        return any(unit.least * 5 <= int(text) < unit.least * 30 for name, unit in UNITS.items() if name != "order")
    return bool(re.match(ISO, text))


def forced_rule(settings: PrepareSettings) -> TimeRule | None:
    """The rule that --time-format names, if it does."""
    said = settings.time_format
    if said is None:
        return None
    if said in UNITS:
        return TimeRule(form=said, decimals=True, zone=settings.time_zone, forced=True)  # type: ignore[arg-type]
    TimeFormat.parse(said)
    return TimeRule(form="format", format=said, zone=settings.time_zone)


def votes(frame: nw.LazyFrame[Any], column: str = "time") -> nw.LazyFrame[Any]:
    """One row of counts: how many values of the column look like each form."""
    marked = _with_numbers(frame, column, decimals=True)
    counts = [nw.len().alias("rows")]
    for name, unit in UNITS.items():
        fits = _fits("_whole", unit) | _fits("_decimal", unit)
        counts.append(_count(fits).alias(name))
    counts.append(_count(~nw.col("_decimal").is_null()).alias("decimals"))
    if _is_text(frame, column):
        iso = nw.col("_other").str.contains(ISO)
        counts.append(_count(iso).alias("iso"))
        counts.append(_count(iso & nw.col("_other").str.slice(16).str.contains("[^0-9:]")).alias("tails"))
    return marked.select(counts)


def decide(counts: Mapping[str, int], *, zone: str | None) -> TimeRule:
    """The form that most values have; with none at all, ISO 8601, under which every row will be refused."""
    forms: list[Form] = ["iso", "s", "ms", "us", "ns", "order"]
    form = max(forms, key=lambda name: counts.get(name, 0))
    return TimeRule(form=form, decimals=counts.get("decimals", 0) > 0, tails=counts.get("tails", 0) > 0, zone=zone)


def read_times(frame: nw.LazyFrame[Any], rule: TimeRule, column: str = "time") -> nw.LazyFrame[Any]:
    """Add `microseconds` (null where the time cannot be read) and `time_reason` (null where it can)."""
    if rule.form == "instant":
        read = frame.with_columns(shifted_to_utc(nw.col(column), rule.zone).alias("microseconds"))
        return _with_reason(read, missing=nw.col(column).is_null())
    if rule.form == "iso":
        return _with_reason(_read_iso(_stripped(frame, column), rule), missing=_no_text())
    if rule.format is not None:
        read = TimeFormat.parse(rule.format).microseconds(_stripped(frame, column), zone=rule.zone)
        return _with_reason(read, missing=_no_text())
    return _read_numbers(frame, rule, column)


def _read_numbers(frame: nw.LazyFrame[Any], rule: TimeRule, column: str) -> nw.LazyFrame[Any]:
    unit = UNITS[rule.form]
    if rule.forced:
        unit = Unit(unit.name, 0, 9 * 10**18 // unit.times, times=unit.times, per=unit.per)
    marked = _with_numbers(frame, column, decimals=rule.decimals)
    whole, decimal = nw.col("_whole"), nw.col("_decimal")
    value: nw.Expr = nw.when(_fits("_whole", unit)).then(whole * unit.times if unit.per == 1 else whole // unit.per)
    if rule.decimals:
        rounded = (decimal * (unit.times / unit.per)).round(0)
        value = nw.coalesce(value, nw.when(_fits("_decimal", unit)).then(rounded).cast(nw.Int64))
    number = ~whole.is_null() | ~decimal.is_null()
    return _with_reason(
        marked.with_columns(value.alias("microseconds")),
        missing=_no_text() if _is_text(frame, column) else ~number,
        misfit=(number, f"time is not {unit.name}" if rule.form == "order" else f"time is not in {unit.name}"),
    )


def _read_iso(frame: nw.LazyFrame[Any], rule: TimeRule) -> nw.LazyFrame[Any]:
    """Fields at their fixed places; the rest of the text is looked at only where the column has one."""
    fits = nw.col("_text").str.contains(ISO).fill_null(value=False)
    frame = frame.with_columns(nw.when(fits).then(nw.col("_text")).alias("_iso"))
    text = nw.col("_iso")
    timed = text.str.len_chars() >= 16
    fields = {
        "year": digits(text.str.slice(0, 4)),
        "month": digits(text.str.slice(5, 2)),
        "day": digits(text.str.slice(8, 2)),
        "hour": digits(text.str.slice(11, 2), where=timed).fill_null(0),
        "minute": digits(text.str.slice(14, 2), where=timed).fill_null(0),
        "second": digits(text.str.slice(17, 2), where=text.str.slice(16, 1) == ":").fill_null(0),
    }
    if rule.tails:
        rest = nw.when(text.str.len_chars() > 16).then(text.str.replace_all("^.{16}(?::[0-9]{2})?", ""))
        frame = frame.with_columns(rest.alias("_rest"))
        fields |= _tail_fields(nw.col("_rest"))
    return with_microseconds(frame, fields, zone=rule.zone)


def _tail_fields(rest: nw.Expr) -> dict[str, nw.Expr]:
    """What stands behind the seconds: .123, Z, +02:00, or both."""
    mark = rest.str.slice(0, 1)
    fraction = nw.when((mark == ".") | (mark == ",")).then(rest.str.slice(1).str.replace_all("[^0-9].*$", ""))
    zone = rest.str.replace_all("^[.,][0-9]+", "").str.strip_chars()
    return {
        "microsecond": microseconds_of_fraction(fraction).fill_null(0),
        "offset": offset_minutes(nw.when(zone != "").then(zone)),
    }


def _with_numbers(frame: nw.LazyFrame[Any], column: str, *, decimals: bool) -> nw.LazyFrame[Any]:
    """Add `_whole` (Int64) and `_decimal` (Float64), null where the value is not such a number."""
    dtype = frame.collect_schema()[column]
    value, none = nw.col(column), nw.lit(None, dtype=nw.Float64)
    if dtype.is_integer():
        return frame.with_columns(value.cast(nw.Int64).alias("_whole"), none.alias("_decimal"))
    if dtype.is_float():
        known = nw.when(value.is_finite()).then(value.cast(nw.Float64))
        return frame.with_columns(nw.lit(None, dtype=nw.Int64).alias("_whole"), known.alias("_decimal"))
    text, other = nw.col("_text"), nw.col("_other")
    frame = _stripped(frame, column)
    frame = frame.with_columns(nw.when(text.str.contains(WHOLE)).then(text).cast(nw.Int64).alias("_whole"))
    # few are left for the slower patterns, and nulls cost nothing
    frame = frame.with_columns(nw.when(nw.col("_whole").is_null()).then(text).alias("_other"))
    decimal = nw.when(other.str.contains(DECIMAL)).then(other).cast(nw.Float64) if decimals else none
    return frame.with_columns(decimal.alias("_decimal"))


def _stripped(frame: nw.LazyFrame[Any], column: str) -> nw.LazyFrame[Any]:
    return frame.with_columns(nw.col(column).str.strip_chars().alias("_text"))


def _is_text(frame: nw.LazyFrame[Any], column: str) -> bool:
    return bool(frame.collect_schema()[column] == nw.String)


def _no_text() -> nw.Expr:
    return nw.col("_text").is_null() | (nw.col("_text") == "")


def _fits(column: str, unit: Unit) -> nw.Expr:
    """Whether a number's size is that of the unit; each type is compared with its own, or Arrow refuses."""
    kind = float if column == "_decimal" else int
    size = nw.col(column).abs()
    return ((size >= kind(unit.least)) & (size < kind(unit.below))).fill_null(value=False)


def _count(condition: nw.Expr) -> nw.Expr:
    return condition.fill_null(value=False).cast(nw.Int64).sum()


def _with_reason(
    frame: nw.LazyFrame[Any], *, missing: nw.Expr, misfit: tuple[nw.Expr, str] | None = None
) -> nw.LazyFrame[Any]:
    other = nw.lit("unreadable time")
    if misfit is not None:
        other = nw.when(misfit[0]).then(nw.lit(misfit[1])).otherwise(other)
    reason = nw.when(missing).then(nw.lit("no time")).otherwise(other)
    return frame.with_columns(nw.when(nw.col("microseconds").is_null()).then(reason).alias("time_reason"))


def mixture(counts: Mapping[str, int]) -> str:
    """The sentence about a column in which more than one form is common, or nothing."""
    total = max(1, counts.get("rows", 0))
    shares = sorted(((counts.get(name, 0) / total, NAMES[name]) for name in NAMES), reverse=True)
    common = [f"{name} ({part:.1%})" for part, name in shares if part >= COMMON]
    if len(common) < 2:
        return ""
    return f"The time column mixes {' and '.join(common)}; it must hold one of them: convert the others first."


def moment(text: str, rule: TimeRule) -> int | None:
    """One moment in microseconds, said as a date or as a number in the column's own unit; None when it is neither."""
    dated = replace(rule, form="iso", format=None, decimals=False, tails=True)
    own = replace(rule, decimals=True) if rule.form in UNITS else dated
    for each in (own, dated):
        frame = nw.from_dict({"time": [text]}, backend="polars").lazy()
        found = read_times(frame, each).collect()["microseconds"][0]
        if found is not None:
            return int(found)
    return None
