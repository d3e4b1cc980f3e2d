"""Answers by codes equal a full sort of all scores, ties included, however many items are pruned."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from settings_tables import index_settings, model_settings
from torch import Tensor

from segue.errors import SettingsError
from segue.index import codes as codes_module
from segue.index.build import build_index, index_facts, load_index
from segue.index.codes import CodeIndex
from segue.index.exact import ExactIndex
from segue.index.search import Ragged
from segue.index.settings import refuse_misfit
from segue.models.build import build_model
from segue.models.items.tables import DataFacts
from segue.models.sequence import SequenceModel


def scores_of(centroids: Tensor, codes: np.ndarray, query: Tensor, *, normal: bool) -> list[float]:
    """By vectors written out, in float64."""
    vectors = centroids.double()[torch.arange(codes.shape[1]), torch.from_numpy(codes).long()].flatten(1)
    if normal:
        vectors = vectors / vectors.norm(dim=1, keepdim=True).clamp(min=1e-6)
    scores: list[float] = (vectors @ query.double()).tolist()
    return scores


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    parts=st.integers(1, 7),
    values=st.integers(2, 9),
    n_items=st.integers(1, 300),
    k=st.integers(1, 40),
    chunk=st.sampled_from([16, 100, 1 << 18]),
    normal=st.booleans(),
    whole=st.booleans(),
)
def test_answers_equal_a_full_sort(
    seed: int, parts: int, values: int, n_items: int, k: int, chunk: int, normal: bool, whole: bool
) -> None:
    """`whole`: small whole numbers, so that there are many ties. Items with the same codes always tie."""
    rng = np.random.default_rng(seed)
    shape = (parts, values, 2)
    samples = rng.integers(-2, 3, shape) if whole else rng.normal(0, rng.uniform(0, 3, (parts, 1, 1)), shape)
    centroids, codes = torch.from_numpy(samples).float(), rng.integers(0, values, (n_items + 1, parts)).astype(np.uint8)
    query = torch.from_numpy(rng.integers(-2, 3, parts * 2) if whole else rng.normal(0, 1, parts * 2)).float()
    allowed, banned = rng.random(n_items + 1) < 0.8, rng.integers(1, n_items + 1, rng.integers(0, n_items + 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codes_module, "CHUNK", chunk)
        patch.setattr(codes_module, "GOOD", 8)
        patch.setattr(codes_module, "BEST", 4)
        index = CodeIndex.build(centroids, torch.from_numpy(codes), candidates=allowed, normal=normal)
        items, scores = index.search(query[None], k, exclude=Ragged.of_lists([banned]))
    allowed[np.r_[0, banned]] = False
    true = scores_of(centroids, codes, query, normal=normal)
    best = sorted(np.flatnonzero(allowed).tolist(), key=lambda number: (-true[number], number))[:k]
    answers = [(item, score) for item, score in zip(items[0].tolist(), scores[0].tolist(), strict=True) if item]
    assert len(answers) == len(best) and all(allowed[item] for item, _ in answers)
    np.testing.assert_allclose([score for _, score in answers], [true[item] for item in best], atol=2e-5)
    np.testing.assert_allclose([score for _, score in answers], [true[item] for item, _ in answers], atol=2e-5)
    assert answers == sorted(answers, key=lambda pair: (-pair[1], pair[0])), "of equal scores the lower number first"
    if whole and not normal:
        assert [item for item, _ in answers] == best, "of many ties the lowest numbers"


def test_of_many_items_with_the_same_codes_the_lowest_numbers_are_answered() -> None:
    centroids, codes = torch.randn(4, 3, 2), np.zeros((5_001, 4), dtype=np.uint8)
    codes[::7, 1] = 1
    index, query = CodeIndex.build(centroids, torch.from_numpy(codes)), torch.randn(1, 8)
    (items, _), two = index.search(query, 20), scores_of(centroids, codes[:2], query[0], normal=False)
    first = np.arange(7, 5_001, 7) if scores_of(centroids, codes[7:8], query[0], normal=False)[0] > two[1] else None
    expected = first if first is not None else np.flatnonzero(np.arange(5_001) % 7)
    assert items[0].tolist() == expected[:20].tolist()


def test_the_best_item_is_never_pruned_however_many_the_parts() -> None:
    """Each of the other parts is half of what would change a float32 of 1, so they vanish if the last part, which
    separates items best, is added first. The item's exact score is 1 + 510 · 2^-25, the highest."""
    parts, tiny = 512, 2.0**-25
    centroids = torch.full((parts, 2, 1), tiny)
    centroids[-2:] = torch.tensor([[[0.0], [0.0]], [[1.0], [0.0]]])
    codes = np.zeros((31, parts), dtype=np.uint8)
    codes[2:, -1] = 1
    items, scores = CodeIndex.build(centroids, torch.from_numpy(codes)).search(torch.ones(1, parts), 1)
    assert items.tolist() == [[1]]
    assert scores.item() == pytest.approx(1 + 510 * tiny, abs=1e-7)


def test_an_index_by_cosine_shares_the_arrays_of_items() -> None:
    rng = np.random.default_rng(3)
    centroids = torch.from_numpy(rng.normal(0, 1, (4, 8, 2))).float()
    codes, query = torch.from_numpy(rng.integers(0, 8, (201, 4)).astype(np.uint8)), torch.randn(1, 8)
    plain, normal = CodeIndex.build(centroids, codes), CodeIndex.build(centroids, codes, normal=True)
    cosine = plain.by_cosine()
    for actual, expected in zip(cosine.search(query, 20), normal.search(query, 20), strict=True):
        assert torch.equal(actual, expected)
    assert cosine.pairs is plain.pairs and cosine._lists is plain._lists and plain.lengths is None
    assert normal.by_cosine() is normal


def test_most_items_are_pruned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer than a tenth are scored in full."""
    rng, sizes = np.random.default_rng(0), []
    scores = CodeIndex._scores

    def spy(self: CodeIndex, query: codes_module._Query, columns: np.ndarray) -> Tensor:
        sizes.append(len(columns))
        return scores(self, query, columns)

    monkeypatch.setattr(CodeIndex, "_scores", spy)
    centroids = torch.from_numpy(rng.normal(0, 1, (8, 256, 4))).float()
    codes = torch.from_numpy(rng.integers(0, 256, (50_001, 8)).astype(np.uint8))
    CodeIndex.build(centroids, codes).search(torch.from_numpy(rng.normal(0, 1, (1, 32))).float(), 10)
    assert sum(sizes) < 5_000


# --- which index a model gets, and its file --------------------------------------------------------------------------

N_ITEMS = 60


def model_of(similarity: str = "dot") -> SequenceModel:
    shape = model_settings(width=12, depth=1, length=10, similarity=similarity, items="codes", items__parts=3)
    codes = np.random.default_rng(0).integers(0, N_ITEMS, (N_ITEMS + 1, 3)).astype(np.uint8)
    return build_model(shape, N_ITEMS, generator=torch.Generator().manual_seed(1), facts=DataFacts(codes=codes))


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_a_model_with_codes_gets_a_code_index_equal_to_exact_search(similarity: str, tmp_path: Path) -> None:
    model, candidates = model_of(similarity), np.arange(N_ITEMS + 1) % 5 > 0
    index = build_index(model, candidates, index_settings())
    assert isinstance(index, CodeIndex) and index_facts(index, lambda: None) == {"kind": "codes"}
    assert isinstance(build_index(model, candidates, index_settings(kind="codes")), CodeIndex)
    exact = build_index(model, candidates, index_settings(kind="exact"))
    assert isinstance(exact, ExactIndex)
    with torch.no_grad():
        queries = model.head(torch.randn(6, 12, generator=torch.Generator().manual_seed(2)))
        everything = model.score_all(queries)
    (items, scores), (_, others) = index.search(queries, 8), exact.search(queries, 8)
    torch.testing.assert_close(scores, others, atol=1e-6, rtol=0)
    torch.testing.assert_close(scores, everything.gather(1, items), atol=1e-6, rtol=0)
    index.save(tmp_path / "index.safetensors")
    loaded = load_index(tmp_path / "index.safetensors")
    assert isinstance(loaded, CodeIndex) and loaded.n_items == N_ITEMS
    assert all(torch.equal(one, other) for one, other in zip(loaded.search(queries, 8), (items, scores), strict=True))
    loaded.save(tmp_path / "again.safetensors")
    files = [(tmp_path / f"{name}.safetensors").read_bytes() for name in ("index", "again")]
    assert files[0] == files[1]


@pytest.mark.parametrize(("items", "similarity"), [("ids", "dot"), ("codes", "mol"), ("vectors", "cosine")])
def test_models_without_sums_over_codes_are_refused(items: str, similarity: str) -> None:
    with pytest.raises(SettingsError, match=r"index = 'codes' needs model\.items = 'codes' and model\.similarity = "):
        refuse_misfit(index_settings(kind="codes"), mixture=similarity == "mol", codes=items == "codes")


@pytest.mark.parametrize("kind", ["auto", "exact"])
def test_mixtures_of_logits_over_codes_get_an_index_of_mixtures(kind: str) -> None:
    assert not isinstance(
        build_index(model_of("mol"), np.arange(N_ITEMS + 1) > 0, index_settings(kind=kind)), CodeIndex
    )


def test_no_item_can_be_added() -> None:
    index = build_index(model_of(), np.arange(N_ITEMS + 1) > 0, index_settings())
    with pytest.raises(SettingsError, match="Items cannot be added to an index of codes"):
        index.with_items(torch.zeros(1, 12), np.array([N_ITEMS + 1]), n_items=N_ITEMS + 1)
