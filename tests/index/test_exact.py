"""Exact search equals a full sort by (score descending, number ascending), whatever the chunks and the filters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.errors import FolderError, SettingsError
from segue.index import exact
from segue.index.exact import ExactIndex, best_columns
from segue.index.search import Ragged
from segue.index.settings import IndexSettings

PADDED = (0, float("-inf"))


def sorted_answers(
    vectors: np.ndarray, query: np.ndarray, k: int, *, candidates: set[int], exclude: set[int], only: set[int] | None
) -> list[tuple[int, float]]:
    """The definition: all that may be answered, sorted. The vectors are small integers, so scores are exact."""
    remaining = [n for n in candidates - exclude if only is None or n in only]
    scored = sorted((-float(vectors[n] @ query), n) for n in remaining)
    return [(n, -negative) for negative, n in scored[:k]]


def answers(items: torch.Tensor, scores: torch.Tensor) -> list[list[tuple[int, float]]]:
    """Each row's (item, score) pairs without the padding, which may only stand at the end."""
    result = []
    for row in [list(zip(i, s, strict=True)) for i, s in zip(items.tolist(), scores.tolist(), strict=True)]:
        kept = [pair for pair in row if pair != PADDED]
        assert row == kept + [PADDED] * (len(row) - len(kept))
        result.append(kept)
    return result


@dataclass(frozen=True)
class Search:
    vectors: np.ndarray
    queries: np.ndarray
    k: int
    chunk: int
    most_scores: int
    candidates: np.ndarray
    exclude: list[list[int]] | None  # one list a question
    only: list[int] | None  # for all questions
    only_each: list[list[int]] | None  # one list a question


@st.composite
def searches(draw: st.DrawFn) -> Search:
    n_items, width, n_queries = draw(st.integers(1, 40)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    most = draw(st.sampled_from([0, 1, 2, 50]))  # the fewer values, the more ties
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    numbers = st.lists(st.integers(0, n_items + 3), max_size=n_items)
    each = st.lists(numbers, min_size=n_queries, max_size=n_queries)
    which = draw(st.sampled_from(["none", "all", "each"]))
    return Search(
        vectors=rng.integers(-most, most + 1, (n_items + 1, width)).astype(np.float32),
        queries=rng.integers(-most, most + 1, (n_queries, width)).astype(np.float32),
        k=draw(st.integers(1, 50)),
        chunk=draw(st.integers(1, 45)),
        most_scores=draw(st.integers(1, 100)),
        candidates=rng.random(n_items + 1) < draw(st.sampled_from([1.0, 0.5])),
        exclude=draw(st.none() | each),
        only=draw(numbers) if which == "all" else None,
        only_each=draw(each) if which == "each" else None,
    )


def only_of(case: Search) -> np.ndarray | Ragged | None:
    if case.only_each is not None:
        return Ragged.of_lists(case.only_each)
    return None if case.only is None else np.array(case.only, dtype=np.int64)


@settings(max_examples=300, deadline=None)
@given(searches())
def test_equals_a_full_sort(case: Search) -> None:
    index = ExactIndex.build(
        torch.from_numpy(case.vectors), candidates=case.candidates, settings=IndexSettings(chunk=case.chunk)
    )
    exclude = None if case.exclude is None else Ragged.of_lists(case.exclude)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "MOST_SCORES", case.most_scores)
        items, scores = index.search(torch.from_numpy(case.queries), case.k, exclude=exclude, only=only_of(case))
    assert (items.dtype, scores.dtype) == (torch.int64, torch.float32)
    for row, found in enumerate(answers(items, scores)):
        only = case.only if case.only_each is None else case.only_each[row]
        expected = sorted_answers(
            case.vectors,
            case.queries[row],
            case.k,
            candidates={n for n in range(1, len(case.vectors)) if case.candidates[n]},
            exclude=set() if case.exclude is None else set(case.exclude[row]),
            only=None if only is None else set(only),
        )
        assert found == expected  # so k answers whenever k remain, too


def test_random_floats_equal_a_full_sort_of_the_same_scores() -> None:
    generator = torch.Generator().manual_seed(7)
    vectors = torch.randn(1001, 16, generator=generator)
    queries = torch.randn(9, 16, generator=generator)
    expected = (queries.double() @ vectors[1:].double().T).argsort(dim=1, descending=True)[:, :20] + 1
    for chunk in (53, 97, 1000, 65536):
        items, scores = ExactIndex.build(vectors, settings=IndexSettings(chunk=chunk)).search(queries, 20)
        assert torch.equal(items, expected)
        torch.testing.assert_close(scores, (queries @ vectors.T).gather(1, items), rtol=1e-5, atol=1e-5)


def test_by_hand() -> None:
    vectors = torch.tensor([[9.0], [1.0], [3.0], [2.0], [3.0]])  # padding, then items 1..4
    index = ExactIndex.build(vectors)
    items, scores = index.search(torch.tensor([[1.0], [-1.0]]), 3)
    assert items.tolist() == [[2, 4, 3], [1, 3, 2]]
    assert scores.tolist() == [[3.0, 3.0, 2.0], [-1.0, -2.0, -3.0]]
    items, scores = index.search(torch.tensor([[1.0], [1.0]]), 3, exclude=Ragged.of_lists([[2, 3], []]))
    assert items.tolist() == [[4, 1, 0], [2, 4, 3]]
    assert scores[0].tolist() == [3.0, 1.0, float("-inf")]


def test_large_k_and_nothing_left() -> None:
    index = ExactIndex.build(torch.ones(4, 2))
    items, scores = index.search(torch.ones(1, 2), 100)
    assert items.tolist() == [[1, 2, 3]]
    assert scores.shape == (1, 3)
    items, _ = index.search(torch.ones(2, 2), 5, only=np.array([], dtype=np.int64))
    assert items.shape == (2, 0)
    items, _ = index.search(torch.ones(1, 2), 5, exclude=Ragged.of_lists([[1, 2, 3]]))
    assert items.tolist() == [[0, 0, 0]]


def test_ties_across_the_border_take_the_lowest_numbers() -> None:
    scores = torch.zeros(2, 10_000)
    scores[:, 5000] = 1.0
    columns, values = best_columns(scores, 4)
    assert columns.tolist() == [[5000, 0, 1, 2]] * 2
    assert values.tolist() == [[1.0, 0.0, 0.0, 0.0]] * 2


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def counted(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(scores.numel())
        return best_columns(scores, k)

    monkeypatch.setattr(exact, "best_columns", counted)
    monkeypatch.setattr(exact, "MOST_SCORES", 1000)
    ExactIndex.build(torch.ones(501, 2), settings=IndexSettings(chunk=100)).search(torch.ones(73, 2), 3)
    assert len(seen) == 8 * 5
    assert max(seen) == 1000


def test_save_and_load(tmp_path: Path) -> None:
    vectors = torch.randn(30, 4, generator=torch.Generator().manual_seed(1))
    candidates = np.arange(30) % 3 > 0
    index = ExactIndex.build(vectors, candidates=candidates, settings=IndexSettings(chunk=7))
    index.save(tmp_path / "index.safetensors")
    loaded = ExactIndex.load(tmp_path / "index.safetensors")
    assert loaded.n_items == 29
    assert loaded.settings == index.settings
    queries = torch.randn(3, 4, generator=torch.Generator().manual_seed(2))
    for one, other in zip(index.search(queries, 8), loaded.search(queries, 8), strict=True):
        assert torch.equal(one, other)


def test_damaged_or_missing_file_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "index.safetensors"
    with pytest.raises(FolderError, match=r"index\.safetensors is not an index"):
        ExactIndex.load(path)
    path.write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00{}      nonsense")
    with pytest.raises(FolderError, match="is not an index"):
        ExactIndex.load(path)


def test_numbers_that_are_not_finite_are_refused() -> None:
    with pytest.raises(FolderError, match="not finite"):
        ExactIndex.build(torch.tensor([[0.0], [float("nan")]]))
    with pytest.raises(FolderError, match="not a finite"):
        ExactIndex.build(torch.ones(3, 1)).search(torch.tensor([[float("inf")]]), 1)


def test_chunk_of_zero_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"index\.chunk must be at least 1"):
        IndexSettings(chunk=0)
