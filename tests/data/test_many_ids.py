"""A vocabulary of very many items looks ids up by hashes, with the same results."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.data import vocabulary
from segue.data.vocabulary import Vocabulary
from segue.errors import InputError

TEXTS = st.lists(st.text(max_size=6), unique=True, min_size=1, max_size=40)


def both_ways(table: pl.DataFrame, patch: pytest.MonkeyPatch) -> tuple[Vocabulary, Vocabulary]:
    patch.setattr(vocabulary, "MIN_HASHED", len(table))
    many = Vocabulary(table)
    assert many._many
    return many, Vocabulary(table)


@given(known=TEXTS, texts=st.lists(st.text(max_size=6), max_size=20), seed=st.integers(0, 99))
def test_numbers_ids_and_titles_are_the_same(known: list[str], texts: list[str], seed: int) -> None:
    table = pl.DataFrame({"id": known, "count": [1] * len(known), "title": [f"the {name}" for name in known]})
    with pytest.MonkeyPatch.context() as patch:
        many, few = both_ways(table, patch)
        queries = [*texts, *known[::2]]
        numbers, ids = many.numbers(queries, unknown="zero"), np.random.default_rng(seed).permutation(len(known)) + 1
        names, titles = many.ids(ids), many.titles(ids)
        patch.setattr(vocabulary, "MIN_HASHED", 10**9)
        assert numbers.dtype == np.int64 and numbers.tolist() == few.numbers(queries, unknown="zero").tolist()
        assert names == few.ids(ids) and titles == few.titles(ids)


def test_unknown_ids_untitled_items_and_further_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    many, _ = both_ways(pl.DataFrame({"id": ["b", "a"], "count": [1, 1]}), monkeypatch)
    assert many.titles(np.array([2, 1])) == [None, None] and many.numbers([], unknown="zero").tolist() == []
    with pytest.raises(InputError, match="The item 'c' is not in the catalogue of 2 items"):
        many.numbers(["a", "c"], unknown="error")
    longer = many.with_rows(pl.DataFrame({"id": ["c", "a"], "count": [0, 5]}))
    assert longer.numbers(["b", "a", "c"], unknown="error").tolist() == [1, 2, 3]
    assert longer.table["count"].to_list() == [1, 5, 0]


def test_colliding_hashes_are_replaced_by_another_seed() -> None:
    class Colliding:
        """A column of ids whose first hashes are all equal."""

        def __init__(self, ids: pl.Series) -> None:
            self._ids = ids
            self.seeds: list[int] = []

        def hash(self, seed: int) -> pl.Series:
            self.seeds.append(seed)
            return self._ids.hash(seed) if seed else pl.Series([0] * len(self._ids), dtype=pl.UInt64)

        def gather(self, rows: np.ndarray) -> pl.Series:
            return self._ids.gather(rows)

    ids = Colliding(pl.Series(["a", "b", "c"]))
    hashed = vocabulary._HashedIds(ids)  # type: ignore[arg-type]
    assert hashed.numbers(["c", "x", "a"]).tolist() == [3, 0, 1] and ids.seeds == [0, 1]
