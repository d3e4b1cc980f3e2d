"""The expected answers of every index by a full sort, and hard cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from segue.index.search import ItemIndex, Ragged

PADDED = (0, float("-inf"))


@dataclass(frozen=True)
class Case:
    """A query's score of an item is an inner product of small whole numbers: exact, with many ties."""

    vectors: np.ndarray  # [V + 1, D]
    queries: np.ndarray  # [B, D]
    k: int
    candidates: np.ndarray  # [V + 1] bool
    exclude: list[list[int]] | None  # one list per query
    only: list[int] | None  # for all queries
    only_each: list[list[int]] | None  # one list per query

    @property
    def only_argument(self) -> np.ndarray | Ragged | None:
        if self.only_each is not None:
            return Ragged.of_lists(self.only_each)
        return None if self.only is None else np.array(self.only, dtype=np.int64)

    def expected(self, row: int) -> list[tuple[int, float]]:
        """The allowed items of a query with their scores, by score descending, then by number."""
        only = self.only if self.only_each is None else self.only_each[row]
        eligible = {number for number in range(1, len(self.vectors)) if self.candidates[number]}
        numbers = eligible - set([] if self.exclude is None else self.exclude[row])
        allowed = numbers if only is None else numbers & set(only)
        scored = sorted((-float(self.vectors[number] @ self.queries[row]), number) for number in allowed)
        return [(number, -negative) for negative, number in scored[: self.k]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    n_items, width, n_queries = draw(st.integers(1, 40)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    most = draw(st.sampled_from([0, 1, 2, 50]))  # the fewer values, the more ties
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    numbers = st.lists(st.integers(0, n_items + 3), max_size=n_items)
    each = st.lists(numbers, min_size=n_queries, max_size=n_queries)
    which = draw(st.sampled_from(["none", "all", "each"]))
    return Case(
        vectors=rng.integers(-most, most + 1, (n_items + 1, width)).astype(np.float32),
        queries=rng.integers(-most, most + 1, (n_queries, width)).astype(np.float32),
        k=draw(st.integers(1, 50)),
        candidates=rng.random(n_items + 1) < draw(st.sampled_from([1.0, 0.5])),
        exclude=draw(st.none() | each),
        only=draw(numbers) if which == "all" else None,
        only_each=draw(each) if which == "each" else None,
    )


def assert_sorted_answers(index: ItemIndex, queries: Tensor, case: Case) -> None:
    """`queries` are the case's, as the index takes them. There are k answers whenever k items remain."""
    exclude = None if case.exclude is None else Ragged.of_lists(case.exclude)
    items, scores = index.search(queries, case.k, exclude=exclude, only=case.only_argument)
    assert (items.dtype, scores.dtype) == (torch.int64, torch.float32)
    assert items.shape == scores.shape and items.shape[1] <= case.k
    for row in range(len(queries)):
        answers = list(zip(items[row].tolist(), scores[row].tolist(), strict=True))
        valid = [pair for pair in answers if pair != PADDED]
        assert answers == valid + [PADDED] * (len(answers) - len(valid)), "padding only at the end"
        assert valid == case.expected(row)


def assert_edge_cases(build: Callable[[np.ndarray], tuple[ItemIndex, Tensor]]) -> None:
    """k above the number of items, nothing allowed, everything excluded, no query; `build` gives an index of three
    equal items and one query."""
    index, query = build(np.ones((4, 2), dtype=np.float32))
    items, scores = index.search(query, 100)
    assert items.tolist() == [[1, 2, 3]] and scores.shape == (1, 3) and index.n_items == 3
    items, scores = index.search(torch.cat((query, query)), 5, only=np.array([], dtype=np.int64))
    assert items.shape == scores.shape == (2, 0)
    items, scores = index.search(query, 5, exclude=Ragged.of_lists([[1, 2, 3]]))
    assert items.tolist() == [[0, 0, 0]] and scores.tolist() == [[-float("inf")] * 3]
    items, scores = index.search(query[:0], 5)
    assert items.shape == scores.shape == (0, 3)
