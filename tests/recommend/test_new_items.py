"""New items without training: scored by content, appended to the catalogue, which does not change otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from settings_tables import index_settings, model_settings

from segue.data.read.catalogue import fitted, read_items
from segue.data.vocabulary import Vocabulary
from segue.errors import InputError
from segue.index.build import build_index
from segue.models.build import build_model
from segue.recommend.recommender import Recommender

OLD = 40
KINDS = [f"k{number % 4}" for number in range(OLD)]
rng = np.random.default_rng(8)
VECTORS = rng.standard_normal((OLD, 6)).astype(np.float32)

CATEGORY: dict[str, Any] = {"items": "categories", "items__column": "kind"}
CONTENT: dict[str, Any] = {
    "items": "ids+vectors",
    "items__vectors": "vector",
    "items__texts": ("title", "kind"),
    "items__text_encoder__width": 8,
}
TABLES = {
    "category": CATEGORY,
    "vectors": {"items": "vectors", "items__vectors": "vector", "similarity": "cosine"},
    "texts": {"items": "vectors", "items__texts": ("title",), "items__text_encoder__width": 16, "items__hidden": 0},
    "ids, vectors and texts": CONTENT,
}
INDEXES = {"exact": {}, "approximate": {"index": "approximate"}, "mol": {"similarity": "mol"}}


def recommender(*, index: str = "exact", seed: int = 1, **model: Any) -> Recommender:
    """An untrained model of items with every kind of content."""
    table = pl.DataFrame(
        {
            "id": [f"i{number:02}" for number in range(OLD)],
            "count": [OLD - number for number in range(OLD)],
            "title": [f"word{number} thing{number % 5}" for number in range(OLD)],
            "kind": KINDS,
            "price": [float(number) for number in range(OLD)],
            "vector": pl.Series(VECTORS, dtype=pl.Array(pl.Float32, 6)),
        }
    )
    model_options = model_settings(kind="sasrec", width=8, depth=1, length=6, **model)
    vocabulary = Vocabulary(table)
    generator = torch.Generator().manual_seed(seed)
    network = build_model(model_options, OLD, generator=generator, facts=model_options.items.facts(vocabulary)).eval()
    counts = np.array([0, *table["count"]])
    built_index = build_index(network, network.answerable(counts), index_settings(kind=index))
    return Recommender(network, built_index, vocabulary, settings=model_options)


def new_items(ids: Sequence[str], like: Sequence[int]) -> pl.DataFrame:
    """New items with the content of old ones."""
    return pl.DataFrame(
        {
            "id": ids,
            "title": [f"word{number} thing{number % 5}" for number in like],
            "kind": [KINDS[number] for number in like],
            "vector": pl.Series(VECTORS[list(like)], dtype=pl.Array(pl.Float32, 6)),
        }
    )


HISTORIES = [["i01", "i02"], ["i30"], ["i05", "i05", "i09", "i11", "i12", "i13", "i14", "i15"]]


@pytest.mark.parametrize("index", INDEXES.values(), ids=INDEXES.keys())
@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES.keys())
def test_a_new_item_has_the_score_of_the_old_one_with_its_content_and_nothing_else_changes(
    table: dict[str, Any], index: dict[str, str]
) -> None:
    before = recommender(**{**table, **index})
    answers = before.recommend_many(HISTORIES, k=OLD, keep_seen=True)
    after = before.with_items(new_items(["n1", "n2"], like=[7, 22]))
    for old, answer in zip(answers, after.recommend_many(HISTORIES, k=2 * OLD, keep_seen=True), strict=True):
        scores = {item.id: item.score for item in answer.items}
        assert [scores["n1"], scores["n2"]] == pytest.approx([scores["i07"], scores["i22"]], abs=1e-5)
        assert [item for item in answer.items if item.id not in ("n1", "n2")] == old.items, "to the last bit"
    assert before.recommend_many(HISTORIES, k=OLD, keep_seen=True) == answers, "the old recommender is unchanged"
    assert not before.knows("n1") and after.knows("n1")
    assert (len(before.vocabulary), len(after.vocabulary), after.added, before.added) == (OLD, OLD + 2, 2, 0)


@settings(max_examples=15)
@given(data=st.data())
def test_items_added_one_by_one_or_together_are_the_same(data: st.DataObject) -> None:
    """An item added twice has the content of the last time."""
    before = recommender(**data.draw(st.sampled_from(list(TABLES.values()))))
    pairs = st.dictionaries(st.sampled_from("abcdef"), st.integers(0, OLD - 1), min_size=1, max_size=4)
    one_by_one, last = before, dict[str, int]()
    for step in data.draw(st.lists(pairs, max_size=4)):
        one_by_one = one_by_one.with_items(new_items(list(step), like=list(step.values())))
        last |= step
    together = before.with_items(new_items(list(last), like=list(last.values()))) if last else before
    assert one_by_one.vocabulary.table.equals(together.vocabulary.table)
    for history in (["i03"], ["i04", *list(last)[:2]]):
        assert one_by_one.recommend(history, k=60) == together.recommend(history, k=60)


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES.keys())
def test_new_items_in_histories_explanations_and_similar_items(table: dict[str, Any]) -> None:
    after = recommender(**table).with_items(new_items(["n1"], like=[7]))
    assert after.recommend(["n1", "i02"], k=5).unknown == []
    assert after.recommend(["n1"], k=50, keep_seen=False).ids.count("n1") == 0
    explanation = after.explain(["i01", "i02"], "n1")
    assert explanation.item.title == "word7 thing2" and explanation.rank is not None
    assert after.similar("n1", k=1).items[0].score == pytest.approx(1.0)
    assert after.recommend(["i01"], only=["n1"]).ids == ["n1"]
    assert "n1" not in after.recommend(["never met"], k=100).ids, "it has no events, so it is not popular"


def assert_refused(model: Recommender, table: pl.DataFrame, *words: str) -> None:
    with pytest.raises(InputError) as error:
        model.with_items(table)
    missing = [word for word in words if word not in str(error.value)]
    assert not missing, f"{missing} not in: {error.value}"


def test_refused_items_are_named_with_the_reason() -> None:
    model = recommender(**CATEGORY)
    both = new_items(["i03", "n1", "i07"], like=[1, 2, 3])
    assert_refused(model, both, "'i03', 'i07'", "already")
    assert_refused(model, new_items([f"i{OLD - 1}"], like=[1]), f"'i{OLD - 1}'", "already")
    assert_refused(model, new_items(["n1"], like=[1]).with_columns(kind=pl.lit("unheard")), "'n1'", "'unheard'", "kind")
    assert_refused(model, new_items(["n1"], like=[1]).drop("id"), "`id`")
    assert_refused(model, pl.DataFrame({"id": ["n1", None], "kind": ["k1", "k1"]}), "no id")
    assert_refused(model, pl.DataFrame({"id": ["n1"], "kind": ["k1"], "price": ["dear"]}), "'n1'", "'price'", "Float64")
    assert_refused(
        model, pl.DataFrame({"id": ["n1"], "kind": ["k1"], "vector": [[1.0, 2.0]]}), "'vector'", "6 finite numbers"
    )
    many = [f"n{number}" for number in range(9)]
    assert_refused(model, pl.DataFrame({"id": many, "kind": ["other"] * 9}), "'n4' and 4 more")


def fitted_values(dtype: pl.DataType | type[pl.DataType], values: pl.Series) -> tuple[list[Any], list[str | None]]:
    """Fit values to a vocabulary's column of a type: the values, and for each the reason of a refusal."""
    ids = [f"n{number}" for number in range(len(values))]
    vocabulary = pl.DataFrame(schema={"id": pl.String, "count": pl.Int64, "x": dtype})
    rows, reasons = fitted(pl.DataFrame({"id": ids, "x": values}), vocabulary)
    return rows["x"].to_list(), reasons.to_list()


def test_a_date_is_read_in_any_order() -> None:
    texts = ["foo", "2026-01-31", "2026-01-31 10:30", "2026-01-31T10:30:00.5", "2026-01-31T10:30:00+02:00", "31.1.26"]
    time = datetime(2026, 1, 31, 10, 30, tzinfo=UTC)
    expected = [
        None,
        datetime(2026, 1, 31, tzinfo=UTC),
        time,
        time.replace(microsecond=500_000),
        time.replace(hour=8),
        None,
    ]
    for order in (slice(None), slice(None, None, -1)):
        output, reasons = fitted_values(pl.Datetime("us", "UTC"), pl.Series(texts[order]))
        assert output == expected[order]
        assert [why is None or "'x' is not a date in ISO 8601" not in why for why in reasons] == [
            value is not None for value in output
        ]
        assert (
            fitted_values(pl.Date(), pl.Series(["31.1.26", "2026-01-31"][order]))[0] == [None, date(2026, 1, 31)][order]
        )


@pytest.mark.parametrize("dtype", [pl.Float64(), pl.Date(), pl.Datetime("us"), pl.Array(pl.Float32, 1), pl.Boolean()])
def test_records_do_not_fit_another_type(dtype: pl.DataType) -> None:
    output, reasons = fitted_values(dtype, pl.Series([{"y": 1}]))
    assert output == [None] and reasons[0] is not None and "'x'" in reasons[0]


@pytest.mark.parametrize("dtype", [pl.Float64(), pl.Date(), pl.Array(pl.Float32, 1), pl.Boolean()])
def test_an_empty_cell_is_a_missing_value(dtype: pl.DataType) -> None:
    output, reasons = fitted_values(dtype, pl.Series(["", "dear", None]))
    assert output == [None] * 3
    assert [why is None for why in reasons] == [True, False, True]
    assert fitted_values(pl.String(), pl.Series([""])) == ([""], [None])


def test_an_item_needs_content_that_the_model_reads() -> None:
    model = recommender(**CONTENT)
    assert_refused(model, pl.DataFrame({"id": ["n1"], "title": ["zzz"]}), "'n1'", "'vector' or 'title' or 'kind'")
    assert_refused(model, pl.DataFrame({"id": ["n1"], "vector": [[float("nan")] * 6]}), "'vector'", "6 finite numbers")
    assert_refused(
        model, pl.DataFrame({"id": ["n1"], "vector": [[1e38] * 6]}), "'n1'", "'vector'", "1,000,000 deviations"
    )
    assert model.with_items(pl.DataFrame({"id": ["n1"], "title": ["word7"]})).knows("n1")
    assert model.with_items(pl.DataFrame({"id": ["n1"], "vector": [[1, 2, 3, 4, 5, 6]]})).knows("n1")


def test_a_model_of_ids_alone_is_refused_with_the_settings_it_needs() -> None:
    assert_refused(
        recommender(), new_items(["n1"], like=[1]), "by their ids alone", "model.items", "model.items.vectors"
    )


def test_of_duplicates_in_a_catalogue_file_the_first_row_is_read(tmp_path: Path) -> None:
    file = tmp_path / "new.csv"
    file.write_text("item,name,kind\n7,Seven,k1\n8,Eight,k2\n7,Again,k3\n")
    table, duplicates = read_items(file, item=None)
    assert table.to_dict(as_series=False) == {"id": ["7", "8"], "title": ["Seven", "Eight"], "kind": ["k1", "k2"]}
    assert duplicates == 1
    file.write_text("sku,kind\nx,k1\n")
    assert read_items(file, item="sku")[0]["id"].to_list() == ["x"]
    with pytest.raises(InputError, match="no column 'asin'"):
        read_items(file, item="asin")
    file.write_text("item,kind\n")
    with pytest.raises(InputError, match="no rows"):
        read_items(file, item=None)


def test_vectors_may_come_from_an_array_with_its_ids(tmp_path: Path) -> None:
    np.save(tmp_path / "vector.npy", VECTORS[[7, 22]])
    (tmp_path / "vector.ids.txt").write_text("n1\nn2\n")
    (tmp_path / "new.csv").write_text("item,title\nn2,word22 thing2\nn1,word7 thing2\n")
    model = recommender(items="vectors", items__vectors="vector")
    for source in (tmp_path / "vector.npy", [tmp_path / "new.csv", tmp_path / "vector.npy"]):
        table, duplicates = read_items(source, item=None)
        after = model.with_items(table)
        assert (duplicates, after.added) == (0, 2)
        assert [after.similar(item, k=1).ids for item in ("n1", "n2")] == [["i07"], ["i22"]]
