"""Query vectors of histories: the inner product with an item's vector is that item's score."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from settings_tables import index_settings, model_settings

from segue.data.vocabulary import Vocabulary
from segue.errors import InputError
from segue.index.build import build_index
from segue.models.build import build_model
from segue.recommend.recommender import Recommender

ITEMS = [f"i{number}" for number in range(9)]
HISTORIES = [["i3"], ["i1", "i2", "i3", "i1", "i5"], ["i8", "nobody", "i4"], ["i2"] * 12]


def recommender(**model: Any) -> Recommender:
    """An untrained model; the last item is cold."""
    settings = model_settings(**{"width": 8, "depth": 1, "length": 6, "dropout": 0.0, **model})
    network = build_model(settings, len(ITEMS), generator=torch.Generator().manual_seed(3)).eval()
    if network.items.bias is not None:
        torch.nn.init.normal_(network.items.bias, generator=torch.Generator().manual_seed(4))
    counts = [1] * (len(ITEMS) - 1) + [0]
    index = build_index(network, np.array([0, *counts]) > 0, index_settings(kind="exact"))
    return Recommender(network, index, Vocabulary(pl.DataFrame({"id": ITEMS, "count": counts})))


@pytest.mark.parametrize(
    "model",
    [
        {"kind": "sasrec"},
        {"kind": "esasrec", "similarity": "cosine"},
        {"kind": "bert4rec"},  # whose items have biases
        {"kind": "sasrec", "items__tied": False, "output": "l2"},
        {"kind": "gru4rec"},
        {"kind": "hstu"},
    ],
    ids=lambda model: "-".join(map(str, model.values())),
)
def test_the_inner_product_is_the_score(model: dict[str, Any]) -> None:
    run = recommender(**model)
    vectors = run.embed(HISTORIES)
    items = run.model.item_vectors().detach().numpy()
    assert vectors.dtype == np.float32
    assert vectors.shape == (len(HISTORIES), run.embedding_width) == (len(HISTORIES), items.shape[1])
    answers = run.recommend_many(HISTORIES, k=len(ITEMS), keep_seen=True)
    for vector, answer in zip(vectors, answers, strict=True):
        assert len(answer.items) == len(ITEMS) - 1
        expected = {ITEMS[number - 1]: float(vector @ items[number]) for number in range(1, len(ITEMS))}
        for item in answer.items:
            assert item.score == pytest.approx(expected[item.id], abs=1e-5)


def test_a_history_has_the_same_vector_alone_and_among_others() -> None:
    run = recommender(kind="sasrec")
    together = run.embed(HISTORIES)
    alone = np.concatenate([run.embed([history]) for history in HISTORIES])
    assert np.allclose(together, alone, atol=1e-6)


def test_a_history_of_unknown_items_has_no_vector() -> None:
    vectors = recommender(kind="sasrec").embed([["nobody"], ["i1"], [], ["i8"]])  # i8 is cold
    assert np.isnan(vectors).all(axis=1).tolist() == [True, False, True, True]
    assert np.isfinite(vectors[1]).all()
    assert recommender(kind="sasrec").embed([]).shape == (0, 8)


def test_a_mixture_of_logits_has_no_embedding() -> None:
    run = recommender(kind="sasrec", similarity="mol", similarity__query_hidden=0, similarity__gate_hidden=0)
    with pytest.raises(InputError, match="no inner product of two vectors"):
        run.embed([["i1"]])
