"""A trained model, its log and item-to-item counts → the weight of each feature, fitted on validation.

A case is reduced to the candidates that can be among its best: the model's own best ones and those that counts reach.
The weights start at zero. In each step, the change of one weight that improves the mean of ndcg@10, @20 and @50 most is
made: likelihood, which is smoother, gave lower ndcg@10 on every log tried. Whether the counts help is decided by
weights that are fitted on one half of the cases and measured on the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from segue.counts.counts import Counts
from segue.counts.features import FEATURES, GAP, LAST, REPEATED, ItemCounts
from segue.counts.neighbours import PairLimits
from segue.data.batch import Batch, ragged_rows
from segue.data.split import Cases
from segue.evaluation.evaluator import Evaluator, Scorer
from segue.evaluation.metrics import ndcg
from segue.evaluation.ranks import Exclusions
from segue.evaluation.split_log import SplitLog

MOST_CASES = 3000  # validation cases that weights are fitted on
BEST = 200  # the model's best candidates of each case
DEPTHS = (10, 20, 50)
FIRST = (0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0)
"""Values that replace a weight of zero, in units of the standard deviation of the candidates' scores."""
FACTORS = (0.0, 0.4, 0.7, 0.85, 1.2, 1.5, 2.5)  # and of one that is not
SIGNED = frozenset((REPEATED, GAP, LAST))  # features that may also speak against an item
MOST_STEPS, LEAST_GAIN = 40, 1e-4  # relative gain of a step


@dataclass(frozen=True, slots=True, eq=False)
class FittedCounts:
    """Counts with their weights, and what they were worth on validation."""

    counts: Counts | None
    """None if the weights did not help on cases that they were not fitted on."""
    without: float
    """ndcg@10 of the model alone, on the cases that weights were fitted on."""
    with_counts: float
    """ndcg@10 on the same cases, each half with the weights of the other."""


def fit_counts(scorer: Scorer, log: SplitLog, cases: Cases, evaluator: Evaluator, limits: PairLimits) -> FittedCounts:
    """Fit the weights on validation `cases`; the counts are those of the training part."""
    pairs = ItemCounts.of(log.sequences, log.split.train_end, log.n_items, limits)
    repeats = frozenset((REPEATED, GAP, LAST))
    features = frozenset(range(len(FEATURES))) - (repeats if evaluator.seen == "excluded" else frozenset())
    packed = PackedCases.of(list(_candidates(scorer, evaluator, cases.spread(MOST_CASES), pairs, features)))
    halves = [packed.part(slice(begin, None, 2)) for begin in (0, 1)]
    without = packed.ndcg(np.zeros(len(FEATURES)))
    crossed = sum(other.ndcg(fit_weights(half)) * other.cases for half, other in (halves, halves[::-1])) / packed.cases
    weights = fit_weights(packed) if crossed > without else np.zeros(len(FEATURES))
    counts = Counts(pairs, tuple(weights.tolist())) if weights.any() else None
    return FittedCounts(counts, without, crossed)


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

    def part(self, which: slice) -> PackedCases:
        """Some of the cases; those whose target is no candidate are shared out evenly."""
        own = np.arange(len(self.begins))[which]
        ends = np.append(self.begins[1:], len(self.scores))
        lengths = (ends - self.begins)[own]
        rows, begins = ragged_rows(self.begins[own], lengths), np.cumsum(lengths) - lengths
        return PackedCases(
            scores=self.scores[rows],
            features=self.features[:, rows],
            begins=begins,
            targets=begins + (self.targets - self.begins)[own],
            cases=round(self.cases * len(own) / max(1, len(self.begins))),
        )

    @property
    def deviation(self) -> float:
        """The standard deviation of the scores of a case's candidates, averaged over the cases."""
        if not len(self.begins):
            return 1.0
        sizes = np.diff(np.append(self.begins, len(self.scores)))
        means = np.add.reduceat(self.scores, self.begins) / sizes
        squares = np.add.reduceat((self.scores - np.repeat(means, sizes)) ** 2, self.begins) / sizes
        return float(np.sqrt(squares).mean()) or 1.0

    def total(self, weights: np.ndarray) -> np.ndarray:
        """The score of each candidate [N] float32."""
        total = self.scores.copy()
        for feature in np.flatnonzero(weights):
            total += self.features[feature] * np.float32(weights[feature])
        return total

    def ranks(self, total: np.ndarray) -> np.ndarray:
        """The rank of each target among its candidates, which is its rank among all items if it is small."""
        if not len(self.begins):
            return np.zeros(0, dtype=np.int64)
        above = total >= np.repeat(total[self.targets], np.diff(np.append(self.begins, len(total))))
        return np.add.reduceat(above.astype(np.int64), self.begins)

    def ndcg(self, weights: np.ndarray) -> float:
        """ndcg@10 over all cases."""
        return float(ndcg(self.ranks(self.total(weights)), 10).sum() / max(1, self.cases))

    def value(self, total: np.ndarray) -> float:
        """What the weights are fitted to: the mean of ndcg at DEPTHS."""
        ranks = self.ranks(total)
        return float(np.mean([ndcg(ranks, depth).sum() for depth in DEPTHS]) / max(1, self.cases))


def fit_weights(cases: PackedCases) -> np.ndarray:
    """The weight of each feature [F]."""
    weights, total, unit = np.zeros(len(FEATURES)), cases.scores.copy(), cases.deviation
    best = cases.value(total)
    for _ in range(MOST_STEPS):
        step = max(_steps(cases, weights, total, unit), default=None)
        if step is None or step[0] <= best * (1 + LEAST_GAIN):
            break
        best, feature, value = step
        total += cases.features[feature] * np.float32(value - weights[feature])
        weights[feature] = value
    return weights


def _steps(
    cases: PackedCases, weights: np.ndarray, total: np.ndarray, unit: float
) -> Iterator[tuple[float, int, float]]:
    """Every change of one weight: what it leads to, the feature and its new weight."""
    for feature, weight in enumerate(weights.tolist()):
        own = cases.features[feature]
        if not own.any():
            continue
        values = [weight * factor for factor in FACTORS] if weight else [unit * value for value in FIRST]
        values += [-unit * value for value in FIRST] if feature in SIGNED and not weight else []
        for value in values:
            yield cases.value(total + own * np.float32(value - weight)), feature, value
