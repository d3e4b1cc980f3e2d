"""The contract of every text encoder: the same text has the same vector, in this run and in the next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from settings_tables import index_settings, model_settings

from segue.data.vocabulary import Vocabulary
from segue.index.build import build_index
from segue.models.build import build_model
from segue.models.checkpoint import WEIGHTS, load_model, save_model, saved_texts
from segue.models.encoders import ModelSettings
from segue.models.items.content import ContentTable
from segue.models.text.encoder import TextEncoder
from segue.models.text.hashed import HashedTexts
from segue.models.text.sentences import SentenceTexts
from segue.recommend.recommender import Recommender

TITLES = ["red shoe for women", "blue shoe", "", "steel hammer 500 g", "hammer, steel (large)", "Größe 40", "blue shoe"]
WIDTH = 5
TEXT_ENCODERS: dict[str, type[TextEncoder]] = {"hashed": HashedTexts, "sentences": SentenceTexts}


@pytest.fixture(params=TEXT_ENCODERS, scope="module")
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def encoder(name: str) -> TextEncoder:
    return TEXT_ENCODERS[name].fitted(TITLES, WIDTH)


def test_vectors_have_the_stated_width_and_equal_texts_are_equal(encoder: TextEncoder) -> None:
    vectors = encoder.encode(TITLES)
    assert vectors.shape == (len(TITLES), WIDTH) and vectors.dtype == np.float32 and encoder.width == WIDTH
    assert encoder.encode([]).shape == (0, WIDTH)
    np.testing.assert_allclose(vectors[1], vectors[6], atol=1e-6)
    rows = [0, 1, 3]
    distances = np.linalg.norm(vectors[rows, None] - vectors[None, rows], axis=2) + np.eye(len(rows))
    assert distances.min() > 0.05, "different texts have different vectors"


def test_texts_without_terms_are_zero_whatever_was_fitted(name: str, encoder: TextEncoder) -> None:
    assert (encoder.encode(["", "  \t\n", "\N{HEADPHONE}"]) == 0).all()
    for nothing in ([], [""]):
        fresh = TEXT_ENCODERS[name].fitted(nothing, WIDTH)
        assert fresh.encode(["red shoe"]).tolist() == [[0.0] * WIDTH]


def test_fitting_and_encoding_do_not_depend_on_other_calls(name: str, encoder: TextEncoder) -> None:
    again = TEXT_ENCODERS[name].fitted(TITLES, WIDTH)
    assert all(torch.equal(one, other) for one, other in zip(encoder.buffers(), again.buffers(), strict=True))
    together = encoder.encode(TITLES)
    assert (again.encode(TITLES) == together).all()
    alone = np.concatenate([encoder.encode([title]) for title in TITLES])
    np.testing.assert_allclose(together, alone, atol=1e-6)


def recommender(name: str) -> tuple[Recommender, ModelSettings]:
    """An untrained model over items with titles."""
    table = pl.DataFrame({"id": [f"i{n}" for n in range(len(TITLES))], "count": 3, "title": TITLES})
    content: dict[str, Any] = {
        "items": "vectors",
        "items__texts": ("title",),
        "items__text_encoder": name,
        "items__text_encoder__width": WIDTH,
    }
    settings = model_settings(kind="sasrec", width=8, depth=1, length=6, **content)
    vocabulary = Vocabulary(table)
    facts = settings.items.facts(vocabulary)
    model = build_model(settings, len(TITLES), generator=torch.Generator().manual_seed(1), facts=facts).eval()
    index = build_index(model, model.answerable(np.array([0] + [3] * len(TITLES))), index_settings())
    return Recommender(model, index, vocabulary, settings=settings), settings


def test_a_saved_model_encodes_new_texts_as_before(name: str, tmp_path: Path) -> None:
    before, settings = recommender(name)
    save_model(before.model, settings, tmp_path)
    model = load_model(tmp_path)
    assert isinstance(model.items, ContentTable) and type(model.items.texts) is TEXT_ENCODERS[name]
    assert model.items.texts is not None
    words = ["brown shoes", *TITLES]
    assert isinstance(before.model.items, ContentTable) and before.model.items.texts is not None
    expected = before.model.items.texts.encode(words)
    assert (model.items.texts.encode(words) == expected).all() and expected[0].any()
    texts = saved_texts(tmp_path / WEIGHTS, settings)
    assert texts is not None and (texts.encode(words) == expected).all()

    loaded = Recommender(model, before.index, before.vocabulary, settings=settings)
    after = loaded.with_items(pl.DataFrame({"id": ["new"], "title": ["steel hammer 500 g"]}))
    scores = {item.id: item.score for item in after.recommend(["i0"], k=20, keep_seen=True).items}
    assert scores["new"] == pytest.approx(scores["i3"], abs=1e-5)
    assert len({round(score, 4) for score in scores.values()}) >= 4, "the scores of the others differ"
