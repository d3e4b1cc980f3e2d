"""Weights of counts: what they may see, and logs of which the best possible answers are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from counted_logs import (
    ByHistory,
    PlantedLog,
    Rule,
    chain_log,
    commonest_item,
    divided_log,
    newest_item,
    pairs_of,
    random_log,
    repeats_log,
    sequences_of,
    sums_log,
    third_newest_item,
    untrained,
)

from segue.counts.features import FEATURES, GAP, LAST, REPEATED
from segue.data.sequences import Sequences
from segue.data.split import SplitPart
from segue.evaluation.metrics import ndcg

CLOSE = 0.02
"""The most that ndcg@10 may be below the best possible one."""


def permuted(planted: PlantedLog, part: SplitPart, *, users: int) -> PlantedLog:
    """The same log with the targets of one part permuted among the first users."""
    rows = planted.log.split.cases(part).targets[:users]
    items = planted.sequences.items.copy()
    items[rows] = np.random.default_rng(2).permutation(items[rows])
    assert (items != planted.sequences.items).sum() > users / 2
    return replace(planted, sequences=replace(planted.sequences, items=items))


# --- what weights may see -----------------------------------------------------------------------------------------


def test_permuted_test_items_change_nothing() -> None:
    planted, network = chain_log(1, users=60), untrained(40, 1)
    fitted, again = planted.fitted(network), permuted(planted, "test", users=60).fitted(network)
    assert fitted.helpful.to_bytes() == again.helpful.to_bytes()
    assert (fitted.without, fitted.with_counts) == (again.without, again.with_counts)


def test_permuted_validation_items_change_weights_and_no_pair() -> None:
    planted, network = chain_log(1, users=60), untrained(40, 1)
    fitted, again = planted.fitted(network).helpful, permuted(planted, "valid", users=15).fitted(network).helpful
    arrays, others = fitted.arrays(), again.arrays()
    assert all(np.array_equal(arrays[name], others[name]) for name in arrays)
    assert fitted.weights != again.weights


def test_a_pair_of_a_single_user_is_in_no_fitted_counts() -> None:
    """One user of a chain has the items 41 and 42, again and again."""
    planted = chain_log(1, users=60)
    secret = Sequences(
        offsets=np.append(planted.sequences.offsets, len(planted.sequences.items) + 40),
        items=np.append(planted.sequences.items, np.tile([41, 42], 20).astype(np.int32)),
        times=np.append(planted.sequences.times, np.arange(40)),
    )
    pairs = replace(planted, sequences=secret, n_items=42).fitted(untrained(42, 1)).helpful.pairs
    for matrix in (*pairs.followers, pairs.companions):
        assert pairs_of(matrix)
        assert not any({41, 42} & set(pair) for pair in pairs_of(matrix))


# --- what is reported and left out --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["chain", "repeats"])
def test_the_worth_of_counts_is_about_what_evaluation_measures(kind: str) -> None:
    """On validation: exactly without the counts; with them, each half of the users has the other half's weights. Of the
    720 items of the repeats, most are no candidates of a case."""
    planted = chain_log(3) if kind == "chain" else repeats_log(newest_item, 3, shared=False, users=120)
    network, cases = untrained(planted.n_items, 3), planted.log.split.cases("valid")
    fitted = planted.fitted(network)
    scorers = (network, fitted.added_to(network))
    without, with_counts = (float(ndcg(planted.evaluator.ranks(scorer, cases), 10).mean()) for scorer in scorers)
    assert fitted.without == pytest.approx(without, abs=1e-9)
    assert fitted.with_counts == pytest.approx(with_counts, abs=0.02)
    assert with_counts > without + 0.5


def test_repeats_have_no_weight_if_seen_items_are_excluded() -> None:
    """If seen items are kept, every feature has one."""
    planted = repeats_log(third_newest_item, 1, shared=True, users=150)
    chain = replace(chain_log(1, users=150), seen="excluded")
    assert planted.fitted(untrained(planted.n_items, 1)).helpful.used == frozenset(range(len(FEATURES)))
    excluding = chain.fitted(untrained(chain.n_items, 1)).helpful
    assert [excluding.weights[feature] for feature in (REPEATED, GAP, LAST)] == [0.0, 0.0, 0.0]
    assert excluding.used == {0, 1, 2, 3}


def test_targets_that_nothing_can_recommend_are_misses() -> None:
    """Item 9 is unseen in training: of three validation targets, two are known."""
    sequences = sequences_of([1, 2, 1, 2, 9, 1], [1, 2, 1, 2, 1, 9], [2, 1, 2, 1, 2, 1])
    scorer = ByHistory(lambda history: np.arange(10.0) == 3 - history[-1])
    fitted = PlantedLog(sequences, 9, scorer).fitted(scorer)
    assert fitted.counts is None and fitted.without == pytest.approx(2 / 3)


@pytest.mark.parametrize("target", [2, 9], ids=["known", "unknown"])
def test_a_single_validation_case_gives_no_counts(target: int) -> None:
    """There is nobody else whom weights could be fitted on."""
    sequences = sequences_of([1, 2], [1, 2], [1, 2, 1, target, 1])
    assert PlantedLog(sequences, 9, untrained(9, 1)).fitted(untrained(9, 1)).counts is None


# --- planted logs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2])
def test_a_chain_beside_a_random_network(seed: int) -> None:
    planted = chain_log(seed)
    network, best = untrained(planted.n_items, seed), planted.value(planted.best)
    assert 0.7 < best < 0.9 and planted.value(network) < 0.25
    assert planted.value(planted.fitted(network).added_to(network)) > best - CLOSE


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("rule", "shared"), [(newest_item, False), (commonest_item, False), (third_newest_item, True)])
def test_a_log_of_repeats_beside_a_random_network(rule: Rule, shared: bool, seed: int) -> None:
    """Without shared items no two users have a pair: only the features of repeats are left."""
    planted = repeats_log(rule, seed, shared=shared)
    network, best = untrained(planted.n_items, seed), planted.value(planted.best)
    assert 0.7 < best < 0.95 and planted.value(network) < best - 0.4
    counts = planted.fitted(network)
    assert planted.value(counts.added_to(network)) > best - CLOSE
    assert shared or counts.helpful.used == {REPEATED, GAP, LAST}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("noise", [1e-3, 1.25], ids=["sure", "unsure"])
def test_counts_that_know_nothing_do_no_harm(noise: float, seed: int) -> None:
    """Whether they are left out or get small weights."""
    planted = sums_log(seed, share=0.8, noise=noise)
    alone = planted.value(planted.best)
    assert 0.5 < alone < 0.9
    assert planted.value(planted.fitted(planted.best).added_to(planted.best)) > alone - CLOSE


@pytest.mark.parametrize("seed", [1, 2])
def test_counts_that_cannot_help_are_left_out(seed: int) -> None:
    """The model's best item is always right, by the least margin."""
    planted = sums_log(seed, share=1.0, noise=0.999)
    fitted = planted.fitted(planted.best)
    assert planted.value(planted.best) == fitted.without == 1
    assert fitted.counts is None


def test_weights_follow_the_scale_of_the_models_scores() -> None:
    """A model that knows one half beside counts that know the other, with scores of any size."""
    planted, scorer = divided_log(1)
    factors = [0.1, 1.0, 10.0]
    scaled = [ByHistory(scorer.of_one, factor=factor) for factor in factors]
    fitted = [planted.fitted(one) for one in scaled]
    values = [planted.value(one.added_to(own)) for one, own in zip(fitted, scaled, strict=True)]
    assert planted.value(scorer) + 0.15 < min(values) and max(values) < min(values) + CLOSE
    transitions = [one.helpful.weights[0] / factor for one, factor in zip(fitted, factors, strict=True)]
    assert transitions == pytest.approx([transitions[1]] * 3, rel=0.2)


def test_counts_of_random_logs_are_left_out() -> None:
    """Weights fit the cases that they are fitted on, even if there is nothing to learn. One of six random logs gains
    more than a standard error by chance."""
    logs = [random_log(seed) for seed in range(10)]
    fitted = [planted.fitted(planted.best) for planted in logs]
    assert sum(one.counts is not None for one in fitted) <= 4
    assert np.mean([one.with_counts - one.without for one in fitted]) < CLOSE
