from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from event_logs import write_csv

from segue.data.prepare import prepare
from segue.data.write.summary import summary_lines
from segue.errors import InputError


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_csv(tmp_path / "log.csv", [("a", "x", 1), ("a", "007", 2), ("b", "x", 1), ("b", "z", 2)])


def item_table(log: Path, catalogue: object) -> pl.DataFrame:
    return prepare(log, items=catalogue, min_user=1, min_item=1).vocabulary.table


def test_titles_and_every_further_column(tmp_path: Path, log: Path) -> None:
    rows = [("x", "An X, large", "9.50", "tea|rye"), ("never bought", "N", "1", ""), ("007", "Bond", "", "film")]
    catalogue = write_csv(tmp_path / "items.csv", rows, header=("item", "title", "price", "genres"))
    data = prepare(log, items=catalogue, min_user=1, min_item=1)
    assert data.vocabulary.table.to_dict(as_series=False) == {
        "id": ["007", "x", "z"],
        "count": [1, 2, 1],
        "title": ["Bond", "An X, large", None],
        "price": ["", "9.50", None],
        "genres": ["film", "tea|rye", None],
    }
    assert data.vocabulary.titles(np.array([2, 3])) == ["An X, large", None]
    assert data.manifest["counts"]["catalogue"] == {"rows": 3, "rejected": 0, "duplicates": 0, "described": 2}
    assert summary_lines(data.manifest)[-1] == "catalogue  2 of 3 items described"


def test_the_first_row_of_an_id_wins(tmp_path: Path, log: Path) -> None:
    rows = [("x", "first"), ("x", "second"), ("z", "Z"), ("never", "1"), ("never", "2")]
    data = prepare(log, items=write_csv(tmp_path / "items.csv", rows, header=("id", "name")), min_user=1, min_item=1)
    assert data.vocabulary.table["title"].to_list() == [None, "first", "Z"]
    assert data.manifest["counts"]["catalogue"]["duplicates"] == 1
    assert "1 rows with an id of an earlier row were left out" in summary_lines(data.manifest)[-1]


def test_a_table_keeps_its_column_types(log: Path) -> None:
    table = pl.DataFrame({"item": ["x", "z"], "price": [1.5, None], "tags": [["a", "b"], []], "count": [7, 8]})
    items = item_table(log, table)
    assert items.columns == ["id", "count", "price", "tags", "catalogue_count"]
    assert items.filter(pl.col("id") == "x").row(0) == ("x", 2, 1.5, ["a", "b"], 7)


def test_json_keys_may_be_any_text_and_lists_of_numbers_are_vectors(tmp_path: Path, log: Path) -> None:
    (tmp_path / "items.jsonl").write_text(
        '{"item": "x", "shelf mark": "X", "row": 5, "shape": [1, 0.1], "tags": ["2019"], "list-price": 3}\n'
        '{"item": "z", "class": "tea", "shape": [2, -3e-2], "tags": ["2019", "2020"]}\n'
    )
    items = item_table(log, tmp_path / "items.jsonl")
    assert items.schema["shape"] == pl.Array(pl.Float32, 2)
    assert items.drop("shape", "count").to_dicts() == [
        {"id": "007"} | dict.fromkeys(("shelf mark", "catalogue_row", "tags", "list-price", "class")),
        {"id": "x", "shelf mark": "X", "catalogue_row": "5", "tags": ["2019"], "list-price": "3", "class": None},
        {"id": "z", "tags": ["2019", "2020"], "class": "tea"}
        | dict.fromkeys(("shelf mark", "catalogue_row", "list-price")),
    ]
    assert items["shape"].to_list()[1:] == [pytest.approx([1, 0.1]), pytest.approx([2, -0.03])]
    (tmp_path / "items.jsonl").write_text('{"item": "x", "a \\"name\\"": 1}\n')
    with pytest.raises(InputError, match="a key holds a quotation mark"):
        item_table(log, tmp_path / "items.jsonl")


def test_a_column_called_row_is_kept(tmp_path: Path, log: Path) -> None:
    items = item_table(log, write_csv(tmp_path / "items.csv", [("x", "front")], header=("item", "row")))
    assert items["catalogue_row"].to_list() == [None, "front", None]


def test_the_id_column_may_have_its_name_in_the_log(tmp_path: Path) -> None:
    log = write_csv(tmp_path / "log.csv", [("a", "x", 1), ("a", "y", 2)], header=("user", "thing", "time"))
    catalogue = write_csv(tmp_path / "items.csv", [("x", "X")], header=("thing", "description"))
    data = prepare(log, item="thing", items=catalogue, min_user=1, min_item=1)
    assert data.vocabulary.titles(np.array([1, 2])) == ["X", None]


def test_numbers_are_matched_by_their_digits(tmp_path: Path) -> None:
    log = write_csv(tmp_path / "log.csv", [("a", "12", 1), ("a", "7", 2)])
    assert item_table(log, pl.DataFrame({"item": [7, 12], "title": ["seven", "twelve"]}))["title"].to_list() == [
        *("twelve", "seven"),
    ]


@pytest.mark.parametrize(
    ("header", "row", "message"),
    [
        (("what", "title"), ("x", "X"), "no column looks like the item's id; name it `item`.*'what', 'title'"),
        (("sku", "asin"), ("x", "X"), "more than one column could be the item's id"),
        (("item", "title"), ("other", "X"), r"none of its ids is an item of the log \(such as '007'\)"),
    ],
)
def test_a_catalogue_without_usable_ids_is_refused(
    tmp_path: Path, log: Path, header: tuple[str, ...], row: tuple[str, ...], message: str
) -> None:
    catalogue = write_csv(tmp_path / "items.csv", [row], header=header)
    with pytest.raises(InputError, match=message):
        item_table(log, catalogue)


def test_broken_rows_of_a_catalogue_are_counted_and_many_are_refused(tmp_path: Path, log: Path) -> None:
    catalogue = tmp_path / "items.csv"
    catalogue.write_text("item,title\n" + "x,X\n" * 500 + "z,Z,zz\n")
    data = prepare(log, items=catalogue, min_user=1, min_item=1)
    assert data.manifest["counts"]["catalogue"]["rejected"] == 1
    catalogue.write_text("item,title\n" + "x,X\n" * 5 + "z,Z,zz\n")
    with pytest.raises(InputError, match="1 of 6 rows cannot be read"):
        item_table(log, catalogue)
