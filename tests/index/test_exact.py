"""Exact search equals a full sort by (score descending, number ascending), whatever the chunks and the filters."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from index_laws import Case, assert_sorted_answers, cases
from settings_tables import index_settings

from segue.errors import SettingsError
from segue.index import exact
from segue.index.exact import ExactIndex, best_columns


@settings(max_examples=150, deadline=None)
@given(cases(), st.integers(1, 45), st.integers(1, 100))
def test_equals_a_full_sort(case: Case, chunk: int, most_scores: int) -> None:
    index = ExactIndex.build(torch.from_numpy(case.vectors), candidates=case.candidates, chunk=chunk)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "MAX_SCORES", most_scores)
        assert_sorted_answers(index, torch.from_numpy(case.queries), case)


def test_random_floats_equal_a_full_sort_of_the_same_scores() -> None:
    generator = torch.Generator().manual_seed(7)
    vectors = torch.randn(1001, 16, generator=generator)
    queries = torch.randn(9, 16, generator=generator)
    expected = (queries.double() @ vectors[1:].double().T).argsort(dim=1, descending=True)[:, :20] + 1
    for chunk in (53, 97, 1000, 65536):
        items, scores = ExactIndex.build(vectors, chunk=chunk).search(queries, 20)
        assert torch.equal(items, expected)
        torch.testing.assert_close(scores, (queries @ vectors.T).gather(1, items), rtol=1e-5, atol=1e-5)


def test_ties_at_the_cutoff_take_the_lowest_numbers() -> None:
    scores = torch.zeros(2, 10_000)
    scores[:, 5000] = 1.0
    columns, values = best_columns(scores, 4)
    assert columns.tolist() == [[5000, 0, 1, 2]] * 2
    assert values.tolist() == [[1.0, 0.0, 0.0, 0.0]] * 2


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def spy(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        sizes.append(scores.numel())
        return best_columns(scores, k)

    monkeypatch.setattr(exact, "best_columns", spy)
    monkeypatch.setattr(exact, "MAX_SCORES", 1000)
    ExactIndex.build(torch.ones(501, 2), chunk=96).search(torch.ones(73, 2), 3)
    assert len(sizes) == 8 * 6
    assert max(sizes) == 960


def test_chunk_of_zero_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"index\.chunk: expected a whole number >= 1, got 0"):
        index_settings(chunk=0)
