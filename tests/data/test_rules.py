"""The rules for rows; those that Spark runs itself give the same result on another engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import narwhals as nw
import polars as pl
import pyarrow as pa
import pytest

from segue.data.read.times import TimeRule
from segue.data.rules.rows import check_rows, k_core

ENGINES: dict[str, Callable[..., Any]] = {"polars": pl.LazyFrame, "arrow": pa.table}
LOG = {
    "user": ["a", "", "a", None, "b", "b", "c", ""],
    "item": ["x", "x", "", "y", "y", "x", "z", ""],
    "time": ["2024-01-01", "2024-01-01", "2024-01-01", "2024-01-01", "soon", "", "2024-01-01 00:01", "x"],
    "value": ["1.5", "2", "2", "2", "2", "2", "much", "2"],
    "order": ["1", "2", "3", "4", "5", "6", "7", "8"],
}


def materialise(frame: nw.LazyFrame[Any]) -> nw.LazyFrame[Any]:
    return frame.collect().lazy()


def test_a_row_has_the_reason_of_the_first_rule_it_breaks() -> None:
    rows = check_rows(pl.DataFrame(LOG), ["user", "item", "time", "value", "order"], TimeRule(form="iso"))
    assert rows["reason"].to_list() == [
        *(None, "no user", "no item", "no user", "unreadable time", "no time", "unreadable value", "no user"),
    ]
    assert rows["microseconds"].to_list()[0] == 1_704_067_200_000_000
    assert rows["amount"].to_list()[:2] == [1.5, 2.0]
    assert rows["order_number"].to_list() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_numeric_columns_need_no_parsing() -> None:
    columns = {"user": ["a", "a"], "item": ["x", "y"], "time": [1_600_000_000, 5], "value": [0.5, float("nan")]}
    rows = check_rows(pl.DataFrame(columns), list(columns), TimeRule(form="s"))  # type: ignore[arg-type]
    assert rows["reason"].to_list() == [None, "time is not in seconds"]
    assert rows["amount"].to_list()[0] == 0.5


@pytest.mark.parametrize("engine", ENGINES)
def test_the_core_is_the_same_on_every_engine(engine: str) -> None:
    events = {"user": [1, 1, 2, 2, 3, 3, 4], "item": [7, 8, 7, 8, 7, 9, 9]}
    core = k_core(nw.from_native(ENGINES[engine](events)).lazy(), min_user=2, min_item=2, settle=materialise)
    users, items = (survivors.collect() for survivors in core)
    assert sorted(zip(users["user"].to_list(), users["events"].to_list(), strict=True)) == [(1, 2), (2, 2)]
    assert sorted(zip(items["item"].to_list(), items["events"].to_list(), strict=True)) == [(7, 2), (8, 2)]
