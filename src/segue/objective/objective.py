"""Settings → what the loop needs: examples from a batch, and a loss from a model's states."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from segue.data.batch import Batch
from segue.models.sequence import SequenceModel
from segue.objective.sampler import PopularitySampler, Sampler, UniformSampler
from segue.objective.settings import ObjectiveSettings
from segue.objective.softmax import full_softmax, sampled_softmax, shared_scores
from segue.objective.task import NEXT_ITEM_EXTRA, Examples, next_item


class Objective:
    """One task with one loss."""

    extra = NEXT_ITEM_EXTRA
    """Events a training window holds beyond the model's length."""

    def __init__(self, settings: ObjectiveSettings, counts: np.ndarray) -> None:
        """`counts` [V + 1]: how often each item occurs in training."""
        self.settings = settings
        self.sampler = _sampler(settings, counts)

    def examples(self, batch: Batch) -> Examples:
        return next_item(batch)

    def loss(self, model: SequenceModel, hidden: Tensor, examples: Examples, generator: torch.Generator) -> Tensor:
        """The mean loss of the supervised states among `hidden` [T, D]."""
        if examples.positions is not None:
            hidden = hidden[torch.from_numpy(examples.positions).to(hidden.device)]
        targets = torch.from_numpy(examples.targets).to(hidden.device)
        weights = None if examples.weights is None else torch.from_numpy(examples.weights).to(hidden.device)
        if self.sampler is None:
            return full_softmax(hidden, model.item_vectors()[1:], targets - 1, weights)
        drawn = self.sampler.draw(self.settings.negatives, generator)
        items = drawn.items.to(hidden.device)
        positive, negatives = shared_scores(
            hidden,
            model.items.output(targets),
            model.items.output(items),
            targets,
            items,
            log_q=torch.cat((self.sampler.log_q(torch.from_numpy(examples.targets)), drawn.log_q)).to(hidden.device),
        )
        return sampled_softmax(positive, negatives, weights)


def _sampler(settings: ObjectiveSettings, counts: np.ndarray) -> Sampler | None:
    if settings.sampler == "uniform":
        return UniformSampler(len(counts) - 1)
    if settings.sampler == "popularity":
        return PopularitySampler(counts, settings.power)
    return None
