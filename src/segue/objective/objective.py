"""The objective of training: a batch → examples, and a model's states → a loss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from segue.data.batch import Batch
from segue.models.attention import SamplingModel
from segue.models.sequence import SequenceModel
from segue.objective.batch_shard import BatchShard
from segue.objective.losses.loss import LossInputs, LossParts, tensor_of
from segue.objective.losses.reinforce import leaf_weights, with_reinforce
from segue.objective.samplers.samplers import SamplerSettings
from segue.objective.settings import ObjectiveSettings
from segue.objective.tasks.actions import ActionTask
from segue.objective.tasks.examples import Examples, TaskFacts
from segue.objective.tasks.positive import PositiveEvents
from segue.objective.tasks.users import Positives, Shares


class Objective:
    """One task with one loss."""

    def __init__(
        self,
        settings: ObjectiveSettings,
        counts: np.ndarray,
        kinds: Sequence[str] = (),
        *,
        length: int | None = None,
        only_trained: bool = False,
    ) -> None:
        """`counts` [V + 1]: training counts of the items; `kinds`: the names of the log's event kinds, by number;
        `length`: the model's, for tasks whose windows hold more than the model reads. `only_trained`: items unseen in
        training are no negatives, for models that share parameters between items."""
        self.settings = settings
        self.extra = settings.task.extra
        n_items = len(counts) - 1
        sampler = settings.sampler if isinstance(settings.sampler, SamplerSettings) else None
        candidates = None
        if only_trained and (counts[1:] == 0).any():
            candidates = torch.from_numpy(np.flatnonzero(counts[1:]) + 1)
        self._facts = TaskFacts(n_items + 1, PositiveEvents(settings.positive, kinds), length)
        self.sampler = None if sampler is None else sampler.sampler(counts, candidates)
        self._parts = LossParts(
            n_items=n_items,
            candidates=candidates,
            negatives=settings.negatives,
            shared=sampler is None or sampler.shared,
            temperature=settings.temperature,
        )
        self._shares: Shares | None = None
        self._positives: Positives | None = None

    def prepare(self, windows: Iterable[Batch], histories: Iterable[Batch], n_users: int) -> None:
        """Read all windows and whole training histories once, before training, for facts that no batch contains (see
        `users.py`). If it is not called, each batch is treated as all data."""
        if self.settings.equal_users:
            self._shares = Shares.of(windows, partial(self.settings.task, facts=self._facts), n_users)
        if isinstance(self.settings.task, ActionTask) and self.sampler is not None:
            self._positives = Positives.of(histories, self._facts.positive, n_users)

    @property
    def state(self) -> dict[str, Tensor]:
        """Counts from training, by name; saved with the training state and restored in place."""
        return {} if self.sampler is None else self.sampler.state

    def examples(self, batch: Batch, rng: np.random.Generator) -> Examples:
        """The inputs of a batch, the queries among their states, and the targets."""
        examples = self.settings.task(batch, rng, self._facts)
        return examples if self._positives is None else replace(examples, own=self._positives.own(examples))

    def weight(self, examples: Examples) -> float:
        """Total weight of the examples: the number (or weights) of targets, of states or of users."""
        if self.settings.equal_users:
            rows = np.unique(examples.users)
            return len(rows) if self._shares is None else float(self._shares.rows(examples)[rows].sum())
        return self.settings.loss.weight(examples)

    def scale(self, examples: Examples) -> float:
        """Factor of a batch's mean loss before its gradient: with `equal_users` it grows with the number of users."""
        return 1.0 if self._shares is None else self.weight(examples) / self._shares.users_a_batch

    def loss(
        self,
        model: SequenceModel,
        hidden: Tensor,
        examples: Examples,
        generator: torch.Generator,
        shard: BatchShard | None = None,
    ) -> Tensor:
        """The mean loss of the queries among the states `hidden` [T, D], plus the similarity's extra loss.

        With a `shard` of the examples, `hidden` are the states of the shard's inputs, and the result is its share: over
        all shards, value and gradient sum to those of all examples. All processes must call it together."""
        shard = BatchShard.of(examples) if shard is None else shard
        states = shard.query_states(hidden)
        sampled = isinstance(model, SamplingModel) and model.sampled_attention(states) is not None
        if shard.group.size > 1 and (self.settings.loss.whole_batch or sampled):
            return self._mean(model, shard.gather(states), BatchShard.of(examples), generator) / shard.group.size
        return self._mean(model, states, shard, generator)

    def _mean(self, model: SequenceModel, states: Tensor, shard: BatchShard, generator: torch.Generator) -> Tensor:
        """The shard's share of the mean over the queries of these states [m, D]."""
        samples = model.sampled_attention(states) if isinstance(model, SamplingModel) else None
        weights = self._weights(states, shard.own)
        if samples is not None:
            weights = leaf_weights(states, weights)
        share = 1.0 if shard.group.size == 1 else self.weight(shard.own) / self.weight(shard.whole)
        loss = self.settings.loss(
            LossInputs(self._parts, model, states, weights, shard, share, generator, self.sampler)
        )
        if samples is None:
            return loss
        assert weights is not None
        positions = np.arange(len(states)) if shard.own.positions is None else shard.own.positions
        return with_reinforce(loss, weights, samples, tensor_of(positions, states))

    def _weights(self, states: Tensor, examples: Examples) -> Tensor | None:
        """The weights of the queries [m]; None: equal."""
        weights = None if examples.weights is None else tensor_of(examples.weights, states)
        if not self.settings.equal_users or not len(states):
            return weights
        weights = states.new_ones(len(states)) if weights is None else weights
        users = tensor_of(examples.users, states)
        weights = weights / weights.new_zeros(int(users.max()) + 1).index_add(0, users, weights)[users]
        if self._shares is None:
            return weights
        return weights * tensor_of(self._shares.rows(examples)[examples.users], states).to(weights)
