"""Answers without torch: the rules of an exported file against those of the run it was made from."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from settings_tables import model_settings
from small_exports import assert_same_answers, exported, recommender_of

from segue.errors import FolderError, InputError, SettingsError
from segue.models.build import build_model
from segue.models.items.tables import DataFacts as ContentFacts
from segue.models.sequence import SequenceModel
from segue.recommend.recommender import Recommender
from segue.slim import METADATA, SlimRecommender

IDS = ["a,b", "007", "7", "☕🫖", "x/y", " two  spaces ", "line\nbreak", *(f"i{number}" for number in range(8, 31))]
TITLES = [None if number % 5 == 0 else f"Title {number}" for number in range(30)]
COUNTS = [(number * 7) % 5 for number in range(30)]  # every fifth item is unseen in training, and many counts tie


def small_model(*, categories: np.ndarray | None = None) -> SequenceModel:
    shape = model_settings(
        kind="sasrec",
        width=8,
        depth=1,
        heads=2,
        length=12,
        dropout=0.0,
        feed_forward=2,
        positions="oldest",
        **({} if categories is None else {"items": "categories", "items__column": "genre"}),
    )
    return build_model(shape, 30, generator=torch.Generator().manual_seed(3), facts=ContentFacts(categories=categories))


Pair = tuple[Recommender, SlimRecommender]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the exported file."""
    return tmp_path_factory.mktemp("slim")


@pytest.fixture(scope="module")
def pair(folder: Path) -> Pair:
    """A run and its exported file."""
    run = recommender_of(small_model(), counts=COUNTS, ids=IDS, titles=TITLES)
    return run, exported(run, folder)


@pytest.fixture
def graph(pair: Pair, folder: Path) -> onnx.ModelProto:  # noqa: ARG001  # it made the file
    """The graph in the exported file."""
    return onnx.load_model(folder / "model.onnx")


some_ids = st.lists(st.sampled_from([*IDS, "nobody", "never"]), max_size=30)
maybe_ids = st.none() | some_ids


@settings(max_examples=60)
@given(some_ids, st.integers(1, 40), maybe_ids, maybe_ids, st.sampled_from([None, True, False]))
def test_the_rules_are_those_of_the_run(
    pair: Pair, history: list[str], k: int, exclude: list[str] | None, only: list[str] | None, keep_seen: bool | None
) -> None:
    run, slim = pair
    limits: dict[str, Any] = {"exclude": exclude, "only": only, "keep_seen": keep_seen}
    assert_same_answers([slim.recommend(history, k, **limits)], [run.recommend(history, k, **limits)])


def test_many_histories_of_any_length_together(pair: Pair) -> None:
    run, slim = pair
    rng = np.random.default_rng(0)
    histories = [rng.choice([*IDS, "nobody"], length).tolist() for length in rng.integers(0, 60, 150)]
    assert_same_answers(slim.recommend_many(histories), run.recommend_many(histories))


@pytest.mark.parametrize("history", [[], ["nobody"], [IDS[0]]], ids=["empty", "unknown", "never trained on"])
def test_unknown_histories_are_answered_by_popularity(pair: Pair, history: list[str]) -> None:
    answer = pair[1].recommend(history, k=7)
    assert (answer.fallback, answer.unknown) == ("popularity", history)
    assert [item.score for item in answer.items] == [4.0] * 6 + [3.0]
    assert answer.ids == [IDS[number] for number in (2, 7, 12, 17, 22, 27, 4)]  # counts tie by number


def test_an_answer_has_the_json_fields_of_the_run(pair: Pair) -> None:
    answer = json.loads(msgspec.json.encode(pair[1].recommend([IDS[1], "nobody"], k=1)))
    assert answer.keys() == {"items", "unknown", "fallback"} and answer["unknown"] == ["nobody"]
    assert answer["items"][0].keys() == {"id", "title", "score"}


def test_items_that_share_a_vector_tie_by_number(tmp_path: Path) -> None:
    categories = np.array([0, *(number % 4 + 1 for number in range(30))])
    run = recommender_of(small_model(categories=categories), counts=COUNTS)
    slim = exported(run, tmp_path)
    for history in (["i2"], ["i2", "i3", "i9"], ["i13"] * 40):
        answer = slim.recommend(history, k=25)
        assert len({item.score for item in answer.items}) <= 4
        assert_same_answers([answer], [run.recommend(history, k=25)])


def test_without_a_request_time_it_is_the_time_of_the_newest_event(tmp_path: Path) -> None:
    settings = model_settings(kind="hstu", width=8, depth=1, length=12, dropout=0.0, target_time=True)
    model = build_model(settings, 30, generator=torch.Generator().manual_seed(3))
    for weight in model.parameters():
        torch.nn.init.normal_(weight.data, generator=torch.Generator().manual_seed(4))  # biases by time begin at zero
    run = recommender_of(model)
    slim = exported(run, tmp_path)
    times = [1e9 + 1000.0**number for number in (1, 2, 3)]
    history = [{"item": f"i{number}", "time": time} for number, time in enumerate(times, start=1)]
    assert_same_answers([slim.recommend(history)], [run.recommend(history)])
    assert_same_answers([slim.recommend(history)], [run.recommend(history, now=times[-1])])


@pytest.mark.parametrize("items", ["vectors", "ids+vectors"])
def test_items_known_by_content_alone_are_recommended_and_encoded(tmp_path: Path, items: str) -> None:
    """Of thirty items the last ten are unseen in training; i30 has no content either."""
    content = np.random.default_rng(0).normal(size=(31, 5)).astype(np.float32)
    content[[0, 30]] = 0
    settings = model_settings(kind="sasrec", width=8, depth=1, length=8, items=items, items__vectors="v")
    facts = ContentFacts(content=content)
    model = build_model(settings, 30, generator=torch.Generator().manual_seed(3), facts=facts)
    run = recommender_of(model, counts=[2] * 20 + [0] * 10)
    slim = exported(run, tmp_path)
    for history in (["i2"], ["i25", "i2", "i30"], ["i29"] * 9, ["i30"]):
        answer = slim.recommend(history, k=30)
        assert_same_answers([answer], [run.recommend(history, k=30)])
        assert "i30" not in answer.ids and answer.unknown == [one for one in history if one == "i30"]
        assert {"i21", "i26"} <= {*answer.ids} or answer.fallback == "popularity"
    assert run.recommend(["i29"]).fallback is None
    assert "i25" in run.similar("i22", k=28).ids and run.knows("i22") and not run.knows("i30")


@pytest.mark.parametrize(
    ("history", "k", "sentence"),
    [("i8", 10, "must be a list of item ids"), (["i8"], 0, "at least 1"), ([1.5], 10, "a text or a whole number")],
)
def test_both_refuse_the_same_queries(pair: Pair, history: Any, k: int, sentence: str) -> None:
    for model in pair:
        with pytest.raises(InputError, match=sentence):
            model.recommend(history, k)


BLOCKED = """
import sys
for name in ("torch", "polars", "pyarrow", "pandas", "narwhals", "onnx", "safetensors", "litestar", "rich", "typer"):
    sys.modules[name] = None  # importing it is an error
import msgspec
from segue.slim import SlimRecommender
answer = SlimRecommender.open(sys.argv[1], threads=1).recommend(["i8", "7", "nobody"], k=5)
print(msgspec.json.encode(answer).decode())
"""


def test_only_numpy_msgspec_and_onnxruntime_are_imported(pair: Pair, folder: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", BLOCKED, str(folder / "model.onnx")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    expected = pair[0].recommend(["i8", "7", "nobody"], k=5)
    assert [item["id"] for item in json.loads(process.stdout)["items"]] == expected.ids


def test_a_missing_or_foreign_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="is no file"):
        SlimRecommender.open(tmp_path / "missing.onnx")
    (tmp_path / "text.onnx").write_text("not a model")
    with pytest.raises(FolderError, match="cannot be read as a model"):
        SlimRecommender.open(tmp_path / "text.onnx")


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        (None, "not of `segue export`"),
        ('{"format": 99}', "has export format 99, this segue reads format 2"),
        ('{"format": 2}', "is damaged"),
        ("[", "is damaged"),
    ],
)
def test_a_model_with_other_metadata_is_refused(
    graph: onnx.ModelProto, tmp_path: Path, facts: str | None, sentence: str
) -> None:
    onnx.helper.set_model_props(graph, {} if facts is None else {METADATA: facts})
    onnx.save_model(graph, tmp_path / "other.onnx")
    with pytest.raises(FolderError, match=sentence):
        SlimRecommender.open(tmp_path / "other.onnx")


def test_a_score_that_is_not_finite_is_an_error(graph: onnx.ModelProto, tmp_path: Path) -> None:
    for tensor in graph.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.full(tensor.dims, np.nan, dtype=np.float32), tensor.name))
    onnx.save_model(graph, tmp_path / "damaged.onnx")
    with pytest.raises(FolderError, match="not a finite number"):
        SlimRecommender.open(tmp_path / "damaged.onnx").recommend(["i8"])


def test_a_missing_onnxruntime_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(SettingsError, match=r"segue\[onnx\]"):
        SlimRecommender.open(tmp_path / "model.onnx")
