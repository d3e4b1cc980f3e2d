"""A model and item-to-item counts as one scorer."""

from __future__ import annotations

import torch
from torch import Tensor

from segue.counts.counts import Counts
from segue.data.batch import Batch
from segue.evaluation.evaluator import Scorer


class CountedScorer:
    """A scorer whose scores have those of the counts added."""

    def __init__(self, scorer: Scorer, counts: Counts) -> None:
        self.scorer = scorer
        self.counts = counts

    def scores(self, histories: Batch) -> Tensor:
        scores = self.scorer.scores(histories).clone()  # a tensor of inference mode must not change
        added = self.counts.added(histories)
        rows, items, values = map(torch.from_numpy, (added.rows, added.items, added.values))
        scores[rows, items] += values.to(scores)  # each pair is there once
        return scores
