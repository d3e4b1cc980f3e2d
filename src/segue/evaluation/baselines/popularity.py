"""The same answer for everybody: what training has met most often, ever or of late."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from segue.data.batch import Batch
from segue.data.sequences import Sequences
from segue.data.split import Cases, Split
from segue.evaluation.evaluator import Evaluator, Scorer
from segue.evaluation.metrics import ndcg
from segue.evaluation.settings import EvaluateSettings, seen_rule
from segue.evaluation.training_counts import training_counts, training_rows

WINDOWS = (0.003, 0.01, 0.03, 0.1, 0.3)  # newest shares of the training events to choose from
MOST_CASES = 5_000  # validation cases that choose the window


def below_one(counts: np.ndarray) -> Tensor:
    """Popularity [V + 1] float32 in [0, 1): orders what a baseline's own scores leave equal."""
    return torch.from_numpy(counts / (counts.max(initial=0) + 1)).float()


@dataclass(frozen=True, slots=True, eq=False)
class Popularity:
    """Items by the number of their training events."""

    score: Tensor  # [V + 1] float32
    note: str = "items by the number of their training events"

    @staticmethod
    def fit(sequences: Sequences, split: Split, n_items: int) -> Popularity:
        return Popularity(torch.from_numpy(training_counts(sequences, split, n_items)).float())

    def scores(self, histories: Batch) -> Tensor:
        return self.score.expand(len(histories.lengths), -1)  # [B, V + 1]


@dataclass(frozen=True, slots=True, eq=False)
class RecentPopularity:
    """Items by the number of their events in the newest part of training; equal ones by all of it.

    The window is a share of the training events, not a number of days, so that it means something where times are
    only an order.
    """

    score: Tensor  # [V + 1] float32
    note: str

    @staticmethod
    def fit(sequences: Sequences, split: Split, n_items: int) -> RecentPopularity:
        """Validation chooses the window by ndcg@10, under the seen rule that the data itself suggests."""
        counts = training_counts(sequences, split, n_items)
        rule, _ = seen_rule(EvaluateSettings(), sequences, split)
        evaluator = Evaluator(sequences=sequences, counts=counts, seen=rule)
        cases = _spread(split.cases("valid"), MOST_CASES)
        windows = [RecentPopularity._over(sequences, split, counts, share) for share in WINDOWS]
        if not len(cases):
            return windows[-1]
        return max(windows, key=lambda window: _quality(evaluator, window, cases))

    @staticmethod
    def _over(sequences: Sequences, split: Split, counts: np.ndarray, share: float) -> RecentPopularity:
        rows = training_rows(split, sequences.n_events)
        items, times = sequences.items[rows], sequences.times[rows]
        kept = max(1, round(share * len(items)))
        since = np.partition(times, len(times) - kept)[len(times) - kept] if len(times) else 0
        recent = np.bincount(items[times >= since], minlength=len(counts))
        note = f"items by the number of their events among the newest {share:.1%} of training (chosen on validation)"
        return RecentPopularity(torch.from_numpy(recent).float() + below_one(counts), note)

    def scores(self, histories: Batch) -> Tensor:
        return self.score.expand(len(histories.lengths), -1)  # [B, V + 1]


def _spread(cases: Cases, most: int) -> Cases:
    """At most so many of the cases, evenly spread, always the same ones."""
    kept = np.unique(np.linspace(0, len(cases) - 1, min(most, len(cases))).astype(np.int64))
    return Cases(users=cases.users[kept], starts=cases.starts[kept], targets=cases.targets[kept])


def _quality(evaluator: Evaluator, scorer: Scorer, cases: Cases) -> float:
    return float(ndcg(evaluator.ranks(scorer, cases), 10).mean())
