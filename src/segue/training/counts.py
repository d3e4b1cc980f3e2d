"""A trained model, its log and item-to-item counts → the weight of each feature, fitted on validation.

A case is reduced to the candidates that can be among its best: the model's own best ones and those that counts reach.
The weights are those of a conditional logit: the likelihood of the targets among their candidates, where the model's
scores have a factor that is fitted too. The loss is convex, so it has one minimum. A search for the best ndcg@10
itself, one weight at a time, scored higher on validation and lower on test.

Whether the counts are kept is decided by cross-fitting: the users are halved, and each half is scored with weights that
were fitted on the other. The counts are kept if ndcg rises there by more than its standard error.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from segue.counts.features import FEATURES, GAP, LAST, REPEATED, ItemCounts
from segue.data.batch import Batch
from segue.data.split import Cases
from segue.evaluation.evaluator import Evaluator, Scorer
from segue.evaluation.metrics import ndcg
from segue.evaluation.ranks import MISS, Exclusions

MOST_CASES = 3000  # validation cases that weights are fitted on
BEST = 200  # the model's best candidates of each case
DEPTHS = (10, 20, 50)
PENALTY = 3.0  # on the squares of the weights, in standard deviations of their features, divided by the cases
HALVES = 2
MOST_STEPS = 100
LEAST_FACTOR = 0.01  # of the model's scores in standard deviations: a model that knows nothing is not divided by 0


@dataclass(frozen=True, slots=True, eq=False)
class FittedWeights:
    """The weight of each feature, and what the counts are worth on validation."""

    weights: tuple[float, ...] | None
    """None if the counts did not help the users whom their weights were not fitted on."""
    without: float
    """ndcg@10 of the model alone, on cases that it answers."""
    with_counts: float
    """ndcg@10 on the same cases, each with weights that were fitted on other users."""


def fit_counts(
    scorer: Scorer, pairs: ItemCounts, cases: Cases, evaluator: Evaluator, *, most: int = MOST_CASES
) -> FittedWeights:
    """Fit the weights of counts on at most `most` of the validation `cases`."""
    repeats = frozenset((REPEATED, GAP, LAST))
    features = frozenset(range(len(FEATURES))) - (repeats if evaluator.seen == "excluded" else frozenset())
    some = cases.spread(most)
    answered, candidates = _candidates(scorer, evaluator, some, pairs, features)
    alone, crossed = (ranks[answered] for ranks in _crossed(candidates, some.users))
    if not answered.any():
        return FittedWeights(None, 0.0, 0.0)
    gains, weights = _value(crossed) - _value(alone), None
    if gains.mean() > gains.std() / np.sqrt(len(gains)):
        weights = tuple(fit_weights(PackedCases.of(candidates)).tolist())
    return FittedWeights(weights, float(ndcg(alone, 10).mean()), float(ndcg(crossed, 10).mean()))


def _crossed(candidates: list[_Candidates | None], users: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ranks of the targets without counts [C], and with weights that were fitted on the other half of the users;
    MISS if a target is no candidate."""
    half = np.unique(users, return_inverse=True)[1] % HALVES
    alone, crossed = (np.full(len(candidates), MISS, dtype=np.int64) for _ in range(2))
    parts = [np.flatnonzero(half == number) for number in range(HALVES)]
    packed = [PackedCases.of([candidates[index] for index in part]) for part in parts]
    for part, own, other in zip(parts, packed, reversed(packed), strict=True):
        ranked = part[[candidates[index] is not None for index in part]]
        alone[ranked], crossed[ranked] = own.ranks(np.zeros(len(FEATURES))), own.ranks(fit_weights(other))
    return alone, crossed


def _value(ranks: np.ndarray) -> np.ndarray:
    """The mean of ndcg at DEPTHS of each case [C], which decides whether counts are kept: it varies less than ndcg@10
    alone."""
    return np.asarray(np.mean([ndcg(ranks, depth) for depth in DEPTHS], axis=0))


@dataclass(frozen=True, slots=True, eq=False)
class _Candidates:
    """The candidates of one case, the target among them."""

    scores: np.ndarray  # [n] float32, of the model
    features: np.ndarray  # [n, F] float32
    target: int


def _candidates(
    scorer: Scorer, evaluator: Evaluator, cases: Cases, pairs: ItemCounts, features: frozenset[int]
) -> tuple[np.ndarray, list[_Candidates | None]]:
    """Whether the model answers each case [C], which it does if it reads anything of the history, and the candidates of
    the case; None if the target is not among them or the model does not answer."""
    targets, answered = evaluator.sequences.items[cases.targets], np.zeros(len(cases), dtype=bool)
    result: list[_Candidates | None] = [None] * len(cases)
    for chosen, batch in evaluator.batches(cases):
        seen = Exclusions.of_histories(batch) if evaluator.seen == "excluded" else None
        scores = evaluator.scores(scorer, batch, seen).cpu().numpy()
        histories, some = evaluator.readable_part(batch)
        answered[chosen] = some
        rows, items, values = _reached(histories, pairs, features)
        rows = np.flatnonzero(some)[rows]
        bounds = np.searchsorted(rows, np.arange(len(chosen) + 1))
        for row, case in enumerate(chosen.tolist()):
            own = slice(bounds[row], bounds[row + 1])
            if some[row]:
                result[case] = _of_case(scores[row], int(targets[case]), items[own], values[own])
    return answered, result


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
    """The candidates of many cases, one case after another; cases without candidates are left out."""

    scores: np.ndarray  # [N] float32
    features: np.ndarray  # [F, N] float32
    begins: np.ndarray  # [C]
    targets: np.ndarray  # [C]: rows of the targets

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


def fit_weights(cases: PackedCases) -> np.ndarray:
    """The weight of each feature [F] in units of the model's scores; 0 for a feature that no candidate has."""
    weights = np.zeros(len(FEATURES))
    deviations = cases.features.std(axis=1, dtype=np.float64) if len(cases.scores) else weights
    some = np.flatnonzero(deviations)
    if not len(some):
        return weights
    spread = float(cases.scores.std(dtype=np.float64)) or 1.0
    columns = np.concatenate((cases.scores[None] / spread, cases.features[some] / deviations[some, None]))
    inputs, owners = torch.from_numpy(columns).float(), torch.from_numpy(cases.owners)  # [1 + f, N], [N]
    targets, empty = torch.from_numpy(cases.targets), torch.full((len(cases.begins),), -torch.inf)
    factors = torch.zeros(len(columns))
    factors[0] = spread  # begin with the model alone
    steps, penalty = _lbfgs(factors.requires_grad_()), PENALTY / len(cases.begins)

    def loss() -> float:
        steps.zero_grad()
        total = factors @ inputs
        highest = empty.scatter_reduce(0, owners, total.detach(), "amax")
        sums = torch.zeros_like(empty).index_add(0, owners, (total - highest[owners]).exp())
        value = (sums.log() + highest - total[targets]).mean() + penalty * factors.square().sum()
        torch.autograd.backward(value)
        return float(value.detach())

    steps.step(loss)  # type: ignore[no-untyped-call]
    fitted = factors.detach().double().numpy()
    weights[some] = fitted[1:] / deviations[some] / (max(fitted[0], LEAST_FACTOR) / spread)
    return weights


def _lbfgs(parameters: Tensor) -> torch.optim.LBFGS:
    return torch.optim.LBFGS([parameters], max_iter=MOST_STEPS, line_search_fn="strong_wolfe")
