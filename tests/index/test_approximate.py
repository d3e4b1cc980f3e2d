"""Approximate search has the recall that it reports, filters cost no recall, and its file is the whole index."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from segue.errors import FolderError
from segue.index import approximate
from segue.index.approximate import ApproximateIndex, Lists
from segue.index.build import load_index
from segue.index.exact import ExactIndex
from segue.index.search import Ragged, Recall, recall, recall_of_scores

ITEMS, WIDTH = 20_000, 16


def clustered(rows: int, *, seed: int) -> Tensor:
    """Vectors as trained tables have them: in clusters, of different lengths."""
    centres = np.random.default_rng(0).standard_normal((100, WIDTH))
    rng = np.random.default_rng(seed)
    vectors = centres[rng.integers(0, 100, rows)] + 0.5 * rng.standard_normal((rows, WIDTH))
    return torch.from_numpy((vectors * np.exp(0.3 * rng.standard_normal((rows, 1)))).astype(np.float32))


@pytest.fixture(scope="module")
def index() -> ApproximateIndex:
    return ApproximateIndex.build(clustered(ITEMS + 1, seed=1), queries=clustered(400, seed=2))


def best_numbers(index: ApproximateIndex, queries: Tensor, k: int) -> list[set[int]]:
    """By a full sort in float64."""
    scores = queries.double() @ index.exact.vectors.double().T
    return [set((row + 1).tolist()) for row in scores.argsort(dim=1, descending=True)[:, :k]]


def share(items: Tensor, best: list[set[int]]) -> float:
    return float(
        np.mean([len(set(row) & expected) / len(expected) for row, expected in zip(items.tolist(), best, strict=True)])
    )


def test_it_has_its_reported_recall_and_probes_few_lists(
    index: ApproximateIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries = clustered(100, seed=3)  # not those that the index was built with
    monkeypatch.setattr(index.exact, "search", None)
    assert index.recall.queries == 200
    assert index.recall.share >= 0.98
    assert share(index.search(queries, 100)[0], best_numbers(index, queries, 100)) >= 0.98
    assert share(index.search(queries, 10)[0], best_numbers(index, queries, 10)) >= 0.98
    assert share(index.search(queries, 300)[0], best_numbers(index, queries, 300)) >= 0.98
    assert index.probes < len(index.lists.centres) / 4
    assert len(index.lists.centres) == round(4 * ITEMS**0.5)


def test_a_higher_target_recall_probes_more_lists(index: ApproximateIndex) -> None:
    probes = []
    for goal in (0.5, 0.9, 1.0):
        other = ApproximateIndex.build(clustered(ITEMS + 1, seed=1), least_recall=goal, queries=clustered(100, seed=2))
        assert other.recall.share >= goal - 0.02
        probes.append(other.probes)
    assert probes[0] < probes[1] < index.probes < probes[2]


def test_scores_are_those_of_exact_search(index: ApproximateIndex) -> None:
    queries = clustered(50, seed=4)
    items, scores = index.search(queries, 20)
    expected = (queries.double() @ index.exact.vectors.double().T).gather(1, items - 1)
    assert torch.allclose(scores.double(), expected, rtol=1e-5, atol=1e-5)


def test_filters_cost_no_recall(index: ApproximateIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best 50 are seen already, and only half of all items are allowed."""
    queries = clustered(60, seed=5)
    seen = Ragged.of_lists([sorted(numbers) for numbers in best_numbers(index, queries, 50)])
    only = np.random.default_rng(6).permutation(np.arange(1, ITEMS + 1))[: ITEMS // 2]
    items, best = index.exact.search(queries, 20, exclude=seen, only=only)
    monkeypatch.setattr(index.exact, "search", None)
    answers, scores = index.search(queries, 20, exclude=seen, only=only)
    assert share(answers, [set(row) for row in items.tolist()]) >= 0.98
    assert recall_of_scores(scores, best) >= 0.98
    assert set(answers.flatten().tolist()) <= set(only.tolist())


@pytest.mark.parametrize("allowed", [3, 40, 700])
def test_a_short_list_is_answered_exactly(index: ApproximateIndex, allowed: int) -> None:
    queries = clustered(9, seed=7)
    only = np.random.default_rng(allowed).permutation(np.arange(1, ITEMS + 1))[:allowed]
    for one, other in zip(
        index.search(queries, 30, only=only), index.exact.search(queries, 30, only=only), strict=True
    ):
        assert torch.equal(one, other)


def test_if_the_lists_hold_too_few_all_items_are_scored(index: ApproximateIndex) -> None:
    """The half of the items with the lowest scores: none of them is in the probed lists."""
    query = clustered(1, seed=8)
    worst = (query @ index.exact.vectors.T)[0].argsort()[: ITEMS // 2].numpy() + 1
    answers, scores = index.search(query, 25, only=worst)
    expected = index.exact.search(query, 25, only=worst)
    assert torch.equal(answers, expected[0]) and torch.equal(scores, expected[1])


def test_only_per_query_is_answered_exactly(index: ApproximateIndex) -> None:
    queries, only = clustered(2, seed=9), Ragged.of_lists([[1, 2, 3], [4, 5]])
    answers, _ = index.search(queries, 3, only=only)
    assert [set(row) for row in answers.tolist()] == [{1, 2, 3}, {4, 5, 0}]


def test_memory_is_bounded(index: ApproximateIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    search = Lists.search

    def spy(self: Lists, queries: np.ndarray, depth: int, *, probes: int) -> np.ndarray:
        sizes.append(len(queries) * depth * WIDTH)
        return search(self, queries, depth, probes=probes)

    monkeypatch.setattr(Lists, "search", spy)
    monkeypatch.setattr(approximate, "MAX_FLOATS", 10 * 64 * WIDTH)
    index.search(clustered(95, seed=10), 10)
    assert len(sizes) == 10 and max(sizes) == approximate.MAX_FLOATS


def test_building_is_deterministic_and_a_file_is_the_whole_index(index: ApproximateIndex, tmp_path: Path) -> None:
    index.save(tmp_path / "one")
    again = ApproximateIndex.build(clustered(ITEMS + 1, seed=1), queries=clustered(400, seed=2))
    again.save(tmp_path / "again")
    loaded = load_index(tmp_path / "one")
    assert isinstance(loaded, ApproximateIndex)
    loaded.save(tmp_path / "loaded")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "again").read_bytes() == (tmp_path / "loaded").read_bytes()
    assert (loaded.n_items, loaded.probes, loaded.recall) == (ITEMS, index.probes, index.recall)
    queries = clustered(20, seed=11)
    for one, other in zip(index.search(queries, 50), loaded.search(queries, 50), strict=True):
        assert torch.equal(one, other)


def test_lists_that_do_not_match_the_items_are_refused(tmp_path: Path) -> None:
    index = ApproximateIndex.build(clustered(50, seed=1))
    for owners in (index.lists.owners[:-1].copy(), index.lists.owners + 1000, index.lists.owners.astype(np.int32)):
        index.lists.owners = owners
        index.save(tmp_path / "index")
        with pytest.raises(FolderError, match="its lists do not match its items"):
            load_index(tmp_path / "index")


def test_recall_by_hand() -> None:
    """Of the best two, one query finds both, one finds the second best and one worse, one finds copies."""
    vectors = torch.tensor([[0.0, 0.0], [4.0, 1.0], [3.0, 2.0], [2.0, 4.0], [1.0, 2.0], [0.0, 2.0]])
    exact = ExactIndex.build(vectors)

    class Fixed:
        n_items = 5

        def search(
            self, queries: Tensor, k: int, *, exclude: object = None, only: object = None
        ) -> tuple[Tensor, Tensor]:
            assert exclude is None and only is None
            items = torch.tensor([[1, 2], [1, 4], [3, 5]])[:, :k]
            return items, (vectors[items] @ queries[:, :, None])[:, :, 0]

        def save(self, path: Path) -> None: ...

        def with_items(self, vectors: Tensor, numbers: np.ndarray, *, n_items: int) -> Fixed:
            raise NotImplementedError

    queries = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])  # best: 1 2, 1 2, 3 and one of 2 4 5
    assert recall(Fixed(), exact, queries, 2) == pytest.approx(5 / 6)
    assert recall(exact, exact, queries, 2) == 1.0


def test_recall_without_queries() -> None:
    index = ApproximateIndex.build(clustered(2, seed=1))
    assert index.recall == Recall(k=100, share=1.0, queries=0)
