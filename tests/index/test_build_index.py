"""The kind of index by model, settings and catalogue size; and index files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from settings_tables import index_settings, model_settings
from torch import Tensor

from segue.api import train
from segue.data.batch import gather, newest
from segue.data.dataset import Data
from segue.data.split import Cases
from segue.errors import FolderError, SettingsError
from segue.index import approximate, build, settings
from segue.index.approximate import ApproximateIndex
from segue.index.build import build_index, index_facts, load_index, sample_queries
from segue.index.exact import ExactIndex
from segue.index.mol import MolIndex
from segue.index.search import ItemIndex
from segue.index.settings import refuse_misfit
from segue.layers.packed import tensors
from segue.models.build import build_model
from segue.models.sequence import SequenceModel
from segue.recommend.recommender import Recommender

N_ITEMS = 60


def model(similarity: Any = "dot", *, n_items: int = N_ITEMS) -> SequenceModel:
    shape = model_settings(width=8, depth=1, length=10, similarity=similarity)
    return build_model(shape, n_items, generator=torch.Generator().manual_seed(1))


def index_of(kind: str, similarity: str = "dot", **options: Any) -> ItemIndex:
    return build_index(model(similarity), np.arange(N_ITEMS + 1) > 0, index_settings(kind=kind, **options))


def no_queries() -> Tensor | None:
    raise AssertionError("an index without approximation needs no queries")


@pytest.fixture
def without_faiss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "faiss_installed", lambda: False)
    monkeypatch.setattr(build, "faiss_installed", lambda: False)


@pytest.mark.parametrize(("similarity", "large"), [("dot", ApproximateIndex), ("cosine", ApproximateIndex)])
def test_auto_is_exact_until_the_catalogue_is_large(
    similarity: str, large: type[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(index_of("auto", similarity), ExactIndex)
    monkeypatch.setattr(build, "LEAST_APPROXIMATE", N_ITEMS)
    assert isinstance(index_of("auto", similarity), large)
    assert isinstance(index_of("exact", similarity), ExactIndex)
    candidates = np.arange(N_ITEMS + 1) > 1  # one candidate fewer
    assert isinstance(build_index(model(similarity), candidates, index_settings()), ExactIndex)


def test_a_mixture_of_logits_has_an_index_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_of(kind: str) -> bool:
        index = index_of(kind, "mol")
        assert isinstance(index, MolIndex)
        return index.cut is not None

    assert [cut_of(kind) for kind in ("auto", "exact", "two-stage")] == [False, False, True]
    monkeypatch.setattr(build, "LEAST_TWO_STAGE", N_ITEMS)
    assert [cut_of(kind) for kind in ("auto", "exact", "two-stage")] == [True, False, True]


@pytest.mark.usefixtures("without_faiss")
def test_without_faiss_auto_stays_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "LEAST_APPROXIMATE", 1)
    assert isinstance(index_of("auto"), ExactIndex)
    with pytest.raises(SettingsError, match=r"needs faiss, which is not installed: run `pip install 'segue\[ann\]'`"):
        index_settings(kind="approximate")


@pytest.mark.parametrize(
    ("kind", "similarity"), [("two-stage", "dot"), ("two-stage", "cosine"), ("approximate", "mol")]
)
def test_a_kind_that_does_not_fit_is_refused(kind: str, similarity: str) -> None:
    with pytest.raises(SettingsError, match=rf"index = '{kind}' needs model\.similarity = "):
        refuse_misfit(index_settings(kind=kind), mixture=similarity == "mol", codes=False)
    with pytest.raises(SettingsError, match=rf"index = '{kind}'"):
        index_of(kind, similarity)


@pytest.mark.parametrize("recall", [0.0, -1.0, 1.5])
def test_a_recall_that_is_not_above_zero_and_at_most_one_is_refused(recall: float) -> None:
    with pytest.raises(SettingsError, match=r"index\.recall: expected a number"):
        index_settings(recall=recall)


def test_building_leaves_the_model_unchanged() -> None:
    for training in (True, False):
        one = model("mol").train(training)
        build_index(one, np.arange(N_ITEMS + 1) > 0, index_settings(), queries=no_queries)
        assert one.training is training


# --- files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "similarity"), [("exact", "dot"), ("approximate", "dot"), ("exact", "mol"), ("two-stage", "mol")]
)
def test_save_and_load(kind: str, similarity: str, tmp_path: Path) -> None:
    one_model, candidates = model(similarity), np.arange(N_ITEMS + 1) % 3 > 0
    index = build_index(
        one_model, candidates, index_settings(kind=kind, **({} if kind == "two-stage" else {"chunk": 7}))
    )
    index.save(tmp_path / "index.safetensors")
    loaded = load_index(tmp_path / "index.safetensors")
    assert type(loaded) is type(index)
    assert loaded.n_items == N_ITEMS
    with torch.no_grad():
        queries = one_model.head(torch.randn(3, 8, generator=torch.Generator().manual_seed(2)))
    (items, scores), (others, their_scores) = index.search(queries, 8), loaded.search(queries, 8)
    assert torch.equal(items, others)
    assert torch.allclose(scores, their_scores, atol=1e-5)  # memory alignment may change rounding
    loaded.save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "index.safetensors").read_bytes()


def test_a_damaged_or_missing_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "index.safetensors"
    with pytest.raises(FolderError, match=r"index\.safetensors is not an index"):
        load_index(path)
    path.write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00{}      nonsense")
    with pytest.raises(FolderError, match="is not an index"):
        load_index(path)


def test_an_unknown_kind_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "index.safetensors"
    index_of("exact").save(path)
    path.write_bytes(path.read_bytes().replace(b'kind\\":\\"exact', b'kind\\":\\"other', 1))
    with pytest.raises(FolderError, match="the unknown kind 'other'"):
        load_index(path)


def test_a_file_for_faiss_without_faiss_is_refused(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    index_of("approximate").save(tmp_path / "index.safetensors")
    request.getfixturevalue("without_faiss")
    with pytest.raises(FolderError, match=r"needs faiss, which is not installed; run `pip install 'segue\["):
        load_index(tmp_path / "index.safetensors")


# --- runs ---------------------------------------------------------------------------------------------------------


def test_sample_queries_are_the_models_queries_of_some_cases(cycle_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = Data.open(cycle_data)
    cases, sequence_model = data.split.cases("valid", "last"), model(n_items=len(data.vocabulary))

    def queries_of(first: int) -> Tensor | None:
        some = Cases(users=cases.users[:first], starts=cases.starts[:first], targets=cases.targets[:first])
        return sample_queries(sequence_model, data.sequences, some)

    every, one = queries_of(len(cases)), queries_of(1)
    assert every is not None and len(every) == len(cases) > 15
    assert sequence_model.training
    start, target = int(cases.starts[0]), int(cases.targets[0])
    history = gather(data.sequences, np.array([start]), np.array([target]))
    with torch.no_grad():
        own = sequence_model.eval().query(tensors(newest(history, sequence_model.length, sequence_model.window_step)))
    assert one is not None and torch.allclose(one, own, atol=1e-6)
    monkeypatch.setattr(build, "SAMPLE", 15)
    some = queries_of(len(cases))
    assert some is not None and some.shape == (15, 8)
    assert queries_of(0) is None


def test_index_facts_for_the_manifest() -> None:
    assert index_facts(index_of("exact"), no_queries) == {"kind": "exact"}
    assert index_facts(index_of("exact", "mol"), no_queries) == {"kind": "exact"}
    assert index_facts(index_of("two-stage", "mol"), lambda: None) == {"kind": "two-stage", "recall": None}
    queries = model("mol").head(torch.randn(130, 8, generator=torch.Generator().manual_seed(3)))
    facts = index_facts(index_of("two-stage", "mol"), lambda: queries)
    assert (facts["recall"].k, facts["recall"].share, facts["recall"].queries) == (100, 1.0, 65)


def test_a_run_with_an_approximate_index(
    cycle_data: Path, quick_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(approximate, "LEAST_ITEMS", 0)  # however few items there are
    overrides = ["index=approximate", "index.recall=0.9", "train.epochs=1"]
    run = train(cycle_data, out=tmp_path / "run", recipe=quick_recipe, overrides=overrides)
    facts = run.manifest["index"]
    assert facts["kind"] == "approximate" and facts["recall"]["k"] == 100 and 0.8 < facts["recall"]["share"] <= 1
    assert 1 <= facts["probes"] <= facts["lists"]
    recommender = Recommender.open(tmp_path / "run")
    assert isinstance(recommender.index, ApproximateIndex)
    exact = Recommender(recommender.model, recommender.index.exact, recommender.vocabulary, seen=recommender.seen)
    history = recommender.vocabulary.table["id"].to_list()[:3]
    assert set(recommender.recommend(history, k=5).ids) <= set(exact.recommend(history, k=10**6).ids)
    assert len(recommender.recommend(history, k=5).ids) == len(exact.recommend(history, k=5).ids)
