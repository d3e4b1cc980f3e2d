from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_logs import histories_of, ranks

from segue.errors import TrainingError
from segue.evaluation.ranks import MISS, Exclusions


def one(*scores: float) -> torch.Tensor:
    """One query's scores; the padding's comes first and is absurd, because it must not matter."""
    return torch.tensor([[99.0, *scores]])


def rank_of(scores: torch.Tensor, target: int, seen: list[int] | None = None, known: list[bool] | None = None) -> int:
    excluded = None if seen is None else Exclusions(np.zeros(len(seen), dtype=np.int64), np.array(seen, dtype=np.int64))
    mask = None if known is None else np.array([False, *known])
    return int(ranks(scores, np.array([target]), excluded, known=mask)[0])


def test_ties_count_against_the_target() -> None:
    assert rank_of(one(0.9, 0.7, 0.7, 0.7, 0.2), 3) == 4  # G10: 2 optimistic, 3 expected, 4 pessimistic


def test_seen_items_are_no_candidates() -> None:
    assert rank_of(one(0.9, 0.8, 0.7, 0.6, 0.5), 4, seen=[1, 3]) == 2  # G44
    assert rank_of(one(0.9, 0.8, 0.7, 0.6, 0.5), 4, seen=[1, 3, 1, 1]) == 2  # a history repeats itself


def test_a_constant_scorer_ranks_last_among_unseen_items() -> None:
    assert rank_of(one(*[0.5] * 20), 7) == 20
    assert rank_of(one(*[0.5] * 20), 7, seen=[1, 2, 2, 20]) == 17


def test_items_unseen_in_training_are_no_candidates() -> None:
    assert rank_of(one(0.9, 0.8, 0.7), 3, known=[True, True, True]) == 3
    assert rank_of(one(0.9, 0.8, 0.7), 3, known=[True, False, True]) == 2


def test_a_target_that_is_no_candidate_is_a_miss() -> None:
    assert rank_of(one(0.9, 0.8, 0.7), 1, seen=[1]) == MISS
    assert rank_of(one(0.9, 0.8, 0.7), 1, known=[False, True, True]) == MISS
    assert rank_of(one(0.9, 0.8, 0.7), 1, seen=[1, 2, 3]) == MISS


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_scores_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(TrainingError, match=r"1 of 6 scores are not finite .*learning_rate"):
        ranks(torch.tensor([[0.0, 1.0, 2.0, 3.0], [0.0, 1.0, bad, 3.0]]), np.array([1, 1]))


def test_the_score_of_padding_may_be_anything() -> None:
    scores = torch.tensor([[float("nan"), 1.0, 2.0]])
    assert ranks(scores, np.array([1])).tolist() == [2]


def test_the_scores_argument_is_unchanged() -> None:
    scores = one(0.9, 0.8, 0.7)
    before = scores.clone()
    rank_of(scores, 3, seen=[1])
    assert torch.equal(scores, before)
    row = torch.tensor([9.0, 0.9, 0.8, 0.7]).expand(2, -1)  # one row in memory for both
    seen = Exclusions(rows=np.array([0]), items=np.array([1]))
    assert ranks(row, np.array([3, 3]), seen).tolist() == [2, 3]


def test_an_empty_batch_has_no_ranks() -> None:
    assert ranks(torch.zeros(0, 4), np.zeros(0, dtype=np.int64)).shape == (0,)


def test_exclusions_of_histories_hold_every_item_of_its_own_row() -> None:
    seen = Exclusions.of_histories(histories_of([5, 6, 5], [7]))
    assert seen.rows.tolist() == [0, 0, 0, 1]
    assert seen.items.tolist() == [5, 6, 5, 7]


queries = st.integers(2, 12).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(-3, 3), min_size=n, max_size=n),  # few values, so that there are ties
        st.integers(1, n),
        st.lists(st.integers(1, n), max_size=n),
        st.lists(st.booleans(), min_size=n, max_size=n),
    )
)


@given(queries)
def test_counting_equals_sorting(query: tuple[list[int], int, list[int], list[bool]]) -> None:
    values, target, seen, known = query
    candidates = [item for item in range(1, len(values) + 1) if known[item - 1] and item not in seen]
    # the target last among equals
    worst_first = sorted(candidates, key=lambda item: (-values[item - 1], item == target))
    expected = worst_first.index(target) + 1 if target in candidates else MISS
    assert rank_of(one(*values), target, seen, known) == expected


@given(queries, st.randoms(use_true_random=False))
def test_neither_scale_nor_the_numbering_of_items_matters(
    query: tuple[list[int], int, list[int], list[bool]], random: object
) -> None:
    values, target, seen, known = query
    rank = rank_of(one(*values), target, seen, known)
    assert rank_of(one(*(3.0**value for value in values)), target, seen, known) == rank
    order = list(range(len(values)))
    random.shuffle(order)  # type: ignore[attr-defined]
    number = {old + 1: new + 1 for new, old in enumerate(order)}
    shuffled = one(*(values[old] for old in order))
    assert rank_of(shuffled, number[target], [number[item] for item in seen], [known[old] for old in order]) == rank
