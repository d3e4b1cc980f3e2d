"""Search by id and title, and filters on columns, against matches picked by hand."""

from __future__ import annotations

import polars as pl
import pytest

from segue.data.vocabulary import Vocabulary
from segue.errors import InputError
from segue.serving.engine.catalogue_search import CatalogueSearch
from segue.serving.requests import FilterValue

TABLE = pl.DataFrame(
    {
        "id": ["a1", "A10", "b2", "cup", "x%", "mug"],
        "count": [5, 9, 9, 1, 3, 2],
        "title": ["Red cup", "Blue CUP", None, "Saucer", "100% cotton", "Cupboard"],
        "category": ["cups", "cups", None, "plates", "cloth", "wood"],
        "in_stock": [True, False, True, True, None, False],
        "price": [2.5, 3.0, 4.0, 3.0, None, 1.0],
        "tags": [["x"], [], None, ["y"], [], []],
    }
)


@pytest.fixture(name="catalogue")
def of_six() -> CatalogueSearch:
    return CatalogueSearch(Vocabulary(TABLE))


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("cup", ["cup", "mug", "A10", "a1"]),  # the id itself, then those that begin with it, then by count
        ("CUP", ["cup", "mug", "A10", "a1"]),
        ("a1", ["a1", "A10"]),
        ("%", ["x%"]),  # literal text, not a pattern
        ("red c", ["a1"]),
        ("", ["A10", "b2", "a1", "x%", "mug", "cup"]),
        ("  ", ["A10", "b2", "a1", "x%", "mug", "cup"]),
        ("nothing of it", []),
        ("(", []),
    ],
)
def test_search(catalogue: CatalogueSearch, text: str, ids: list[str]) -> None:
    assert [item.id for item in catalogue.search(text, 20)] == ids
    assert [item.id for item in catalogue.search(text, 2)] == ids[:2]


def test_an_item_comes_with_its_columns(catalogue: CatalogueSearch) -> None:
    (item,) = catalogue.search("saucer", 5)
    assert (item.id, item.title, item.count) == ("cup", "Saucer", 1)
    assert item.details == {"category": "plates", "in_stock": True, "price": 3.0, "tags": ["y"]}
    (untitled,) = catalogue.search("b2", 5)
    assert untitled.title is None
    assert "category" not in untitled.details


@pytest.mark.parametrize(
    ("where", "numbers"),
    [
        ({"category": ["cups"]}, [1, 2]),
        ({"category": ["cups", "wood"]}, [1, 2, 6]),
        ({"category": ["cups"], "in_stock": [True]}, [1]),
        ({"in_stock": ["false"]}, [2, 6]),
        ({"price": ["3"]}, [2, 4]),  # numbers match in any notation
        ({"price": [3.0, 1]}, [2, 4, 6]),
        ({"price": ["cheap"]}, []),
        ({"category": []}, []),
        ({}, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_filters(catalogue: CatalogueSearch, where: dict[str, list[FilterValue]], numbers: list[int]) -> None:
    assert catalogue.allowed(where).tolist() == numbers
    assert catalogue.allowed(where) is catalogue.allowed(where), "a repeated filter comes from the cache"


def test_an_unknown_column_is_named_in_the_error(catalogue: CatalogueSearch) -> None:
    with pytest.raises(InputError, match=r"no column 'colour'.*category, in_stock, price"):
        catalogue.allowed({"colour": ["red"]})
    with pytest.raises(InputError, match="no column 'id'"):
        catalogue.allowed({"id": ["a1"]})
    with pytest.raises(InputError, match="'tags' holds lists"):
        catalogue.allowed({"tags": ["x"]})


def test_a_catalogue_of_ids_alone() -> None:
    catalogue = CatalogueSearch(Vocabulary(pl.DataFrame({"id": ["b", "a"], "count": [1, 2]})))
    assert [item.id for item in catalogue.search("", 5)] == ["a", "b"]
    assert catalogue.columns == []


@pytest.mark.parametrize(
    ("dtype", "column", "values", "numbers"),
    [
        (pl.Float32, [19.99, 20.0, None, 0.1, 1.0, 2.0], ["19.99", "0.1"], [1, 4]),
        (pl.Int64, [2**60 + step for step in range(6)], [str(2**60 + 3)], [4]),
        (pl.Int64, [2, 3, 4, 5, 6, None], ["2.0", "3", "4.5", "four"], [1, 2]),
        (pl.UInt8, [1, 2, 3, 4, 5, 6], ["-1", "300", "6"], [6]),
    ],
)
def test_numbers_are_compared_exactly(
    dtype: type[pl.DataType], column: list[float | None], values: list[str | int | float | bool], numbers: list[int]
) -> None:
    catalogue = CatalogueSearch(Vocabulary(TABLE.with_columns(pl.Series("price", column, dtype=dtype))))
    assert catalogue.allowed({"price": values}).tolist() == numbers
