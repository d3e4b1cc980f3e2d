from __future__ import annotations

import polars as pl
import pytest

from segue.data.read.arrow import TableInput
from segue.data.read.columns import Columns, find_columns
from segue.data.settings import PrepareSettings
from segue.errors import InputError, SettingsError


def find(columns: dict[str, list[object]], **options: str) -> Columns:
    """The columns found in a table."""
    log = TableInput(pl.DataFrame(columns), label="the table")
    return find_columns(log, PrepareSettings(**options))  # type: ignore[arg-type]


def with_names(*names: str) -> dict[str, list[object]]:
    return {name: ["2024-01-01"] for name in names}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("user", "item", "ts"), {"user": "user", "item": "item", "time": "ts"}),
        (("User-ID", "ITEM ID", "Time Stamp"), {"user": "User-ID", "item": "ITEM ID", "time": "Time Stamp"}),
        (
            ("InvoiceNo", "StockCode", "Description", "Quantity", "InvoiceDate", "CustomerID"),
            {"user": "CustomerID", "item": "StockCode", "time": "InvoiceDate"},
        ),
        (("userId", "movieId", "rating", "timestamp"), {"user": "userId", "item": "movieId", "time": "timestamp"}),
        (("visitorid", "event", "itemid", "timestamp"), {"user": "visitorid", "item": "itemid", "time": "timestamp"}),
        (
            ("reviewerID", "asin", "overall", "unixReviewTime", "reviewTime"),
            {"user": "reviewerID", "item": "asin", "time": "unixReviewTime"},
        ),
        (
            ("event_time", "event_type", "product_id", "user_id", "user_session"),
            {"user": "user_id", "item": "product_id", "time": "event_time"},
        ),
        (("session_id", "article_id"), {"user": "session_id", "item": "article_id"}),
    ],
)
def test_columns_of_well_known_logs_are_found(names: tuple[str, ...], expected: dict[str, str]) -> None:
    columns = find({name: ["x"] if "time" not in name.lower() else ["2024-01-01"] for name in names})
    assert columns.names == expected
    assert set(columns.found) == set(expected)
    assert not columns.lists


def test_a_stronger_name_wins_over_a_weaker_one() -> None:
    assert find(with_names("session_id", "user", "parent_asin", "asin", "date", "timestamp")).names == {
        "user": "user",
        "item": "asin",
        "time": "timestamp",
    }


def test_named_columns_are_used_and_the_rest_is_detected() -> None:
    columns = find(with_names("who", "item", "what", "time"), user="who", item="what")
    assert columns.names == {"user": "who", "item": "what", "time": "time"}
    assert columns.found == ("time",)


def test_value_and_kind_only_under_their_own_name() -> None:
    values: dict[str, list[object]] = {"user": ["a"], "item": ["b"], "rating": [3], "event_type": ["buy"]}
    assert set(find(values).names) == {"user", "item"}
    assert find(values, value="rating", kind="event_type").names["value"] == "rating"
    columns = find({**values, "value": [1.5], "kind": ["view"]})
    assert columns.names["value"] == "value" and columns.names["kind"] == "kind"
    assert "value" not in find({**values, "value": ["high"]}).names  # text is not a value


def test_a_time_of_day_gives_way_to_a_date() -> None:
    columns = find({"user": ["a"], "item": ["b"], "time": ["12:30"], "date": ["2024-01-01"]})
    assert columns.names["time"] == "date"


def test_an_unreadable_time_is_not_replaced_by_a_weekday() -> None:
    """It stays the time column, for --time-format to parse."""
    columns = find({"user": ["a"], "item": ["b"], "timestamp": ["5/12/2011 10:00"], "day": ["3"]})
    assert columns.names["time"] == "timestamp"


def test_dates_are_found_by_content() -> None:
    columns = find({"user": ["a"], "item": ["b"], "bought": ["2024-01-01 10:00"], "price": ["3.50"]})
    assert columns.names["time"] == "bought"
    epoch = find({"user": ["a"], "item": ["b"], "x": [1_600_000_000], "n": [4]})
    assert epoch.names["time"] == "x"
    assert "time" not in find({"user": ["a"], "item": ["b"], "n": [4]}).names


def test_ambiguity_lists_the_columns_and_the_option() -> None:
    with pytest.raises(
        InputError, match=r"the item could be 'sku' or 'product_id'; name it with --item.*'sku', 'product_id'"
    ):
        find(with_names("user", "sku", "product_id"))
    with pytest.raises(InputError, match="could be 'begun' or 'ended'; name it with --time"):
        find(with_names("user", "item", "begun", "ended"))


def test_no_match_lists_the_columns_and_the_option() -> None:
    with pytest.raises(InputError, match=r"no column that looks like the user; name it with --user.*'a', 'item'"):
        find(with_names("a", "item"))


def test_an_unknown_name_lists_the_columns() -> None:
    with pytest.raises(InputError, match="no column 'buyer' for --user; it has 'user', 'item'"):
        find(with_names("user", "item"), user="buyer")


def test_one_column_cannot_have_two_roles() -> None:
    with pytest.raises(SettingsError, match="'x' is named for both --user and --item"):
        PrepareSettings(user="x", item="x")


@pytest.mark.parametrize(
    "columns",
    [
        {"user_id": [1], "sequence_item_ids": ["3,4"], "sequence_ratings": ["5,3"], "sequence_timestamps": ["8,9"]},
        {"user": ["a"], "items": ["3,4"], "timestamps": ["1600000000,1600000001"]},
        {"user": ["a"], "item": [["3", "4"]], "time": [[1600000000, 1600000001]]},
    ],
)
def test_one_row_per_user_is_detected(columns: dict[str, list[object]]) -> None:
    assert find(columns).lists
