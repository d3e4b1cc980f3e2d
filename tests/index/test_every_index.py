"""The contract of `ItemIndex` for every kind: filters hold, there are k answers whenever k items remain, scores are
exact, ties go to the lower number. The recall of approximations is tested elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from index_laws import PADDED, Case, assert_edge_cases, cases
from torch import Tensor

from segue.errors import FolderError
from segue.index import approximate
from segue.index.approximate import ApproximateIndex
from segue.index.codes import CodeIndex
from segue.index.exact import ExactIndex
from segue.index.mol import Cut, MolIndex
from segue.index.search import ItemIndex, Ragged, recall
from segue.models.similarity.mol import Mixture


@dataclass(frozen=True)
class Kind:
    """Makes an index whose scores are the inner products of vectors [V + 1, D] and encoded queries."""

    build: Callable[[np.ndarray, np.ndarray | None], ItemIndex]
    encode: Callable[[np.ndarray], Tensor] = torch.from_numpy


def approximate_index(recall: float) -> Callable[[np.ndarray, np.ndarray | None], ItemIndex]:
    def build(vectors: np.ndarray, candidates: np.ndarray | None) -> ItemIndex:
        return ApproximateIndex.build(torch.from_numpy(vectors), candidates=candidates, least_recall=recall)

    return build


def one_gate(vectors: np.ndarray) -> Tensor:
    """A mixture of one component is an inner product, whatever its gate."""
    return torch.from_numpy(np.concatenate((vectors, np.ones((len(vectors), 1), dtype=np.float32)), axis=1))


def mol_index(cut: Cut | None) -> Callable[[np.ndarray, np.ndarray | None], ItemIndex]:
    def build(vectors: np.ndarray, candidates: np.ndarray | None) -> ItemIndex:
        mixture = Mixture(query_parts=1, item_parts=1, part_width=vectors.shape[1], gate_hidden=0)
        return MolIndex.build(mixture, one_gate(vectors), candidates=candidates, cut=cut)

    return build


def code_index(vectors: np.ndarray, candidates: np.ndarray | None) -> ItemIndex:
    """A part for each feature, with all of its values."""
    values = [np.unique(column) for column in vectors.T]
    centroids = np.zeros((len(values), max(map(len, values)), 1), dtype=np.float32)
    for part, own in zip(centroids, values, strict=True):
        part[: len(own), 0] = own
    codes = [np.searchsorted(own, column) for own, column in zip(values, vectors.T, strict=True)]
    coded = torch.from_numpy(np.stack(codes, axis=1).astype(np.uint8))
    return CodeIndex.build(torch.from_numpy(centroids), coded, candidates=candidates)


KINDS = {
    "exact": Kind(
        lambda vectors, candidates: ExactIndex.build(torch.from_numpy(vectors), candidates=candidates, chunk=64)
    ),
    "approximate": Kind(approximate_index(1.0)),
    "approximate, one list": Kind(approximate_index(0.001)),
    "codes": Kind(code_index),
    "mol": Kind(mol_index(None), one_gate),
    "mol, two-stage": Kind(mol_index(Cut(averaged=9)), one_gate),
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
growing_kind = pytest.mark.parametrize("kind", [KINDS[name] for name in KINDS if name != "codes"])


@pytest.fixture(autouse=True, scope="module")
def approximate_small_catalogues() -> Iterator[None]:
    """Small catalogues are searched like large ones, with few spare candidates, so that too few are found often."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(approximate, "LEAST_ITEMS", 0)
        patch.setattr(approximate, "SPARE", 1.0)
        patch.setattr(approximate, "STEP", 2)
        yield


def answers(items: Tensor, scores: Tensor) -> list[list[tuple[int, float]]]:
    """Each row's (item, score) pairs without the padding, which may only stand at the end."""
    result = []
    for row in [list(zip(i, s, strict=True)) for i, s in zip(items.tolist(), scores.tolist(), strict=True)]:
        valid = [pair for pair in row if pair != PADDED]
        assert row == valid + [PADDED] * (len(row) - len(valid))
        result.append(valid)
    return result


@every_kind
@settings(max_examples=40, deadline=None)
@given(case=cases())
def test_filters_hold_scores_are_exact_and_answers_complete(kind: Kind, case: Case) -> None:
    assert_contract(kind.build(case.vectors, case.candidates), kind.encode(case.queries), case)


def assert_contract(index: ItemIndex, query_vectors: Tensor, case: Case) -> None:
    exclude = None if case.exclude is None else Ragged.of_lists(case.exclude)
    items, scores = index.search(query_vectors, case.k, exclude=exclude, only=case.only_argument)
    assert (items.dtype, scores.dtype) == (torch.int64, torch.float32)
    everything = [replaced.expected(row) for replaced in [whole(case)] for row in range(len(query_vectors))]
    for pairs, allowed in zip(answers(items, scores), everything, strict=True):
        assert len(pairs) == min(case.k, len(allowed))
        assert set(pairs) <= set(allowed)  # so the scores are right, too: whole numbers have no rounding
        assert pairs == sorted(pairs, key=lambda pair: (-pair[1], pair[0]))
        assert len(dict(pairs)) == len(pairs)
        if len(allowed) <= case.k:
            assert pairs == allowed


def whole(case: Case) -> Case:
    """The same case with all answers requested."""
    return Case(case.vectors, case.queries, 10**6, case.candidates, case.exclude, case.only, case.only_each)


@growing_kind
@settings(max_examples=30, deadline=None)
@given(case=cases(), share=st.floats(0, 1), seed=st.integers(0, 2**32))
def test_with_items_keeps_the_contract_and_the_old_index_is_unchanged(
    kind: Kind, case: Case, share: float, seed: int
) -> None:
    """With new items and with new vectors of old items it equals an index built of everything."""
    before = int(share * (len(case.vectors) - 1))
    old_vectors, rng = case.vectors[: before + 1].copy(), np.random.default_rng(seed)
    changed = np.flatnonzero(
        case.candidates[: before + 1] & (rng.random(before + 1) < 0.3) & (np.arange(before + 1) > 0)
    )
    old_vectors[changed] = rng.integers(-3, 4, (len(changed), case.vectors.shape[1]))
    old = kind.build(old_vectors, case.candidates[: before + 1])
    query_vectors = kind.encode(case.queries)
    first = old.search(query_vectors, case.k)
    numbers = np.union1d(changed, before + 1 + np.flatnonzero(case.candidates[before + 1 :]))
    index = old.with_items(kind.encode(case.vectors[numbers]), numbers, n_items=len(case.vectors) - 1)
    assert type(index) is type(old) and index.n_items == len(case.vectors) - 1
    assert_contract(index, query_vectors, case)
    again = old.search(query_vectors, case.k)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1]) and old.n_items == before


def test_new_items_far_from_all_others_cost_little_recall() -> None:
    """Lists hold one byte per feature, scaled to the range they were built on; new items may lie outside it."""
    rng = np.random.default_rng(2)
    vectors = rng.standard_normal((2001, 8)).astype(np.float32)
    beyond = (10 * rng.standard_normal((50, 8))).astype(np.float32)
    old = approximate_index(1.0)(vectors, None)
    index = old.with_items(torch.from_numpy(beyond), np.arange(2001, 2051), n_items=2050)
    query_vectors = torch.from_numpy(rng.standard_normal((40, 8)).astype(np.float32))
    everything = ExactIndex.build(torch.from_numpy(np.concatenate((vectors, beyond))))
    assert recall(index, everything, query_vectors, 20) > 0.97


@every_kind
def test_other_queries_of_a_batch_change_no_answer(kind: Kind) -> None:
    rng = np.random.default_rng(1)
    vectors, queries = (rng.integers(-9, 10, (rows, 4)).astype(np.float32) for rows in (301, 20))
    excluded = [rng.integers(1, 301, size) for size in rng.integers(0, 90, 20)]
    index, query_vectors = kind.build(vectors, None), kind.encode(queries)
    items, scores = index.search(query_vectors, 7, exclude=Ragged.of_lists(excluded))
    for row in range(20):
        alone = index.search(query_vectors[row : row + 1], 7, exclude=Ragged.of_lists(excluded[row : row + 1]))
        assert torch.equal(alone[0][0], items[row]) and torch.equal(alone[1][0], scores[row])


@every_kind
def test_by_hand(kind: Kind) -> None:
    vectors = np.array([[9.0], [1.0], [3.0], [2.0], [3.0]], dtype=np.float32)  # padding, then items 1..4
    index = kind.build(vectors, None)
    items, scores = index.search(kind.encode(np.array([[1.0], [-1.0]], dtype=np.float32)), 4)
    assert items.tolist() == [[2, 4, 3, 1], [1, 3, 2, 4]]
    assert scores.tolist() == [[3.0, 3.0, 2.0, 1.0], [-1.0, -2.0, -3.0, -3.0]]
    same = kind.encode(np.ones((2, 1), dtype=np.float32))
    items, scores = index.search(same, 3, exclude=Ragged.of_lists([[2, 3], [1]]))
    assert items.tolist() == [[4, 1, 0], [2, 4, 3]]
    assert scores[0].tolist() == [3.0, 1.0, float("-inf")]


@every_kind
def test_edge_cases(kind: Kind) -> None:
    assert_edge_cases(lambda vectors: (kind.build(vectors, None), kind.encode(vectors[:1])))


@every_kind
def test_no_item_at_all(kind: Kind) -> None:
    index = kind.build(np.ones((4, 2), dtype=np.float32), np.zeros(4, dtype=bool))
    assert index.n_items == 3
    items, scores = index.search(kind.encode(np.ones((2, 2), dtype=np.float32)), 5)
    assert items.shape == scores.shape == (2, 0)


@every_kind
def test_numbers_that_are_not_finite_are_refused(kind: Kind) -> None:
    vectors = np.ones((5, 2), dtype=np.float32)
    with pytest.raises(FolderError, match="not finite"):
        kind.build(vectors, None).search(kind.encode(np.array([[1.0, np.inf]], dtype=np.float32)), 1)
    vectors[3, 1] = np.nan
    with pytest.raises(FolderError, match="not finite"):
        kind.build(vectors, None)


@pytest.mark.parametrize("kind", [KINDS["exact"], KINDS["approximate"]], ids=["exact", "approximate"])
@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("copies", [13, 47, 998])
def test_copies_of_an_item_have_one_score(kind: Kind, rows: int, copies: int) -> None:
    """In every row: matrix products may round the last rows of an incomplete tile differently."""
    rng = np.random.default_rng(copies)
    vectors = np.repeat(rng.standard_normal((1, 50)).astype(np.float32), copies + 1, axis=0)
    items, scores = kind.build(vectors, None).search(torch.randn(rows, 50), copies)
    assert items.tolist() == [list(range(1, copies + 1))] * rows
    assert bool((scores == scores[:, :1]).all())
