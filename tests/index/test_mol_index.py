"""The index of a mixture of logits: every item scored, or two stages; filters exact in both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from index_laws import PADDED, Case, assert_edge_cases, assert_sorted_answers, cases
from torch import Tensor

from segue.errors import FolderError
from segue.index import mol as mol_index
from segue.index.build import load_index
from segue.index.mol import Cut, Groups, MolIndex, group_vectors
from segue.index.search import ItemIndex, Ragged
from segue.layers.dropout import set_generator
from segue.models.similarity import mol as mol_model
from segue.models.similarity.mol import Mixture, Side

EVERYTHING = Cut(averaged=10**9)


def plain_mixture(width: int) -> Mixture:
    """Two components each and equal gates: a score is the mean of the four products."""
    mixture = Mixture(query_parts=2, item_parts=2, part_width=width, gate_hidden=0)
    for weight in mixture.parameters():
        torch.nn.init.zeros_(weight)
    return mixture


def flat_items(vectors: np.ndarray) -> Tensor:
    """Items whose components differ, and whose mean component is the vector."""
    apart = np.random.default_rng(1).integers(-3, 4, vectors.shape).astype(np.float32)
    return torch.from_numpy(np.concatenate((vectors - apart, vectors + apart, np.zeros((len(vectors), 4))), 1)).float()


def flat_queries(queries: np.ndarray) -> Tensor:
    """Queries whose components differ, and whose mean component is the query."""
    apart = np.random.default_rng(2).integers(-3, 4, queries.shape).astype(np.float32)
    return torch.from_numpy(np.concatenate((queries - apart, queries + apart, np.zeros((len(queries), 4))), 1)).float()


def plain_index(case: Case, cut: Cut | None) -> MolIndex:
    width = case.vectors.shape[1]
    return MolIndex.build(plain_mixture(width), flat_items(case.vectors), candidates=case.candidates, cut=cut)


@pytest.mark.parametrize("cut", [None, EVERYTHING], ids=["exact", "everything kept"])
@settings(max_examples=60, deadline=None)
@given(case=cases(), chunk=st.sampled_from([1, 5, 100]))
def test_answers_equal_a_full_sort(cut: Cut | None, case: Case, chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mol_index, "CHUNK", chunk)
        assert_sorted_answers(plain_index(case, cut), flat_queries(case.queries), case)


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(0, 10))
def test_groups_of_copies_of_one_item_lose_nothing(case: Case, averaged: int) -> None:
    """However few candidates are kept: a group's score equals its items'. Of equal groups any may be kept."""
    whole = plain_index(case, None)
    owners = np.unique(case.vectors[whole.numbers], axis=0, return_inverse=True)[1].reshape(-1)
    groups = Groups(owners, whole.items)
    index = MolIndex(
        whole.mixture, whole.items, whole.numbers, n_items=whole.n_items, cut=Cut(averaged=averaged), groups=groups
    )
    exclude = None if case.exclude is None else Ragged.of_lists(case.exclude)
    items, scores = index.search(flat_queries(case.queries), case.k, exclude=exclude, only=case.only_argument)
    for row, (numbers, values) in enumerate(zip(items.tolist(), scores.tolist(), strict=True)):
        answers = [pair for pair in zip(numbers, values, strict=True) if pair != PADDED]
        assert [score for _, score in answers] == [score for _, score in case.expected(row)]
        assert set(answers) <= set(replace(case, k=10**6).expected(row)) and len(set(numbers) - {0}) == len(answers)
        assert answers == sorted(answers, key=lambda pair: (-pair[1], pair[0]))


@pytest.mark.parametrize("cut", [None, EVERYTHING, Cut(averaged=0)], ids=["exact", "everything", "least"])
def test_edge_cases(cut: Cut | None) -> None:
    def build(vectors: np.ndarray) -> tuple[ItemIndex, Tensor]:
        return MolIndex.build(plain_mixture(2), flat_items(vectors), cut=cut), flat_queries(vectors[:1])

    assert_edge_cases(build)


# --- with gates ---------------------------------------------------------------------------------------------------


def gated_mixture(seed: int = 0) -> Mixture:
    """Random gates. Widths of whole vector registers, so that equal items have equal scores bit for bit."""
    mixture = Mixture(query_parts=4, item_parts=4, part_width=8, gate_hidden=16)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in mixture.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.4)
    return mixture.eval()


def normal(rows: int, seed: int) -> Tensor:
    """Queries or items: 4 components of 8 and 16 gates."""
    return torch.randn(rows, 48, generator=torch.Generator().manual_seed(seed))


def best_of_all(mixture: Mixture, queries: Tensor, items: Tensor, k: int) -> Tensor:
    """Item numbers by a stable sort of all scores, in float64. Row 0 is padding."""
    double = Mixture(query_parts=4, item_parts=4, part_width=8, gate_hidden=16).double().eval()
    double.load_state_dict(mixture.state_dict())
    scores = double.score(double.side(queries.double()), double.side(items[1:].double()))
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :k] + 1


@pytest.mark.parametrize("cut", [None, EVERYTHING], ids=["exact", "everything kept"])
def test_answers_are_those_of_all_scores(cut: Cut | None) -> None:
    mixture, queries, items = gated_mixture(), normal(9, 1), normal(701, 2)
    answers, scores = MolIndex.build(mixture, items, cut=cut).search(queries, 20)
    assert torch.equal(answers, best_of_all(mixture, queries, items, 20))
    expected = mixture.score(mixture.side(queries), mixture.side(items)).gather(1, answers)
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 30), st.booleans(), st.booleans())
def test_two_stages_that_keep_everything_equal_exact_search(
    seed: int, k: int, filtered: bool, duplicated: bool
) -> None:
    """Filters and items that are copies of each other included; the same numbers, in the same order."""
    mixture, queries, items = gated_mixture(seed), normal(4, seed), normal(65, seed + 1)
    rng = np.random.default_rng(seed)
    if duplicated:
        items = items[torch.from_numpy(rng.integers(0, 9, 65))]
    exclude = Ragged.of_lists([rng.integers(1, 65, 20) for _ in range(4)]) if filtered else None
    only = Ragged.of_lists([rng.integers(1, 65, 30) for _ in range(4)]) if filtered else None
    results = [
        MolIndex.build(mixture, items, cut=cut).search(queries, k, exclude=exclude, only=only)
        for cut in (None, EVERYTHING)
    ]
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=1e-5)
    if duplicated or not filtered:
        assert torch.equal(results[0][0], results[1][0])


def test_of_equal_items_the_lower_number_comes_first() -> None:
    mixture, items = gated_mixture(), normal(30, 2)[torch.arange(300) % 30]
    for cut in (None, EVERYTHING):
        answers, scores = MolIndex.build(mixture, items, cut=cut).search(normal(5, 1), 40)
        for numbers, values in zip(answers.tolist(), scores.tolist(), strict=True):
            for begin in range(0, 40, 10):  # each item ten times, but for padding's nine
                assert len(set(values[begin : begin + 9])) == 1
            assert numbers == [n for _, n in sorted(zip((-v for v in values), numbers, strict=True))]


def test_a_cut_costs_little_recall_and_scores_few_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """5,000 items, noisy copies of a hundred; at least 95 % of the best ten are in the tenth that is scored."""
    mixture, queries = gated_mixture(), normal(40, 1)
    items = normal(100, 3)[torch.arange(5001) % 100] + 0.1 * normal(5001, 2)
    index, sizes, score = MolIndex.build(mixture, items, cut=Cut(averaged=500)), [], Mixture.score
    assert index.groups is not None
    groups = index.groups.sizes

    def spy(self: Mixture, queries: Side, items: Side) -> Tensor:
        sizes.append(len(items.gate))
        return score(self, queries, items)

    monkeypatch.setattr(Mixture, "score", spy)
    answers, scores = index.search(queries, 10)
    assert sizes[::2] == [len(groups)] * 40 and len(groups) <= 8 * 71
    assert min(sizes[1::2]) >= 500 and max(sizes[1::2]) < 500 + groups.max()
    monkeypatch.undo()
    expected = best_of_all(mixture, queries, items, 10)
    assert (answers[:, :, None] == expected[:, None]).any(2).double().mean() >= 0.95
    own = mixture.score(mixture.side(queries), mixture.side(items)).gather(1, answers)
    torch.testing.assert_close(scores, own, rtol=0, atol=1e-5)


@pytest.mark.parametrize("by", ["exclude", "only"])
def test_excluded_items_cost_no_candidates(by: str) -> None:
    """The best group is excluded, and the next is scored instead."""
    mixture, query, items = gated_mixture(), normal(1, 1), normal(401, 2)
    whole = MolIndex.build(mixture, items)
    groups = Groups(np.arange(400) % 8, whole.items)
    index = MolIndex(mixture, whole.items, whole.numbers, n_items=400, cut=Cut(averaged=50), groups=groups)
    first, second = mixture.score(mixture.side(query), groups.centres)[0].argsort(descending=True)[:2].tolist()
    numbers = np.arange(1, 401)
    in_first, in_second = (numbers[groups.owners == group] for group in (first, second))
    assert set(index.search(query, 50)[0][0].tolist()) == set(in_first.tolist())
    if by == "exclude":
        answers, _ = index.search(query, 50, exclude=Ragged.of_lists([in_first]))
    else:
        answers, _ = index.search(query, 50, only=np.setdiff1d(numbers, in_first))
    assert set(answers[0].tolist()) == set(in_second.tolist())


def test_equal_items_have_equal_scores_in_any_row() -> None:
    """Also in an incomplete last tile."""
    mixture, query = gated_mixture(), normal(3, 1)
    for copies in (1, 3, 17, mol_model.TILE_PAIRS + 1, mol_model.TILE_PAIRS + 3):
        items = normal(1, 2).expand(copies + 1, -1)
        for index in (MolIndex.build(mixture, items), MolIndex.build(mixture, items, cut=EVERYTHING)):
            answers, scores = index.search(query, copies)
            assert answers.tolist() == [list(range(1, copies + 1))] * 3
            assert (scores == scores[:, :1]).all()


def test_the_model_can_continue_training() -> None:
    """An index has its own copy of the mixture, which stays unchanged."""
    mixture = Mixture(query_parts=4, item_parts=4, part_width=8, gate_hidden=16, gate_dropout=0.5).train()
    set_generator(mixture, torch.Generator().manual_seed(1))
    index = MolIndex.build(mixture, normal(30, 1))
    before = index.search(normal(2, 2), 5)
    assert mixture.training and all(weight.requires_grad for weight in mixture.parameters())
    with torch.no_grad():
        for weight in mixture.parameters():
            weight.add_(1)
    for one, other in zip(before, index.search(normal(2, 2), 5), strict=True):
        assert torch.equal(one, other)


# --- groups -------------------------------------------------------------------------------------------------------


def test_groups_separate_distant_items() -> None:
    centres = torch.tensor([[0.0, 0.0], [9.0, 0.0], [0.0, 9.0]])
    vectors = centres[torch.arange(300) % 3] + 0.1 * torch.randn(300, 2, generator=torch.Generator().manual_seed(1))
    owners = group_vectors(vectors, 12)
    assert owners.shape == (300,) and owners.max() < 12
    assert not any(set(owners[i::3].tolist()) & set(owners[j::3].tolist()) for i, j in ((0, 1), (0, 2), (1, 2)))
    assert torch.equal(group_vectors(vectors, 12), owners), "deterministic"
    assert group_vectors(vectors[:2], 12).tolist() in ([0, 1], [1, 0])
    assert len(group_vectors(vectors[:0], 12)) == 0


def test_a_group_is_the_mean_of_its_items() -> None:
    items = Side(torch.arange(24.0).view(4, 2, 3), torch.arange(8.0).view(4, 2))
    groups = Groups(np.array([2, 0, 2, 2]), items)
    assert groups.sizes.tolist() == [1, 0, 3]
    torch.testing.assert_close(groups.centres.components[2], items.components[[0, 2, 3]].mean(0))
    torch.testing.assert_close(groups.centres.gate[[0, 2]], torch.stack((items.gate[1], items.gate[[0, 2, 3]].mean(0))))
    assert groups.members(np.array([2])).tolist() == [0, 2, 3] and groups.members(np.array([1, 0])).tolist() == [1]


# --- files and refusals -------------------------------------------------------------------------------------------


def test_selected_items_are_scored_in_small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int, int]] = []
    score = Mixture.score

    def spy(self: Mixture, queries: Side, items: Side) -> Tensor:
        sizes.append((len(queries.gate), len(items.gate)))
        return score(self, queries, items)

    monkeypatch.setattr(Mixture, "score", spy)
    monkeypatch.setattr(mol_index, "CHUNK", 60)
    index = MolIndex.build(gated_mixture(), normal(501, 1))
    index.search(normal(2, 2), 3)
    assert sizes == [(1, 500)] * 2, "without a copy, in tiles"
    sizes.clear()
    index.search(normal(2, 2), 3, only=np.arange(100, 250))
    assert sizes == [(1, 50)] * 6


@pytest.mark.parametrize("cut", [None, Cut(averaged=20)], ids=["exact", "two-stage"])
@pytest.mark.parametrize("gate_hidden", [0, 16])
def test_save_and_load(cut: Cut | None, gate_hidden: int, tmp_path: Path) -> None:
    mixture = Mixture(query_parts=4, item_parts=4, part_width=8, gate_hidden=gate_hidden)
    index = MolIndex.build(mixture, normal(60, 1), candidates=np.arange(60) % 3 > 0, cut=cut)
    index.save(tmp_path / "index.safetensors")
    before = torch.get_rng_state()
    loaded = load_index(tmp_path / "index.safetensors")
    assert torch.equal(torch.get_rng_state(), before)
    assert isinstance(loaded, MolIndex) and loaded.n_items == 59 and loaded.cut == cut
    (items, scores), (items_again, scores_again) = (one.search(normal(3, 2), 8) for one in (index, loaded))
    assert torch.equal(items, items_again)
    torch.testing.assert_close(scores, scores_again, rtol=0, atol=1e-5)  # bits depend on memory alignment
    loaded.save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "index.safetensors").read_bytes()


def test_numbers_that_are_not_finite_are_refused() -> None:
    items = normal(5, 1)
    queries: Any = items[:1].clone()
    queries[0, 3] = float("inf")
    with pytest.raises(FolderError, match="not finite"):
        MolIndex.build(gated_mixture(), items).search(queries, 1)
    items[2, 1] = float("nan")
    with pytest.raises(FolderError, match="not finite"):
        MolIndex.build(gated_mixture(), items)
