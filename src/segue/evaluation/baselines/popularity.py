"""The same items for every user: the most frequent ones of all training, or of its newest part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from segue.data.batch import Batch
from segue.evaluation.evaluator import Evaluator
from segue.evaluation.metrics import ndcg
from segue.evaluation.settings import EvaluateSettings, seen_rule
from segue.evaluation.split_log import SplitLog

WINDOWS = (0.003, 0.01, 0.03, 0.1, 0.3)  # newest shares of the training events to choose from
MOST_CASES = 5_000  # validation cases that choose the window


def below_one(counts: np.ndarray) -> Tensor:
    """Popularity [V + 1] float32 in [0, 1), which breaks ties between whole scores."""
    return torch.from_numpy(counts / (counts.max(initial=0) + 1)).float()


@dataclass(frozen=True, slots=True, eq=False)
class Popularity:
    """The same scores for every user."""

    score: Tensor  # [V + 1] float32
    note: str = "items by the number of their training events"

    @staticmethod
    def fit(log: SplitLog) -> Popularity:
        return Popularity(torch.from_numpy(log.training_counts).float())

    @staticmethod
    def fit_recent(log: SplitLog) -> Popularity:
        """Items by the number of their events in the newest part of training; equal ones by all of it.

        The window is a share of the training events, not a number of days: some logs have an order instead of times. It
        is chosen by validation's ndcg@10. Seen items are excluded or kept as the log suggests.
        """
        counts, rows = log.training_counts, log.training_rows
        items, times = log.sequences.items[rows], log.sequences.times[rows]
        windows = []
        for share in WINDOWS:
            oldest = len(times) - max(1, round(share * len(times)))
            since = np.partition(times, oldest)[oldest] if len(times) else 0
            recent = torch.from_numpy(np.bincount(items[times >= since], minlength=len(counts))).float()
            note = f"items by the number of their events among the newest {share:.1%} of training"
            windows.append(Popularity(recent + below_one(counts), f"{note} (chosen on validation)"))
        cases = log.split.cases("valid").spread(MOST_CASES)
        if not len(cases):
            return windows[-1]
        rule, _ = seen_rule(EvaluateSettings(), log.sequences, log.split)
        evaluator = Evaluator(sequences=log.sequences, counts=counts, seen=rule)
        return max(windows, key=lambda window: ndcg(evaluator.ranks(window, cases), 10).mean())

    def scores(self, histories: Batch) -> Tensor:
        return self.score.expand(len(histories.lengths), -1)  # [B, V + 1]
