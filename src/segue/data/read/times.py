"""A column of times → microseconds UTC, with one unit for the whole column.

`votes` counts the values that fit each form, `decide` takes the commonest form, and `read_times` converts the values
of that form and gives every other value the reason why it is rejected.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import polars as pl

from segue.data.read.dates import TimeFormat, local_to_utc, read_dates
from segue.data.settings import PrepareSettings
from segue.data.timestamps import ISO, MICROSECONDS, SKIPPED, UNREADABLE, read_iso

Form = Literal["order", "s", "ms", "us", "ns", "iso", "format", "instant"]


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit of epoch time: the numbers that fit it, and microseconds = number * times // per."""

    name: str
    least: int
    below: int
    times: int = 1
    per: int = 1


# Dates between 1973 and 5138 in each unit; a smaller number is a counter and no date.
UNITS: dict[str, Unit] = {
    "order": Unit("an order", 0, 10**8, times=MICROSECONDS),
    "s": Unit("seconds", 10**8, 10**11, times=MICROSECONDS),
    "ms": Unit("milliseconds", 10**11, 10**14, times=1000),
    "us": Unit("microseconds", 10**14, 10**17),
    "ns": Unit("nanoseconds", 10**17, 9 * 10**18, per=1000),
}
NAMES: dict[str, str] = {name: unit.name for name, unit in UNITS.items()} | {"iso": "ISO 8601"}

# Nothing that matches WHOLE overflows 64 bits; [0-9] because \d matches the digits of every script.
WHOLE = r"^-?(?:[0-9]{1,18}|[1-8][0-9]{18})$"
DECIMAL = r"^-?[0-9]{1,18}(?:\.[0-9]+(?:[eE][+-]?[0-9]{1,2})?|[eE][+-]?[0-9]{1,2})$"
COMMON = 0.001  # a form with this share of the rows is more than a typing error


@dataclass(frozen=True, slots=True)
class TimeRule:
    """How this column's times are read."""

    form: Form
    decimals: bool = False
    format: str | None = None
    zone: str | None = None
    forced: bool = False
    """The unit was named with --time-format, so any number is read in it."""

    @property
    def dated(self) -> bool:
        return self.form != "order"

    def description(self) -> str:
        """How the times were read, for the summary."""
        if self.form == "order":
            return "an order (small numbers), not dates"
        name = {"instant": "dates and times of the file's own type", "format": f"written as {self.format}"}
        text = name.get(self.form) or ("ISO 8601" if self.form == "iso" else f"epoch {UNITS[self.form].name}")
        if self.form in ("iso", "format", "instant"):
            text += f"; without an offset: {self.zone or 'UTC'}"
        return text


def looks_like_number_or_time(text: str) -> bool:
    """Whether one text could be a time."""
    text = text.strip()
    return bool(re.match(WHOLE, text) or re.match(DECIMAL, text) or re.match(ISO, text))


def looks_like_date(text: str) -> bool:
    """Whether one text is surely a time: ISO 8601, or a recent time as an epoch number."""
    text = text.strip()
    if re.match(WHOLE, text):
        return any(unit.least * 5 <= int(text) < unit.least * 30 for name, unit in UNITS.items() if name != "order")
    return bool(re.match(ISO, text))


def forced_rule(settings: PrepareSettings) -> TimeRule | None:
    """The rule of --time-format, if it is given."""
    text = settings.time_format
    if text is None:
        return None
    if text in UNITS:
        return TimeRule(form=text, decimals=True, zone=settings.time_zone, forced=True)  # type: ignore[arg-type]
    TimeFormat.parse(text)
    return TimeRule(form="format", format=text, zone=settings.time_zone)


def votes(times: pl.Series) -> dict[str, int]:
    """How many values of the column fit each form."""
    numbers = _with_numbers(times, decimals=True)
    counts = [pl.len().alias("rows"), pl.col("decimal").count().alias("decimals")]
    counts += [(_fits("whole", unit) | _fits("decimal", unit)).sum().alias(name) for name, unit in UNITS.items()]
    if times.dtype == pl.String:
        counts.append(pl.col("other").str.contains(ISO).sum().alias("iso"))
    return numbers.select(counts).row(0, named=True)


def decide(counts: Mapping[str, int], *, zone: str | None) -> TimeRule:
    """The rule of the commonest form; ISO 8601, with which every row is rejected, if no value fits a form."""
    forms: list[Form] = ["iso", "s", "ms", "us", "ns", "order"]
    form = max(forms, key=lambda name: counts.get(name, 0))
    return TimeRule(form=form, decimals=counts.get("decimals", 0) > 0, zone=zone)


def read_times(times: pl.Series, rule: TimeRule) -> pl.DataFrame:
    """A table of `microseconds`, null if a time cannot be read, and the `time_reason` of each null."""
    if rule.form == "instant":
        local = pl.col("time")
        converted = times.alias("time").to_frame().with_columns(local_to_utc(local, rule.zone).alias("microseconds"))
        return _with_reason(converted, missing=local.is_null(), other=pl.lit(SKIPPED))
    if rule.form in ("iso", "format"):
        texts = times.cast(pl.String).str.strip_chars().alias("time")
        dates = read_dates(texts, rule.zone, None if rule.format is None else TimeFormat.parse(rule.format))
        return _with_reason(dates.with_columns(texts), missing=_is_empty("time"), other=pl.col("time_reason"))
    unit = UNITS[rule.form]
    if rule.forced:
        unit = Unit(unit.name, 0, 9 * 10**18 // unit.times, times=unit.times, per=unit.per)
    whole, decimal = pl.col("whole"), pl.col("decimal")
    value: pl.Expr = pl.when(_fits("whole", unit)).then(whole * unit.times if unit.per == 1 else whole // unit.per)
    if rule.decimals:
        rounded = (decimal * (unit.times / unit.per)).round(0)
        value = pl.coalesce(value, pl.when(_fits("decimal", unit)).then(rounded).cast(pl.Int64))
    is_number = whole.is_not_null() | decimal.is_not_null()
    misfit = f"time is not {unit.name}" if rule.form == "order" else f"time is not in {unit.name}"
    return _with_reason(
        _with_numbers(times, decimals=rule.decimals).with_columns(value.alias("microseconds")),
        missing=_is_empty("text") if times.dtype == pl.String else ~is_number,
        other=pl.when(is_number).then(pl.lit(misfit)).otherwise(pl.lit(UNREADABLE)),
    )


def _with_numbers(times: pl.Series, *, decimals: bool) -> pl.DataFrame:
    """`whole` (Int64) and `decimal` (Float64), null if a value is no such number; of texts also `text` and `other`."""
    value, none = pl.col("text"), pl.lit(None, dtype=pl.Float64).alias("decimal")
    frame = times.alias("text").to_frame()
    if times.dtype.is_integer():
        return frame.select(value.cast(pl.Int64).alias("whole"), none)
    if times.dtype.is_float():
        finite = pl.when(value.is_finite()).then(value.cast(pl.Float64))
        return frame.select(pl.lit(None, dtype=pl.Int64).alias("whole"), finite.alias("decimal"))
    frame = frame.with_columns(value.str.strip_chars())
    frame = frame.with_columns(pl.when(value.str.contains(WHOLE)).then(value).cast(pl.Int64).alias("whole"))
    # few are left for the slower patterns, and nulls cost nothing
    frame = frame.with_columns(pl.when(pl.col("whole").is_null()).then(value).alias("other"))
    decimal = pl.when(pl.col("other").str.contains(DECIMAL)).then("other").cast(pl.Float64).alias("decimal")
    return frame.with_columns(decimal if decimals else none)


def _is_empty(column: str) -> pl.Expr:
    return pl.col(column).is_null() | (pl.col(column) == "")


def _fits(column: str, unit: Unit) -> pl.Expr:
    """Whether a number's size is that of the unit."""
    size = pl.col(column).abs()
    return ((size >= unit.least) & (size < unit.below)).fill_null(value=False)


def _with_reason(frame: pl.DataFrame, *, missing: pl.Expr, other: pl.Expr) -> pl.DataFrame:
    reason = pl.when(missing).then(pl.lit("no time")).otherwise(other)
    unread = pl.when(pl.col("microseconds").is_null()).then(reason)
    return frame.select("microseconds", unread.alias("time_reason"))


def mixture(counts: Mapping[str, int]) -> str:
    """An error message if more than one form is common in the column; else empty."""
    total = max(1, counts.get("rows", 0))
    shares = sorted(((counts.get(name, 0) / total, NAMES[name]) for name in NAMES), reverse=True)
    common = [f"{name} ({part:.1%})" for part, name in shares if part >= COMMON]
    if len(common) < 2:
        return ""
    return f"The time column mixes {' and '.join(common)}; it must hold one of them: convert the others first."


def read_time(text: str, rule: TimeRule) -> int:
    """One time in microseconds: a number in the column's own unit, or ISO 8601; else raises ValueError."""
    if rule.form in UNITS:
        value = read_times(pl.Series([text]), replace(rule, decimals=True))["microseconds"][0]
        if value is not None:
            return int(value)
    return read_iso(text, rule.zone)
