"""Small models as runs, and what `segue export` makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from settings_tables import index_settings

from segue.data.vocabulary import Vocabulary
from segue.export import export_onnx
from segue.index.build import build_index
from segue.models.sequence import SequenceModel
from segue.recommend.answer import Recommendation
from segue.recommend.recommender import Recommender
from segue.slim import SlimRecommender


def recommender_of(
    model: SequenceModel,
    *,
    counts: Sequence[int] | None = None,
    ids: Sequence[str] | None = None,
    titles: Sequence[str | None] | None = None,
) -> Recommender:
    """A run of the model whose items are called i1, i2, … and were all seen once, unless it is told otherwise."""
    n_items = model.items.n_items
    columns: dict[str, Any] = {
        "id": ids or [f"i{number}" for number in range(1, n_items + 1)],
        "count": counts or [1] * n_items,
    }
    table = Vocabulary(pl.DataFrame(columns if titles is None else columns | {"title": titles}))
    known = model.answerable(np.array([0, *table.table["count"].to_list()]))
    model.eval().requires_grad_(requires_grad=False)
    return Recommender(model, build_index(model, known, index_settings()), table)


def exported(recommender: Recommender, folder: Path) -> SlimRecommender:
    export_onnx(recommender, folder / "model.onnx")
    return SlimRecommender.open(folder / "model.onnx", threads=1)


def assert_same_answers(found: Sequence[Recommendation], expected: Sequence[Recommendation]) -> None:
    """The same ids, and scores that differ by rounding alone."""
    for one, other in zip(found, expected, strict=True):
        assert (one.ids, one.unknown, one.fallback) == (other.ids, other.unknown, other.fallback)
        assert [item.title for item in one.items] == [item.title for item in other.items]
        np.testing.assert_allclose(
            [item.score for item in one.items], [item.score for item in other.items], rtol=1e-5, atol=1e-5
        )
