"""The sentence model against the library it was published with, and behaviour without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from planted_logs import cycle_log, title, titled_items
from safetensors import safe_open
from settings_tables import model_settings

import segue
from segue.errors import InputError, SettingsError
from segue.models.checkpoint import WEIGHTS
from segue.models.text import sentences
from segue.models.text.sentences import SENTENCE_WIDTH, SentenceTexts, _sentence_model
from segue.recommend.recommender import Recommender

LONG = "Kettle, stainless steel. " * 80  # 402 pieces, of which 256 are read

# The first four and the last two features, by SentenceTransformer.encode of sentence-transformers 6.2.0 (transformers
# 5.23.0) over the same files.
PUBLISHED = {
    "Gooseneck kettle": [-0.0902614, 0.0335977, -0.0470019, 0.0314314, 0.1182375, -0.0194079],
    "L'Oréal Paris Elvive — 250 ml (8.4 fl. oz.)": [0.0311604, 0.0119171, 0.0470953, 0.0611594, 0.0428905, -0.0659522],
    "東京の夜 2021": [0.0584738, 0.0911955, 0.0968483, 0.0059001, -0.100402, 0.020852],
    LONG: [-0.0391224, -0.0794757, 0.0092478, 0.0110883, 0.0618799, -0.0040792],
}


def test_vectors_are_those_of_the_library() -> None:
    vectors = SentenceTexts.fitted([], SENTENCE_WIDTH).encode(list(PUBLISHED))
    np.testing.assert_allclose(vectors[:, [0, 1, 2, 3, -2, -1]], list(PUBLISHED.values()), atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [  # by tokenizers 0.23.3
        ("Naïve  CAFÉ\t½ $9.99+ﬁne", [101, 15743, 7668, 1092, 1002, 1023, 1012, 5585, 1009, 1984, 2638, 102]),
        (f"東京 hello\u200bworld\N{HEADPHONE} {'x' * 101}", [101, 1879, 1755, 100, 100, 102]),
        (
            "ΣΑΣ O'Neill's über-Größe",
            [101, 1173, 14608, 29733, 1051, 1005, 11511, 1005, 1055, 19169, 1011, 24665, 2080, 17499, 102],
        ),
        ("", [101, 102]),
    ],
)
def test_pieces_are_those_of_the_library(text: str, numbers: list[int]) -> None:
    pieces, _ = _sentence_model()
    assert pieces.numbers(text, 256) == numbers
    assert pieces.numbers(text, 4) == [101, *numbers[1:-1][:2], 102], "the first ones, where they are too many"


def test_synonyms_are_near_also_with_fewer_features() -> None:
    words = ["sofa", "couch", "claw hammer", "drill bit", "lipstick", "eye shadow"]
    for width in (SENTENCE_WIDTH, 4):
        vectors = SentenceTexts.fitted(words, width).encode(words)
        nearness = vectors @ vectors.T - 2 * np.eye(6)
        assert nearness.argmax(axis=1).tolist() == [1, 0, 3, 2, 5, 4], width


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"There is no key 'text_encoder' in model\.items = 'ids'"):
        model_settings(items__text_encoder="sentences")
    content: dict[str, Any] = {"items": "vectors", "items__texts": ("title",)}
    assert model_settings(**content, items__text_encoder__width=385).items.text_encoder.width == 385
    with pytest.raises(SettingsError, match=r"text_encoder\.width: expected a whole number >= 1 and <= 384, got 385"):
        model_settings(**content, items__text_encoder="sentences", items__text_encoder__width=385)


CONTENT = ["model.items=vectors", 'model.items.texts=["title"]', "model.items.text_encoder=sentences", "train.epochs=1"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> segue.Data:
    folder = tmp_path_factory.mktemp("sentences")
    (folder / "log.csv").write_text(cycle_log())
    (folder / "items.csv").write_text(titled_items())
    return segue.prepare(folder / "log.csv", items=folder / "items.csv", out=folder / "data")


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentences, "PACKAGE", "not_a_package_of_anyone")
    monkeypatch.setattr(sentences, "_sentence_model", _sentence_model.__wrapped__)  # without its cache


@pytest.fixture(scope="module")
def run(data: segue.Data, quick_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "sentences"
    segue.train(data, out=out, recipe=quick_recipe, overrides=CONTENT)
    return out


def test_a_run_holds_nothing_of_the_sentence_model_and_takes_new_items(run: Path) -> None:
    with safe_open(run / WEIGHTS, framework="numpy") as file:
        assert [name for name in file.keys() if "texts" in name] == ["items.texts.directions"]  # noqa: SIM118
    assert sum(path.stat().st_size for path in run.rglob("*") if path.is_file()) < 1 << 20
    model = segue.load(run)
    assert isinstance(model, Recommender)
    after = model.with_items(pl.DataFrame({"id": ["new"], "title": [title(7)]}))
    scores = {item.id: item.score for item in after.recommend(["i05", "i06"], k=20).items}
    assert scores["new"] == pytest.approx(scores["i07"], abs=1e-5)


@pytest.mark.usefixtures("not_installed")
def test_without_it_a_run_answers_as_before_and_encodes_no_new_texts(
    run: Path, data: segue.Data, quick_recipe: Path, tmp_path: Path
) -> None:
    model = segue.load(run)
    assert isinstance(model, Recommender)
    assert len(model.recommend(["i05", "i06"], k=5).ids) == 5
    install = r"a sentence model that is not installed; run `pip install 'segue\[sentences\]'`"
    with pytest.raises(InputError, match=f"cannot be added: 'new': the run's texts need {install}"):
        model.with_items(pl.DataFrame({"id": ["new"], "title": ["kettle"]}))
    with pytest.raises(SettingsError, match=install):
        segue.train(data, out=tmp_path / "run", recipe=quick_recipe, overrides=CONTENT)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InputError, match=install):
        SentenceTexts.fitted(["kettle"], 8)


def test_other_weights_than_those_published_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "other_weights"
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('nobody runs this')")
    (package / "model" / "model.safetensors").write_bytes(b"other")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sentences, "PACKAGE", "other_weights")
    with pytest.raises(InputError, match=r"model\.safetensors is not the published file"):
        _sentence_model.__wrapped__()
