"""The rules between an engine's reader and its writer, as narwhals expressions: written once, run by any engine."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import narwhals as nw

from segue.data.read.times import WHOLE, TimeRule, read_times
from segue.data.settings import Role

Settle = Callable[[nw.LazyFrame[Any]], nw.LazyFrame[Any]]
"""Computes a frame, so that whoever asks for it again does not."""

MOST_WHOLE = 2.0**63  # below it a whole number fits where places are kept
NUMBER = r"^[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,2})?$"


def judge(frame: nw.LazyFrame[Any], roles: Collection[Role], rule: TimeRule | None) -> nw.LazyFrame[Any]:
    """Add `reason`, null for a good row, and the numbers: `microseconds`, `amount` (value), `place` (order)."""
    reasons: list[nw.Expr] = [
        nw.when(_missing("user")).then(nw.lit("no user")),
        nw.when(_missing("item")).then(nw.lit("no item")),
    ]
    if rule is not None:
        frame = read_times(frame, rule)
        reasons.append(nw.col("time_reason"))
    if "value" in roles:
        frame = _with_number(frame, "value", "amount", NUMBER, nw.Float64())
        unread = nw.col("amount").is_null() & ~_missing_number(frame, "value")
        reasons.append(nw.when(unread).then(nw.lit("unreadable value")))
    if "order" in roles:
        frame = _with_number(frame, "order", "place", WHOLE, nw.Int64())
        reasons.append(nw.when(nw.col("place").is_null()).then(nw.lit("unreadable order")))
    return frame.with_columns(nw.coalesce(*reasons).alias("reason"))


def _missing(column: str) -> nw.Expr:
    return nw.col(column).is_null() | (nw.col(column) == "")


def _missing_number(frame: nw.LazyFrame[Any], column: str) -> nw.Expr:
    dtype = frame.collect_schema()[column]
    if dtype.is_float():
        return nw.col(column).is_null() | nw.col(column).is_nan()
    return nw.col(column).is_null() if dtype.is_numeric() else _missing(column)


def _with_number(
    frame: nw.LazyFrame[Any], column: str, name: str, pattern: str, dtype: nw.dtypes.DType
) -> nw.LazyFrame[Any]:
    """Add a number read from text, or taken from a column of numbers; null where there is none."""
    value = nw.col(column)
    found = frame.collect_schema()[column]
    if found == nw.String:
        value = value.str.strip_chars()
        return frame.with_columns(nw.when(value.str.contains(pattern)).then(value).cast(dtype).alias(name))
    if found.is_float():
        usable = value.is_finite()
        if dtype.is_integer():
            usable = usable & (value == value.round(0)) & (value.abs() < MOST_WHOLE)
        value = nw.when(usable).then(value)
    return frame.with_columns(value.cast(dtype).alias(name))


def k_core(
    events: nw.LazyFrame[Any], *, min_user: int, min_item: int, settle: Settle
) -> tuple[nw.LazyFrame[Any], nw.LazyFrame[Any]]:
    """Users and items with enough events among each other, each with its `events`.

    Leaving out an item can put a user below the minimum and so on, so it is done until nothing changes. Who is out
    stays out, as counts only fall; so each count has to look at one side's survivors only.
    """
    users = settle(_frequent(events, "user", min_user))
    count = _size(users)
    while True:
        items = settle(_frequent(events.join(users, on="user", how="semi"), "item", min_item))
        left = settle(_frequent(events.join(items, on="item", how="semi"), "user", min_user))
        before, count = count, _size(left)
        if count == before:
            return left, items
        users = left


def _frequent(events: nw.LazyFrame[Any], column: str, least: int) -> nw.LazyFrame[Any]:
    counted = events.group_by(column).agg(nw.len().alias("events")).filter(nw.col("events") >= least)
    return counted.with_columns(nw.col("events").cast(nw.Int64))


def _size(frame: nw.LazyFrame[Any]) -> int:
    return int(frame.select(nw.len()).collect().item())
