"""Answers with counts: by hand, and those of evaluation against those of a Recommender."""

from __future__ import annotations

from math import log

import numpy as np
import pytest
import torch
from counted_logs import OF_TWO_USERS, ByHistory, assert_best, chain_log, sequences_of, untrained
from hypothesis import given, settings
from hypothesis import strategies as st
from small_counts import counts_of
from small_exports import recommender_of

from segue.counts.counts import Counts
from segue.counts.features import ItemCounts
from segue.evaluation.counted import CountedScorer
from segue.evaluation.evaluator import Evaluator, Scorer, top_items
from segue.evaluation.ranks import Exclusions
from segue.evaluation.settings import SeenRule
from segue.evaluation.split_log import SplitLog
from segue.recommend.recommender import Recommender
from segue.testing.cases import batch_of

N_ITEMS = 40


def by_hand() -> Counts:
    """Four items of two users each: 2 came after 1 once, 3 came after 2 three times, one user has both 1 and 4."""
    return counts_of(
        [2, 2, 2, 2], [{(1, 2): 1, (2, 3): 3}, {}, {}], {(1, 4): 1}, after_1=2.0, together=-3.0, newest=0.25
    )


# --- as a scorer --------------------------------------------------------------------------------------------------


def test_counts_are_added_to_the_scores_of_a_model() -> None:
    """After 1: 2 log 2 for item 2, and -3 · 1/2 for item 4; the newest item gets 1/4."""
    scorer = ByHistory(lambda history: 10.0 * np.arange(5) + len(history))
    scores = CountedScorer(scorer, by_hand()).scores(batch_of([1], [3, 1, 2], [3]))
    expected = [
        [1, 11.25, 21 + 2 * log(2), 31, 39.5],
        [3, 13, 23.25, 33 + 2 * log(4), 43 - 3 * 0.8 / 2],
        [1, 11, 21, 31.25, 41],
    ]
    assert scores.dtype == torch.float32
    np.testing.assert_allclose(scores.numpy(), expected, rtol=1e-6)


def test_the_scores_of_the_model_do_not_change() -> None:
    """Neither a tensor that the scorer keeps, nor one of inference mode."""

    class OneTensor:
        def __init__(self) -> None:
            with torch.inference_mode():
                self.tensor = torch.zeros(1, 5)

        def scores(self, histories: object) -> torch.Tensor:  # noqa: ARG002
            return self.tensor

    scorer = OneTensor()
    both = CountedScorer(scorer, by_hand())
    first, second = both.scores(batch_of([1])), both.scores(batch_of([1]))
    assert torch.equal(first, second) and not scorer.tensor.any() and first.any()


def test_ranks_with_counts() -> None:
    """The model prefers low numbers; counts put 2 behind 1, and 3 behind 2."""
    evaluator = Evaluator(sequences=sequences_of([1]), counts=np.array([0, 1, 1, 1, 1]), seen="excluded")
    scorer = ByHistory(lambda _: -np.arange(5.0))
    both = CountedScorer(scorer, by_hand())
    for history, alone, counted in (([1], [2, 3, 4], [2, 3, 4]), ([2], [1, 3, 4], [3, 1, 4]), ([4, 2], [1, 3], [3, 1])):
        batch = batch_of(history)
        seen = Exclusions.of_histories(batch)
        for one, expected in ((scorer, alone), (both, counted)):
            best = top_items(evaluator.scores(one, batch, seen), 4)
            assert [item for item in best[0].tolist() if item] == expected


# --- evaluation and recommendation --------------------------------------------------------------------------------


def learned(*, signs: int) -> tuple[SplitLog, Counts]:
    """A chain, its counts, and weights of both signs."""
    log = chain_log(5, users=50, n_items=N_ITEMS).log
    pairs = ItemCounts.of(log.sequences, log.split.train_end, N_ITEMS, OF_TWO_USERS)
    return log, Counts(pairs, tuple((signs * np.array([2.0, -0.5, 0.3, 1.5, 0.7, -0.4, -1.1])).tolist()))


def run_of(log: SplitLog, counts: Counts, seen: SeenRule) -> tuple[Recommender, Scorer, Evaluator]:
    """One untrained network as a run and as a scorer. Items 38 to 40 are unseen in training."""
    network, training = untrained(N_ITEMS, 4), log.training_counts.copy()
    training[38:] = 0
    run = recommender_of(network.model, counts=training[1:].tolist(), item_counts=counts, seen=seen)
    evaluator = Evaluator(sequences=log.sequences, counts=training, seen=seen)
    return run, CountedScorer(network, counts), evaluator


@pytest.mark.parametrize("signs", [1, -1])
@pytest.mark.parametrize("seen", ["excluded", "kept"])
@settings(max_examples=8)
@given(histories=st.lists(st.lists(st.integers(1, N_ITEMS), min_size=1, max_size=70), min_size=1, max_size=6))
def test_recommendations_are_the_best_items_of_evaluation(
    seen: SeenRule, signs: int, histories: list[list[int]]
) -> None:
    """Also for histories that are longer than the network reads, with unknown items and with nothing else."""
    run, scorer, evaluator = run_of(*learned(signs=signs), seen)
    batch = batch_of(*histories)
    scores = evaluator.scores(scorer, batch, Exclusions.of_histories(batch) if seen == "excluded" else None)
    answers = run.recommend_many([[f"i{item}" for item in history] for history in histories], k=7)
    for row, answer in enumerate(answers):
        assert_best(answer, [int(name[1:]) for name in answer.ids], scores[row].numpy(), 7)


def test_counts_change_most_answers() -> None:
    """So the test above compares what counts add, too."""
    log, counts = learned(signs=1)
    run, alone = run_of(log, counts, "kept")[0], recommender_of(untrained(N_ITEMS, 4).model, seen="kept")
    histories = [[f"i{item}"] for item in range(1, 38)]
    pairs = zip(run.recommend_many(histories, k=5), alone.recommend_many(histories, k=5), strict=True)
    assert sum(one.ids != other.ids for one, other in pairs) > 25


def test_a_new_event_changes_the_answer_at_once() -> None:
    """The network's scores are small beside the counts: each item's follower is the answer."""
    followers = {(item, item + 1): 5 for item in range(1, N_ITEMS)}
    counts = counts_of([9] * N_ITEMS, [followers, {}, {}], {}, after_1=100.0, newest=-100.0)
    run = recommender_of(untrained(N_ITEMS, 4).model, item_counts=counts, seen="kept")
    history: list[str] = []
    for item in (7, 3, 12, 3, 39):
        history.append(f"i{item}")
        assert run.recommend(history, k=1).ids == [f"i{item + 1}"]
        assert run.recommend([*history, "nobody"], k=1).ids == [f"i{item + 1}"]
    assert run.recommend(["i3", "i4"], k=1, keep_seen=False).ids == ["i5"]
    assert run.recommend(["i4", "i3"], k=1, exclude=["i4"]).ids != ["i4"]
