"""A trained model, its log and item-to-item counts → the weight of each feature, fitted on validation.

A case is reduced to the candidates that can be among its best: the model's own best ones and those that counts reach.
The weights are those of a conditional logit: the likelihood of the targets among their candidates, where the model's
scores have a scale that is fitted too. It has one maximum. A search for the best ndcg@10 itself, one weight at a time,
scored higher on validation and lower on test. The counts are kept if the weights raise ndcg on validation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from segue.counts.counts import Counts
from segue.counts.features import FEATURES, GAP, LAST, REPEATED, ItemCounts
from segue.counts.neighbours import PairLimits
from segue.data.batch import Batch
from segue.data.split import Cases
from segue.evaluation.evaluator import Evaluator, Scorer
from segue.evaluation.metrics import ndcg
from segue.evaluation.ranks import Exclusions
from segue.evaluation.split_log import SplitLog

MOST_CASES = 3000  # validation cases that weights are fitted on
BEST = 200  # the model's best candidates of each case
DEPTHS = (10, 20, 50)
PENALTY = 1e-3  # on the squares of the weights, each in standard deviations of its feature
MOST_STEPS = 100


@dataclass(frozen=True, slots=True, eq=False)
class FittedCounts:
    """Counts with their weights, and what they were worth on validation."""

    counts: Counts | None
    """None if the weights did not help on cases that they were not fitted on."""
    without: float
    """ndcg@10 of the model alone, on the cases that weights were fitted on."""
    with_counts: float
    """ndcg@10 on the same cases, with the weights."""


def fit_counts(scorer: Scorer, log: SplitLog, cases: Cases, evaluator: Evaluator, limits: PairLimits) -> FittedCounts:
    """Fit the weights on validation `cases`; the counts are those of the training part."""
    pairs = ItemCounts.of(log.sequences, log.split.train_end, log.n_items, limits)
    repeats = frozenset((REPEATED, GAP, LAST))
    features = frozenset(range(len(FEATURES))) - (repeats if evaluator.seen == "excluded" else frozenset())
    packed = PackedCases.of(list(_candidates(scorer, evaluator, cases.spread(MOST_CASES), pairs, features)))
    weights, none = fit_weights(packed), np.zeros(len(FEATURES))
    helps = packed.value(weights) > packed.value(none)
    counts = Counts(pairs, tuple(weights.tolist())) if helps else None
    return FittedCounts(counts, packed.ndcg(none), packed.ndcg(weights))


@dataclass(frozen=True, slots=True, eq=False)
class _Candidates:
    """The candidates of one case, the target among them."""

    scores: np.ndarray  # [n] float32, of the model
    features: np.ndarray  # [n, F] float32
    target: int


def _candidates(
    scorer: Scorer, evaluator: Evaluator, cases: Cases, pairs: ItemCounts, features: frozenset[int]
) -> Iterator[_Candidates | None]:
    """The candidates of each case; None if the target is not among them."""
    targets = evaluator.sequences.items[cases.targets]
    for chosen, batch in evaluator.batches(cases):
        seen = Exclusions.of_histories(batch) if evaluator.seen == "excluded" else None
        scores = evaluator.scores(scorer, batch, seen).cpu().numpy()
        histories, some = evaluator.readable_part(batch)
        rows, items, values = _reached(histories, pairs, features)
        rows = np.flatnonzero(some)[rows]
        bounds = np.searchsorted(rows, np.arange(len(chosen) + 1))
        for row, case in enumerate(chosen.tolist()):
            own = slice(bounds[row], bounds[row + 1])
            yield _of_case(scores[row], int(targets[case]), items[own], values[own])


def _of_case(scores: np.ndarray, target: int, items: np.ndarray, values: np.ndarray) -> _Candidates | None:
    """The model's best items [V + 1], and the reached `items` [n] with the features `values` [n, F]."""
    most = min(BEST, len(scores))
    best = np.argpartition(-scores, most - 1)[:most]
    numbers = np.union1d(best, items)
    numbers = numbers[scores[numbers] > -np.inf]
    position = np.searchsorted(numbers, target)
    if position == len(numbers) or numbers[position] != target:
        return None
    features = np.zeros((len(numbers), len(FEATURES)), dtype=np.float32)
    inside = scores[items] > -np.inf
    features[np.searchsorted(numbers, items[inside])] = values[inside]
    return _Candidates(scores[numbers], features, int(position))


def _reached(
    histories: Batch, pairs: ItemCounts, features: frozenset[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The items that the counts reach, by history: rows [N], items [N] and features [N, F]."""
    terms, columns = pairs.terms(histories, features), len(pairs.users)
    keys = np.concatenate([term.rows * columns + term.items for term in terms])
    reached, index = np.unique(keys, return_inverse=True)
    values = np.zeros((len(reached), len(FEATURES)), dtype=np.float32)
    which = np.repeat([term.feature for term in terms], [len(term.rows) for term in terms])
    np.add.at(values, (index, which), np.concatenate([term.values for term in terms]))
    return reached // columns, reached % columns, values


@dataclass(frozen=True, slots=True, eq=False)
class PackedCases:
    """The candidates of many cases, one case after another."""

    scores: np.ndarray  # [N] float32
    features: np.ndarray  # [F, N] float32
    begins: np.ndarray  # [C]
    targets: np.ndarray  # [C]: rows of the targets
    cases: int
    """All cases, those included whose target is no candidate."""

    @staticmethod
    def of(cases: list[_Candidates | None]) -> PackedCases:
        some = [case for case in cases if case is not None]
        sizes = np.array([len(case.scores) for case in some], dtype=np.int64)
        begins = np.cumsum(sizes) - sizes
        none = np.zeros((0, len(FEATURES)), dtype=np.float32)
        return PackedCases(
            scores=np.concatenate([none[:, 0], *(case.scores for case in some)]),
            features=np.ascontiguousarray(np.concatenate([none, *(case.features for case in some)]).T),
            begins=begins,
            targets=begins + np.array([case.target for case in some], dtype=np.int64),
            cases=len(cases),
        )

    @property
    def owners(self) -> np.ndarray:
        """The case of each candidate [N]."""
        return np.repeat(np.arange(len(self.begins)), np.diff(np.append(self.begins, len(self.scores))))

    def total(self, weights: np.ndarray) -> np.ndarray:
        """The score of each candidate [N] float32."""
        total = self.scores.copy()
        for feature in np.flatnonzero(weights):
            total += self.features[feature] * np.float32(weights[feature])
        return total

    def ranks(self, weights: np.ndarray) -> np.ndarray:
        """The rank of each target among its candidates, which is its rank among all items if it is small."""
        total, owners = self.total(weights), self.owners
        return np.bincount(owners[total >= total[self.targets][owners]], minlength=len(self.begins))

    def ndcg(self, weights: np.ndarray) -> float:
        """ndcg@10 over all cases."""
        return float(ndcg(self.ranks(weights), 10).sum() / max(1, self.cases))

    def value(self, weights: np.ndarray) -> float:
        """The mean of ndcg at DEPTHS, which decides whether counts are kept: it varies less than ndcg@10 alone."""
        ranks = self.ranks(weights)
        return float(np.mean([ndcg(ranks, depth).sum() for depth in DEPTHS]) / max(1, self.cases))


def fit_weights(cases: PackedCases) -> np.ndarray:
    """The weight of each feature [F] in units of the model's scores; 0 for a feature that no candidate has."""
    weights = np.zeros(len(FEATURES))
    deviations = cases.features.std(axis=1, dtype=np.float64) if len(cases.scores) else weights
    some = np.flatnonzero(deviations)
    if not len(some):
        return weights
    features = torch.from_numpy(cases.features[some] / deviations[some, None]).float()  # [f, N]
    scores, owners = torch.from_numpy(cases.scores), torch.from_numpy(cases.owners)
    targets, empty = torch.from_numpy(cases.targets), torch.full((len(cases.begins),), -torch.inf)
    scale, slopes = torch.zeros(1, requires_grad=True), torch.zeros(len(some), requires_grad=True)
    steps = torch.optim.LBFGS([scale, slopes], max_iter=MOST_STEPS, line_search_fn="strong_wolfe")

    def loss() -> float:
        steps.zero_grad()
        total = scale.exp() * scores + slopes @ features
        highest = empty.scatter_reduce(0, owners, total.detach(), "amax")
        sums = torch.zeros_like(empty).index_add(0, owners, (total - highest[owners]).exp())
        value = (sums.log() + highest - total[targets]).mean() + PENALTY * (
            slopes.square().sum() + scale.square().sum()
        )
        torch.autograd.backward(value)
        return float(value.detach())

    steps.step(loss)  # type: ignore[no-untyped-call]
    weights[some] = (slopes / scale.exp()).detach().numpy() / deviations[some]
    return weights
