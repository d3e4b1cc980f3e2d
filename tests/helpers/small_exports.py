"""Small models as runs, and their exports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
from settings_tables import index_settings

from segue.counts.counts import Counts
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
    item_counts: Counts | None = None,
    seen: Literal["excluded", "kept"] = "excluded",
) -> Recommender:
    """A run of the model with items i1, i2, … and one event each by default."""
    n_items = model.items.n_items
    columns: dict[str, Any] = {
        "id": ids or [f"i{number}" for number in range(1, n_items + 1)],
        "count": counts or [1] * n_items,
    }
    table = Vocabulary(pl.DataFrame(columns if titles is None else columns | {"title": titles}))
    candidates = model.answerable(np.array([0, *table.table["count"].to_list()]))
    model.eval().requires_grad_(requires_grad=False)
    index = build_index(model, candidates, index_settings())
    return Recommender(model, index, table, item_counts=item_counts, seen=seen)


def exported(recommender: Recommender, folder: Path) -> SlimRecommender:
    export_onnx(recommender, folder / "model.onnx")
    return SlimRecommender.open(folder / "model.onnx", threads=1)


def assert_same_answers(answers: Sequence[Recommendation], expected: Sequence[Recommendation]) -> None:
    """Equal ids, and scores equal up to rounding."""
    for answer, other in zip(answers, expected, strict=True):
        assert (answer.ids, answer.unknown, answer.fallback) == (other.ids, other.unknown, other.fallback)
        assert [item.title for item in answer.items] == [item.title for item in other.items]
        np.testing.assert_allclose(
            [item.score for item in answer.items], [item.score for item in other.items], rtol=1e-5, atol=1e-5
        )
