"""Item vectors in a data folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from event_logs import write_csv

from segue.data.dataset import Data
from segue.data.prepare import prepare
from segue.data.vocabulary import Vocabulary
from segue.data.write.summary import summary_lines
from segue.errors import InputError

VECTORS = {"x": [1.0, 2.0], "007": [3.0, 4.5]}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_csv(tmp_path / "log.csv", [("a", "x", 1), ("a", "007", 2), ("b", "x", 1), ("b", "z", 2)])


def prepare_with(log: Path, items: object) -> Data:
    return prepare(log, items=items, min_user=1, min_item=1)


def array_of(path: Path, ids: list[str] | None, rows: object, *, numbers: type = np.float64, text: bool = True) -> Path:
    np.save(path, np.array(rows, dtype=numbers))
    if ids is not None and text:
        path.with_name(f"{path.stem}.ids.txt").write_text("\n".join(ids) + "\n")
    elif ids is not None:
        np.save(path.with_name(f"{path.stem}.ids.npy"), np.array(ids))
    return path


@pytest.mark.parametrize("kind", [pl.List(pl.Float64), pl.List(pl.Int16), pl.Array(pl.Float64, 2)])
@pytest.mark.parametrize("file", [True, False])
def test_a_column_of_lists_becomes_vectors(tmp_path: Path, log: Path, kind: pl.DataType, file: bool) -> None:
    table = pl.DataFrame({"item": ["z", "x", "007"], "shape": [None, [1, 2], [3, 4]]}, schema_overrides={"shape": kind})
    if file:
        table.write_parquet(tmp_path / "items.parquet")
    data = prepare_with(log, tmp_path / "items.parquet" if file else table)
    assert data.vocabulary.table.schema["shape"] == pl.Array(pl.Float32, 2)
    assert data.vocabulary.vectors("shape").tolist() == [[0, 0], [3, 4], [1, 2], [0, 0]]
    assert data.vocabulary.vectors("shape").dtype == np.float32
    assert data.manifest["counts"]["vectors"] == {"shape": {"width": 2, "items": 2}}
    assert summary_lines(data.manifest)[-1] == "vectors    shape: 2 numbers, for 2 of 3 items"


@pytest.mark.parametrize("text", [True, False])
def test_an_array_is_a_column_named_after_its_file(tmp_path: Path, log: Path, text: bool) -> None:
    catalogue = write_csv(tmp_path / "items.csv", [("x", "X")], header=("item", "title"))
    ids = ["never", "x", "007", "x"]
    array = array_of(tmp_path / "pictures.npy", ids, [[9, 9], [1, 2], [3, 4.5], [7, 7]], text=text)
    data = prepare_with(log, [catalogue, array])
    assert data.vocabulary.table.columns == ["id", "count", "title", "pictures"]
    assert data.vocabulary.vectors("pictures").tolist() == [[0, 0], [3, 4.5], [1, 2], [0, 0]], "the first x is used"
    assert data.vocabulary.table["pictures"].null_count() == 1


def test_arrays_need_no_catalogue(tmp_path: Path, log: Path) -> None:
    first = array_of(tmp_path / "a.npy", ["x"], [[1, 2, 3]], numbers=np.int32)
    second = array_of(tmp_path / "b.npy", ["z"], [[0.5]])
    data = prepare_with(log, [str(first), second])
    assert data.vocabulary.table.columns == ["id", "count", "a", "b"]
    assert prepare_with(log, first).vocabulary.vectors("a").tolist() == [[0, 0, 0], [0, 0, 0], [1, 2, 3], [0, 0, 0]]


def test_ids_of_an_array_are_the_lines_of_its_file(tmp_path: Path) -> None:
    """With a byte-order mark, as Windows writes it; only a newline ends a line."""
    log = write_csv(tmp_path / "log.csv", [("a", "x", 1), ("a", "y\u2028z", 2), ("b", "x", 1)])
    array = array_of(tmp_path / "a.npy", None, [[1], [2]])
    (tmp_path / "a.ids.txt").write_bytes("\ufeffx\r\ny\u2028z\r\n".encode())
    assert prepare_with(log, array).vocabulary.vectors("a").tolist() == [[0], [1], [2]]


def test_numbers_may_be_ids(tmp_path: Path) -> None:
    log = write_csv(tmp_path / "log.csv", [("a", 10, 1), ("a", 20, 2)])
    np.save(tmp_path / "v.npy", np.eye(2))
    np.save(tmp_path / "v.ids.npy", np.array([20, 10]))
    assert prepare_with(log, tmp_path / "v.npy").vocabulary.vectors("v").tolist() == [[0, 0], [0, 1], [1, 0]]


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ([[1.0], [1.0, 2.0]], r"the lists in 'v' have 1, 2 numbers; expected as many in every row"),
        ([[], []], "the lists in 'v' have 0 numbers"),
        ([[1.0, float("nan")], [1.0, 2.0]], "the column 'v' holds 1 numbers that are missing, infinite or too large"),
        ([[1.0, None], [1.0, 2.0]], "the column 'v' holds 1 numbers that are missing"),
        ([[1.0, 1e200], [1.0, 2.0]], "the column 'v' holds 1 numbers that are missing, infinite or too large"),
    ],
)
def test_lists_that_are_no_vectors_are_refused(log: Path, lists: object, message: str) -> None:
    table = pl.DataFrame({"item": ["x", "z"], "v": lists}, schema_overrides={"v": pl.List(pl.Float64)})
    with pytest.raises(InputError, match=message):
        prepare_with(log, table)


@pytest.mark.parametrize(
    ("ids", "rows", "message"),
    [
        (None, [[1.0]], r"has no file of ids: write them to .*v\.ids\.txt"),
        (["x"], [[1.0], [2.0]], "has 2 rows, but its file of ids has 1"),
        (["x"], [1.0], r"holds an array of shape \[1\] and type float64; expected one row of numbers an item"),
        (["x"], [[float("inf")]], r"v\.npy holds 1 numbers that are missing, infinite"),
        (["q"], [[1.0]], r"none of its ids \(such as 'q'\) is an item of the log \(such as '007'\)"),
    ],
)
def test_arrays_that_are_no_vectors_are_refused(
    tmp_path: Path, log: Path, ids: list[str] | None, rows: object, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        prepare_with(log, array_of(tmp_path / "v.npy", ids, rows))


def test_a_file_that_is_no_array_is_refused(tmp_path: Path, log: Path) -> None:
    (tmp_path / "v.npy").write_text("x,1,2")
    with pytest.raises(InputError, match=r"v\.npy cannot be read as an array"):
        prepare_with(log, tmp_path / "v.npy")


def test_a_name_that_the_catalogue_has_is_refused(tmp_path: Path, log: Path) -> None:
    catalogue = write_csv(tmp_path / "items.csv", [("x", "X")], header=("item", "title"))
    with pytest.raises(InputError, match="the column 'title', which the catalogue has already"):
        prepare_with(log, [catalogue, array_of(tmp_path / "title.npy", ["x"], [[1.0]])])


def test_an_error_lists_the_columns_of_a_vocabulary() -> None:
    table = pl.DataFrame({"id": ["x"], "count": [1], "title": ["X"], "price": [2.5]})
    with pytest.raises(InputError, match="no column 'v' to take vectors from; it has price"):
        Vocabulary(table).vectors("v")
    with pytest.raises(InputError, match="'price' holds Float64, not vectors"):
        Vocabulary(table).vectors("price")
    with pytest.raises(InputError, match="no column 'v' to take texts from; it has title, price"):
        Vocabulary(table).texts(["v"])
    assert Vocabulary(table).texts(["title", "price"]) == ["X 2.5"]
    tagged = table.with_columns(pl.Series("tags", [["a", "b"]]), pl.Series("v", [[1.0]], dtype=pl.Array(pl.Float32, 1)))
    assert Vocabulary(tagged).texts(["tags", "title"]) == ["a b X"]
    with pytest.raises(InputError, match=r"'v' holds Array.*, not texts"):
        Vocabulary(tagged).texts(["v"])
