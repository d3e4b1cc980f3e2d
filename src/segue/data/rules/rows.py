"""The rules for rows and the k-core, shared by both engines.

`check_rows` runs on polars blocks, also on Spark's executors; `k_core` uses narwhals expressions, which Spark runs
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import narwhals as nw
import numpy as np
import polars as pl
from polars.datatypes import DataTypeClass

from segue.data.read.times import WHOLE, TimeRule, read_times
from segue.data.settings import PrepareSettings, Role
from segue.errors import InputError

Settle = Callable[[nw.LazyFrame[Any]], nw.LazyFrame[Any]]
"""Computes a frame once for all later uses."""

MAX_KINDS = 1 << 16
MAX_WHOLE = 2.0**63  # below it a whole number fits into 64 bits
NUMBER = r"^[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,2})?$"


def check_rows(frame: pl.DataFrame, roles: Collection[Role], rule: TimeRule | None) -> pl.DataFrame:
    """Add `reason`, null for a good row, and the numbers: `microseconds`, `amount` (value), `order_number` (order)."""
    reasons: list[pl.Expr] = [
        pl.when(_missing(frame["user"])).then(pl.lit("no user")),
        pl.when(_missing(frame["item"])).then(pl.lit("no item")),
    ]
    if rule is not None:
        frame = frame.hstack(read_times(frame["time"], rule))
        reasons.append(pl.col("time_reason"))
    if "value" in roles:
        amount = _number(frame["value"], NUMBER, pl.Float64).alias("amount")
        frame = frame.with_columns(amount)
        reasons.append(pl.when(amount.is_null() & ~_missing(frame["value"])).then(pl.lit("unreadable value")))
    if "order" in roles:
        frame = frame.with_columns(_number(frame["order"], WHOLE, pl.Int64).alias("order_number"))
        reasons.append(pl.when(pl.col("order_number").is_null()).then(pl.lit("unreadable order")))
    return frame.with_columns(pl.coalesce(reasons).alias("reason"))


def _missing(column: pl.Series) -> pl.Series:
    """Mask of empty cells: null, empty text or NaN."""
    if column.dtype.is_float():
        return column.is_null() | column.is_nan()
    return column.is_null() | (column == "") if column.dtype == pl.String else column.is_null()


def _number(column: pl.Series, pattern: str, dtype: DataTypeClass) -> pl.Series:
    """Numbers of texts that match the pattern, or of a column of numbers; null if a cell holds none."""
    if column.dtype == pl.String:
        column = column.str.strip_chars()
        usable = column.str.contains(pattern)
    elif column.dtype.is_float():
        usable = column.is_finite()
        if dtype.is_integer():
            usable &= (column == column.round()) & (column.abs() < MAX_WHOLE)
    else:
        return column.cast(dtype)
    return pl.select(pl.when(usable).then(column)).to_series().cast(dtype)


def k_core(
    events: nw.LazyFrame[Any], *, min_user: int, min_item: int, settle: Settle
) -> tuple[nw.LazyFrame[Any], nw.LazyFrame[Any]]:
    """The users and the items of the k-core, each with its number of `events`.

    Removing an item can put a user below the minimum, and so on, so both steps repeat until nothing changes. Counts
    only fall, so no user or item comes back, and each count needs only the survivors of the other side.
    """
    users = settle(_frequent(events, "user", min_user))
    count = _size(users)
    while True:
        items = settle(_frequent(events.join(users, on="user", how="semi"), "item", min_item))
        survivors = settle(_frequent(events.join(items, on="item", how="semi"), "user", min_user))
        before, count = count, _size(survivors)
        if count == before:
            return survivors, items
        users = survivors


def _frequent(events: nw.LazyFrame[Any], column: str, least: int) -> nw.LazyFrame[Any]:
    counts = events.group_by(column).agg(nw.len().alias("events")).filter(nw.col("events") >= least)
    return counts.with_columns(nw.col("events").cast(nw.Int64))


def _size(frame: nw.LazyFrame[Any]) -> int:
    return int(frame.select(nw.len()).collect().item())


def no_user_left(events: int, items: int, user_counts: np.ndarray, settings: PrepareSettings) -> InputError:
    """The error of an empty k-core. user_counts: [all users] the events of each."""
    enough = int((user_counts >= settings.min_user).sum())
    return InputError(
        f"No user is left: of {len(user_counts)} users and {items} items with {events} events, "
        f"{enough} users have the {settings.min_user} events that --min-user requires (the most active has "
        f"{int(user_counts.max())}), and none on items with {settings.min_item} events (--min-item). Lower one or both."
    )


def refuse_many_kinds(count: int) -> None:
    """Refuse more kinds than 16 bits can number."""
    if count > MAX_KINDS:
        raise InputError(f"The --kind column holds more than {MAX_KINDS} different values; expected a few kinds.")


def stored_values(amounts: pl.Series) -> np.ndarray:
    """Values as they are stored [n] float32, NaN if there is none."""
    return amounts.cast(pl.Float32).fill_null(float("nan")).to_numpy()
