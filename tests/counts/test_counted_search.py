"""The best items by the model's score plus what counts add, for every kind of index, against a full sort of all items.

Weights have any sign, so the counts raise items from the end of the model's list and push its best ones down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_counts import Pairs, counts_of
from torch import Tensor
from torch.nn import functional

from segue.counts.counts import Counts
from segue.counts.features import FEATURES
from segue.index import approximate
from segue.index.approximate import ApproximateIndex
from segue.index.codes import CodeIndex
from segue.index.exact import ExactIndex
from segue.index.mol import Cut, MolIndex
from segue.index.search import BestItems, ItemIndex, Only, Ragged
from segue.models.similarity.mol import Mixture
from segue.recommend.rules import Rules
from segue.recommend.search import search_items
from segue.testing.cases import batch_of

PADDED = (0, float("-inf"))


@dataclass(frozen=True)
class Kind:
    """Makes an index whose scores are the inner products of vectors [V + 1, D] and encoded queries."""

    build: Callable[[np.ndarray, np.ndarray], ItemIndex]
    encode: Callable[[np.ndarray], Tensor] = torch.from_numpy


def exact_index(vectors: np.ndarray, candidates: np.ndarray) -> ItemIndex:
    return ExactIndex.build(torch.from_numpy(vectors), candidates=candidates, chunk=16)


def approximate_index(recall: float) -> Callable[[np.ndarray, np.ndarray], ItemIndex]:
    def build(vectors: np.ndarray, candidates: np.ndarray) -> ItemIndex:
        return ApproximateIndex.build(torch.from_numpy(vectors), candidates=candidates, least_recall=recall)

    return build


def one_gate(vectors: np.ndarray) -> Tensor:
    """A mixture of one component is an inner product, whatever its gate."""
    return torch.from_numpy(np.concatenate((vectors, np.ones((len(vectors), 1), dtype=np.float32)), axis=1))


def mol_index(cut: Cut | None) -> Callable[[np.ndarray, np.ndarray], ItemIndex]:
    def build(vectors: np.ndarray, candidates: np.ndarray) -> ItemIndex:
        mixture = Mixture(query_parts=1, item_parts=1, part_width=vectors.shape[1], gate_hidden=0)
        return MolIndex.build(mixture, one_gate(vectors), candidates=candidates, cut=cut)

    return build


def code_index(vectors: np.ndarray, candidates: np.ndarray) -> ItemIndex:
    """A part for each feature, with all of its values."""
    values = [np.unique(column) for column in vectors.T]
    centroids = np.zeros((len(values), max(map(len, values)), 1), dtype=np.float32)
    for part, own in zip(centroids, values, strict=True):
        part[: len(own), 0] = own
    codes = [np.searchsorted(own, column) for own, column in zip(values, vectors.T, strict=True)]
    coded = torch.from_numpy(np.stack(codes, axis=1).astype(np.uint8))
    return CodeIndex.build(torch.from_numpy(centroids), coded, candidates=candidates)


class HalfBlind:
    """An approximate index that misses every odd item, even the best one, unless too few others remain."""

    def __init__(self, vectors: np.ndarray, candidates: np.ndarray) -> None:
        self.whole = exact_index(vectors, candidates)
        self.even = exact_index(vectors, candidates & (np.arange(len(vectors)) % 2 == 0))
        self.n_items = self.whole.n_items

    def search(self, queries: Tensor, k: int, *, exclude: Ragged | None = None, only: Only = None) -> BestItems:
        everything = self.whole.search(queries, k, exclude=exclude, only=only)
        if isinstance(only, Ragged):
            return everything
        some = self.even.search(queries, k, exclude=exclude, only=only)
        missing = everything[0].shape[1] - some[0].shape[1]
        items = functional.pad(some[0], (0, missing))
        scores = functional.pad(some[1], (0, missing), value=-torch.inf)
        short = (scores > -torch.inf).sum(dim=1) < (everything[1] > -torch.inf).sum(dim=1)
        items[short], scores[short] = everything[0][short], everything[1][short]
        return items, scores

    def with_items(self, vectors: Tensor, numbers: np.ndarray, *, n_items: int) -> ItemIndex:
        raise NotImplementedError

    def save(self, path: Path) -> None:
        raise NotImplementedError


EXACT = {"exact": Kind(exact_index), "codes": Kind(code_index), "mol": Kind(mol_index(None), one_gate)}
APPROXIMATE = {
    "approximate": Kind(approximate_index(1.0)),
    "approximate, one list": Kind(approximate_index(0.001)),
    "mol, two-stage": Kind(mol_index(Cut(averaged=3)), one_gate),
    "half-blind": Kind(HalfBlind),
}
exact_kind = pytest.mark.parametrize("kind", EXACT.values(), ids=EXACT.keys())
approximate_kind = pytest.mark.parametrize("kind", APPROXIMATE.values(), ids=APPROXIMATE.keys())
every_kind = pytest.mark.parametrize("kind", [*EXACT.values(), *APPROXIMATE.values()], ids=[*EXACT, *APPROXIMATE])


@pytest.fixture(autouse=True, scope="module")
def approximate_small_catalogues() -> Iterator[None]:
    """Small catalogues are searched like large ones, with few spare candidates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(approximate, "LEAST_ITEMS", 0)
        patch.setattr(approximate, "SPARE", 1.0)
        patch.setattr(approximate, "STEP", 2)
        yield


@dataclass(frozen=True, eq=False)
class Request:
    """A query's score of an item is an inner product of small whole numbers: exact, with many ties."""

    vectors: np.ndarray  # [V + 1, D]
    queries: np.ndarray  # [B, D]
    candidates: np.ndarray  # [V + 1] bool
    histories: list[list[int]]
    rules: list[Rules]
    keep_seen: bool
    counts: Counts

    def answers(self, kind: Kind, counts: Counts | None) -> list[list[tuple[int, float]]]:
        """Each query's (item, score) pairs without the padding, which may only stand at the end."""
        index, queries = kind.build(self.vectors, self.candidates), kind.encode(self.queries)
        items, scores = search_items(
            index, queries, batch_of(*self.histories), self.rules, keep_seen=self.keep_seen, counts=counts
        )
        assert items.dtype == np.int64 and scores.dtype == np.float32
        rows = [[*zip(*row, strict=True)] for row in zip(items.tolist(), scores.tolist(), strict=True)]
        valid = [[pair for pair in row if pair != PADDED] for row in rows]
        assert rows == [pairs + [PADDED] * (len(row) - len(pairs)) for row, pairs in zip(rows, valid, strict=True)]
        return valid

    def additions(self, row: int) -> dict[int, np.float32]:
        """What the counts add after one history."""
        added = self.counts.added(batch_of(self.histories[row]))
        return dict(zip(added.items.tolist(), added.values, strict=True))

    def allowed(self, row: int) -> set[int]:
        """The items that the rules leave."""
        rule = self.rules[row]
        keep = self.keep_seen if rule.keep_seen is None else rule.keep_seen
        only = set(range(1, len(self.vectors)) if rule.only is None else rule.only.tolist())
        forbidden = set(rule.exclude.tolist()) | (set() if keep else set(self.histories[row]))
        return {item for item in only - forbidden if self.candidates[item]}

    def expected(self, row: int) -> list[tuple[int, float]]:
        """All allowed items by score, then by number."""
        products, added = self.vectors @ self.queries[row], self.additions(row)
        scores = {item: float(products[item] + added.get(item, np.float32(0))) for item in self.allowed(row)}
        return sorted(scores.items(), key=lambda pair: (-pair[1], pair[0]))


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """Some items have no counts; some neighbours are no candidates; `only` may be shared or differ."""
    n_items, n_queries = draw(st.integers(1, 40) | st.integers(100, 200)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    most = draw(st.sampled_from([0, 2, 9]))  # the fewer values, the more ties

    def numbers(size: int) -> np.ndarray:
        return rng.integers(1, n_items + 1, size)

    counted, edges = draw(st.integers(1, n_items)), draw(st.sampled_from([0, 30, 2 * n_items]))

    def pairs() -> Pairs:
        keys = rng.integers(1, counted + 1, (edges, 2)).tolist()
        return {(one, other): int(rng.integers(1, 5)) for one, other in keys}

    signs = [-3.0, -1.0, 0.0, 0.5, 2.0]
    weights = {name.replace("-", "_"): draw(st.sampled_from(signs)) for name in FEATURES}
    pool = [None, numbers(n_items), numbers(n_items // 2), numbers(0)]
    onlys = draw(st.sampled_from([pool[:1], pool[1:2], pool]))
    rules = [
        Rules(
            k=int(rng.integers(1, 12)) if draw(st.booleans()) else 300,
            keep_seen=draw(st.sampled_from([None, True, False])),
            exclude=numbers(int(rng.integers(0, 1 + draw(st.sampled_from([0, n_items]))))),
            only=onlys[int(rng.integers(0, len(onlys)))],
        )
        for _ in range(n_queries)
    ]
    width = int(rng.integers(1, 4))
    return Request(
        vectors=rng.integers(-most, most + 1, (n_items + 1, width)).astype(np.float32),
        queries=rng.integers(-most, most + 1, (n_queries, width)).astype(np.float32),
        candidates=rng.random(n_items + 1) < draw(st.sampled_from([1.0, 0.7])),
        histories=[numbers(int(rng.integers(1, 8))).tolist() for _ in range(n_queries)],
        rules=rules,
        keep_seen=draw(st.booleans()),
        counts=counts_of([1] * counted, [pairs() for _ in range(3)], pairs(), **weights),
    )


# --- laws ---------------------------------------------------------------------------------------------------------


@exact_kind
@settings(max_examples=20)
@given(request=requests())
def test_a_search_with_counts_is_a_full_sort(kind: Kind, request: Request) -> None:
    for row, answer in enumerate(request.answers(kind, request.counts)):
        assert answer == request.expected(row)[: request.rules[row].k]


@approximate_kind
@settings(max_examples=12)
@given(request=requests())
def test_an_approximate_search_misses_no_item_that_counts_reach(kind: Kind, request: Request) -> None:
    """Its scores are exact, too, and an answer has k items whenever k remain."""
    for row, answer in enumerate(request.answers(kind, request.counts)):
        everything, k = request.expected(row), request.rules[row].k
        assert set(answer) <= set(everything)
        assert answer == sorted(set(answer), key=lambda pair: (-pair[1], pair[0]))
        assert len(answer) == min(k, len(everything))
        reached = request.additions(row)
        assert {pair for pair in everything[:k] if pair[0] in reached} <= set(answer)
        if len(everything) <= k:
            assert answer == everything


@every_kind
@settings(max_examples=6)
@given(request=requests())
def test_weights_of_zero_are_the_model_alone(kind: Kind, request: Request) -> None:
    nothing = Counts(request.counts.pairs, (0.0,) * len(FEATURES))
    assert request.answers(kind, nothing) == request.answers(kind, None)


@pytest.mark.parametrize("kind", [EXACT["exact"], APPROXIMATE["approximate"]], ids=["exact", "approximate"])
@pytest.mark.parametrize("k", [1, 30, 150])
def test_copies_of_an_item_with_equal_counts_have_one_score(kind: Kind, k: int) -> None:
    """However their scores are computed: of 300 equal vectors, every third one came after item 1."""
    rng = np.random.default_rng(k)
    vectors = np.repeat(rng.standard_normal((1, 50)).astype(np.float32), 301, axis=0)
    queries = torch.from_numpy(rng.standard_normal((3, 50)).astype(np.float32))
    raised = [*range(3, 301, 3)]
    counts = counts_of([1] * 300, [{(1, item): 4 for item in raised}, {}, {}], {}, after_1=1.0)
    index, rules = kind.build(vectors, np.ones(301, dtype=bool)), [Rules(k=k)] * 3
    items, scores = search_items(index, queries, batch_of([1], [1], [2]), rules, keep_seen=True, counts=counts)
    others = [item for item in range(1, 301) if item % 3]
    assert items.tolist() == [[*raised, *others][:k]] * 2 + [[*range(1, k + 1)]]
    assert [len(np.unique(row)) for row in scores] == [1 + (k > 100), 1 + (k > 100), 1]


# --- by hand ------------------------------------------------------------------------------------------------------


def line(*, k: int, counts: Counts, keep_seen: bool = True, only: list[int] | None = None) -> Request:
    """Of a hundred items, item n has the score -n; the history is item 1."""
    return Request(
        vectors=-np.arange(101, dtype=np.float32)[:, None],
        queries=np.ones((1, 1), dtype=np.float32),
        candidates=np.ones(101, dtype=bool),
        histories=[[1]],
        rules=[Rules(k=k, only=None if only is None else np.array(only))],
        keep_seen=keep_seen,
        counts=counts,
    )


def cosines(pairs: Pairs, weight: float) -> Counts:
    """Every item has one user, so a cosine is the count of its pair."""
    return counts_of([1] * 100, [{}, {}, {}], pairs, together=weight)


@every_kind
def test_the_last_items_of_the_model_can_be_the_first(kind: Kind) -> None:
    request = line(k=2, counts=cosines({(1, 99): 50, (1, 100): 51}, 2.0))
    assert request.answers(kind, request.counts) == [[(100, 2.0), (99, 1.0)]]


@exact_kind
def test_the_models_best_items_can_be_pushed_behind_all_others(kind: Kind) -> None:
    """Many more than k are pushed down, so the model's best ones hold none of the answer."""
    request = line(k=3, counts=cosines({(1, item): 100 for item in range(1, 61)}, -1.0))
    assert request.answers(kind, request.counts) == [[(61, -61.0), (62, -62.0), (63, -63.0)]]


@every_kind
def test_equal_sums_come_by_number(kind: Kind) -> None:
    """The sums of the items 3, 50 and 100, and the score of item 2 alone, are -2."""
    request = line(k=4, counts=cosines({(1, 100): 98, (1, 50): 48, (1, 3): 1}, 1.0), keep_seen=False)
    assert request.answers(kind, request.counts) == [[(2, -2.0), (3, -2.0), (50, -2.0), (100, -2.0)]]


@every_kind
def test_an_item_that_just_reaches_the_best_one_comes_before_it(kind: Kind) -> None:
    """Item 50 has the score 2, all others 0; counts add 2 to item 40."""
    request = line(k=1, counts=cosines({(1, 40): 2}, 1.0))
    scores = 2.0 * (np.arange(101) == 50)
    assert replace(request, vectors=scores[:, None].astype(np.float32)).answers(kind, request.counts) == [[(40, 2.0)]]


@every_kind
def test_counts_bring_back_no_item_that_the_rules_forbid(kind: Kind) -> None:
    """Item 1 is seen, and 6 is not allowed."""
    counts = cosines({(1, 1): 200, (1, 6): 200, (1, 99): 95}, 1.0)
    request = line(k=9, counts=counts, keep_seen=False, only=[5, 99, 1])
    assert request.answers(kind, counts) == [[(99, -4.0), (5, -5.0)]]
