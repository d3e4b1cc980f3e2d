"""Logs of which the best possible answers are known, scorers that know them, and counts by a slow, plain loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from settings_tables import model_settings
from small_counts import Pairs
from torch import Tensor

from segue.counts.counts import Counts
from segue.counts.features import ItemCounts
from segue.counts.neighbours import Neighbours, PairLimits
from segue.data.batch import Batch
from segue.data.sequences import Sequences
from segue.data.split import split_last
from segue.evaluation.counted import CountedScorer
from segue.evaluation.evaluator import Evaluator, ModelScorer, Scorer
from segue.evaluation.metrics import ndcg
from segue.evaluation.settings import SeenRule
from segue.evaluation.split_log import SplitLog
from segue.models.build import build_model
from segue.recommend.answer import Recommendation
from segue.training.counts import fit_counts

EVERY_PAIR = PairLimits(least_users=1, most=10_000)
OF_TWO_USERS = PairLimits(least_users=2, most=200)


def sequences_of(*users: Sequence[int]) -> Sequences:
    """One list of items a user."""
    lengths = [len(user) for user in users]
    return Sequences(
        offsets=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        items=np.array([item for user in users for item in user], dtype=np.int32),
        times=np.array([1_000_000 * step for length in lengths for step in range(length)], dtype=np.int64),
    )


def pairs_of(neighbours: Neighbours) -> Pairs:
    """A matrix of counts as a dictionary."""
    rows = np.repeat(np.arange(len(neighbours.offsets) - 1), np.diff(neighbours.offsets))
    keys = zip(rows.tolist(), neighbours.items.tolist(), strict=True)
    return dict(zip(keys, neighbours.counts.tolist(), strict=True))


def followed(users: Sequence[Sequence[int]], lag: int) -> list[Counter[tuple[int, int]]]:
    """How often b came `lag` events after a, for each user."""
    return [Counter(zip(user, user[lag:], strict=False)) for user in users]


def near(users: Sequence[Sequence[int]], window: int) -> list[Counter[tuple[int, int]]]:
    """1 for each two different items at most `window` events apart, for each user."""
    return [
        Counter(
            {
                (a, b): 1
                for one, a in enumerate(user)
                for other, b in enumerate(user)
                if a != b and abs(one - other) <= window
            }
        )
        for user in users
    ]


def limited(by_user: list[Counter[tuple[int, int]]], limits: PairLimits) -> Pairs:
    """The sums over users within the limits."""
    total: Counter[tuple[int, int]] = sum(by_user, Counter())
    rows: dict[int, list[tuple[int, int]]] = {}
    for (a, b), count in total.items():
        if sum((a, b) in user for user in by_user) >= limits.least_users:
            rows.setdefault(a, []).append((-count, b))
    return {(a, b): -negative for a, row in rows.items() for negative, b in sorted(row)[: limits.most]}


def assert_best(answer: Recommendation, numbers: list[int], scores: np.ndarray, k: int) -> None:
    """An answer has the k best items by `scores` [V + 1], up to rounding. `numbers`: the items of the answer."""
    best = np.sort(scores[scores > -np.inf])[::-1][:k]
    assert len(set(numbers)) == len(numbers) == len(best)
    np.testing.assert_allclose([item.score for item in answer.items], best, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(scores[numbers], best, rtol=1e-5, atol=1e-5)


class ByHistory:
    """A scorer whose scores are a function of one history."""

    def __init__(self, scores: Callable[[np.ndarray], np.ndarray], *, factor: float = 1.0) -> None:
        self.of_one = scores
        self.factor = factor

    def scores(self, histories: Batch) -> Tensor:
        each = np.split(histories.items, np.cumsum(histories.lengths)[:-1])
        return torch.from_numpy(self.factor * np.stack([self.of_one(one) for one in each])).float()


def untrained(n_items: int, seed: int) -> ModelScorer:
    """A network with random weights."""
    shape = model_settings(width=8, depth=1, heads=2, length=12, dropout=0.0)
    return ModelScorer(build_model(shape, n_items, generator=torch.Generator().manual_seed(seed)))


@dataclass(frozen=True, eq=False)
class Fitted:
    """What training makes of counts, and ndcg@10 on validation."""

    counts: Counts | None
    without: float
    with_counts: float

    def added_to(self, scorer: Scorer) -> Scorer:
        """The scorer with the counts, if they are worth it."""
        return scorer if self.counts is None else CountedScorer(scorer, self.counts)

    @property
    def helpful(self) -> Counts:
        """The counts, which must not be left out."""
        assert self.counts is not None
        return self.counts


@dataclass(frozen=True, eq=False)
class PlantedLog:
    """A log, and a scorer that knows all that can be known of its next items."""

    sequences: Sequences
    n_items: int
    best: Scorer
    seen: SeenRule = "kept"

    @staticmethod
    def of(items: np.ndarray, n_items: int, best: Callable[[np.ndarray], np.ndarray]) -> PlantedLog:
        """The log of items [users, events]."""
        return PlantedLog(sequences_of(*items.tolist()), n_items, ByHistory(best))

    @property
    def log(self) -> SplitLog:
        return SplitLog(self.sequences, split_last(self.sequences), self.n_items)

    @property
    def evaluator(self) -> Evaluator:
        return Evaluator(sequences=self.sequences, counts=self.log.training_counts, seen=self.seen)

    def fitted(self, scorer: Scorer) -> Fitted:
        """The counts of the training part, with weights fitted on validation."""
        log = self.log
        pairs = ItemCounts.of(log.sequences, log.split.train_end, log.n_items, OF_TWO_USERS)
        fitted = fit_counts(scorer, pairs, log.split.cases("valid"), self.evaluator)
        counts = None if fitted.weights is None else Counts(pairs, fitted.weights)
        return Fitted(counts, fitted.without, fitted.with_counts)

    def value(self, scorer: Scorer) -> float:
        """ndcg@10 on the test part."""
        return float(ndcg(self.evaluator.ranks(scorer, self.log.split.cases("test")), 10).mean())


def chain_log(seed: int, *, users: int = 400, events: int = 12, n_items: int = 40) -> PlantedLog:
    """Each item has two successors, with probabilities .6 and .3; every tenth event is a random item."""
    rng = np.random.default_rng(seed)
    successors = np.stack([np.append(0, rng.permutation(n_items) + 1) for _ in range(2)])  # [2, V + 1]
    items = rng.integers(1, n_items + 1, (users, events))
    for event in range(1, events):
        number = rng.random(users)
        before = items[:, event - 1]
        items[:, event] = np.where(number < 0.6, successors[0][before], items[:, event])
        items[:, event] = np.where((number >= 0.6) & (number < 0.9), successors[1][before], items[:, event])
    table = 1e-3 * rng.random((n_items + 1, n_items + 1))  # others in any order, without ties
    rows = np.arange(n_items + 1)
    table[rows, successors[0]] += 2
    table[rows, successors[1]] += 1
    return PlantedLog.of(items, n_items, lambda history: table[history[-1]])


Rule = Callable[[np.ndarray], int]


def newest_item(history: np.ndarray) -> int:
    return int(history[-1])


def commonest_item(history: np.ndarray) -> int:
    """The item with the most events; of several, the one with the newest event."""
    newest = history[::-1].tolist()
    return int(max(dict.fromkeys(newest), key=newest.count))


def third_newest_item(history: np.ndarray) -> int:
    return int(history[-3]) if len(history) > 2 else 0


def repeats_log(rule: Rule, seed: int, *, shared: bool, users: int = 300, events: int = 14) -> PlantedLog:
    """Four of five events are an item of the user's own history by a rule; others are one of the user's six items.

    `shared`: the items of different users overlap. If they do not, no two users have a pair of items.
    """
    rng = np.random.default_rng(seed)
    n_items = 60 if shared else 6 * users
    items = np.zeros((users, events), dtype=np.int64)
    for user, row in enumerate(items):
        own = rng.permutation(n_items)[:6] + 1 if shared else 6 * user + np.arange(1, 7)
        for event in range(events):
            row[event] = (rule(row[:event]) if event and rng.random() < 0.8 else 0) or rng.choice(own)

    def best(history: np.ndarray) -> np.ndarray:
        scores = np.zeros(n_items + 1)
        scores[history] = np.arange(1, len(history) + 1)  # of other items of the user, the newer ones first
        scores[rule(history)] = len(history) + 1
        return scores

    return PlantedLog.of(items, n_items, best)


def sums_log(seed: int, *, share: float, noise: float, users: int = 400, n_items: int = 40) -> PlantedLog:
    """A `share` of the events are a function of the two newest items together, of which neither alone tells anything.

    The scorer adds 1 to the right item, and up to `noise` to each item at random.
    """
    rng = np.random.default_rng(seed)
    items = rng.integers(1, n_items + 1, (users, 10))
    for event in range(2, items.shape[1]):
        sums = (items[:, event - 1] + items[:, event - 2]) % n_items + 1
        items[:, event] = np.where(rng.random(users) < share, sums, items[:, event])
    table = noise * rng.random((n_items + 1, n_items + 1))

    def best(history: np.ndarray) -> np.ndarray:
        scores: np.ndarray = table[history[-1]].copy()
        if len(history) > 1:
            scores[(history[-1] + history[-2]) % n_items + 1] += 1
        return scores

    return PlantedLog.of(items, n_items, best)


def divided_log(seed: int, *, users: int = 400, n_items: int = 40) -> tuple[PlantedLog, ByHistory]:
    """Half of the events are a function of the two newest items, and the scorer knows them. Of the others, four of five
    follow a chain, and it does not know them."""
    rng = np.random.default_rng(seed)
    successors = np.append(0, rng.permutation(n_items) + 1)
    items = rng.integers(1, n_items + 1, (users, 12))
    for event in range(2, items.shape[1]):
        number, newest = rng.random(users), items[:, event - 1]
        sums = (newest + items[:, event - 2]) % n_items + 1
        items[:, event] = np.where(number < 0.4, successors[newest], items[:, event])
        items[:, event] = np.where(number >= 0.5, sums, items[:, event])
    noise = 1e-3 * rng.random((2, n_items + 1, n_items + 1))

    def known(history: np.ndarray) -> np.ndarray:
        scores: np.ndarray = noise[0, history[-1]].copy()
        if len(history) > 1:
            scores[(history[-1] + history[-2]) % n_items + 1] += 1
        return scores

    def best(history: np.ndarray) -> np.ndarray:
        scores: np.ndarray = 2 * known(history) + noise[1, history[-1]]
        scores[successors[history[-1]]] += 1
        return scores

    return PlantedLog.of(items, n_items, best), ByHistory(known)


def random_log(seed: int, *, users: int = 60, n_items: int = 40) -> PlantedLog:
    """Every event is a random item, and every score a random number."""
    rng = np.random.default_rng(seed)
    table = rng.random((n_items + 1, n_items + 1))
    return PlantedLog.of(rng.integers(1, n_items + 1, (users, 10)), n_items, lambda history: table[history[-1]])
