"""Settings → what the loop needs: examples from a batch, and a loss from a model's states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from segue.data.batch import Batch
from segue.models.items.coded import CodeTable
from segue.models.sampled_attention import SamplingModel
from segue.models.sequence import SequenceModel
from segue.models.similarity.dot import Dot
from segue.objective.batch_shard import BatchShard
from segue.objective.losses.binary import bce, gbce, gbce_beta
from segue.objective.losses.lambdarank import lambdarank
from segue.objective.losses.mean import user_weights
from segue.objective.losses.pairwise import bpr, bpr_max, top1, top1_max
from segue.objective.losses.reinforce import even_weights, with_draws
from segue.objective.losses.sce import sce
from segue.objective.losses.scores import own_scores, shared_scores
from segue.objective.losses.softmax import coded_softmax, full_softmax, sampled_softmax, shared_softmax
from segue.objective.samplers.collisions import Own, shared_collisions
from segue.objective.samplers.samplers import (
    AnswerSampler,
    InBatchSampler,
    MixedSampler,
    PopularitySampler,
    Sampler,
    UniformSampler,
)
from segue.objective.settings import ANSWERS, ObjectiveSettings
from segue.objective.tasks.actions import AllAction, DenseAllAction, NextAction
from segue.objective.tasks.examples import EXTRA, Continuation, Examples, MaskedItem, Recency, Task, next_item
from segue.objective.tasks.positive import PositiveEvents
from segue.objective.tasks.users import Positives, Shares

LEAST_CODED = 10_000  # items from which on a full softmax goes by their codes


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
        """`counts` [V + 1]: how often each item occurs in training; `kinds`: the names of the log's kinds of events, by
        number; `length`: the model's, for tasks whose windows hold more than the model reads. `only_trained`: what does
        not occur is no negative either, for models that are to know it by its content and would learn to avoid it."""
        self.settings = settings
        self._candidates = _trained_items(counts) if only_trained and (counts[1:] == 0).any() else None
        self._task = _task(settings, len(counts) - 1, kinds, length)
        self.extra = self._task.extra if isinstance(self._task, NextAction | DenseAllAction | AllAction) else EXTRA
        """Events a training window holds beyond the model's length."""
        self._answers = AnswerSampler(len(counts) - 1) if settings.sampler in ANSWERS else None
        self.sampler = _sampler(settings, counts, self._answers, self._candidates)
        among = len(counts) - 1 if self._candidates is None else len(self._candidates)
        self._beta = gbce_beta(among, settings.negatives, settings.calibration) if settings.loss == "gbce" else 1.0
        self._shares: Shares | None = None
        self._positives: Positives | None = None

    def meet(self, windows: Iterable[Batch], histories: Iterable[Batch], n_users: int) -> None:
        """Look once, before training, at all windows and at whole training histories for what no batch can tell of its
        users. Without it the users of a batch are all there are."""
        if self.settings.equal_users:
            self._shares = Shares.of(windows, self._task, n_users)
        if isinstance(self._task, NextAction | DenseAllAction | AllAction) and self.sampler is not None:
            self._positives = Positives.of(histories, self._task.positive, n_users)

    @property
    def state(self) -> dict[str, Tensor]:
        """What has been counted while training, by name; to be kept with the weights and filled again."""
        return {} if self._answers is None else {"answers": self._answers.counted.counts}

    def examples(self, batch: Batch, rng: np.random.Generator) -> Examples:
        """What to encode of a batch, which states to question, and the right answers."""
        examples = self._task(batch, rng)
        return examples if self._positives is None else replace(examples, own=self._positives.own(examples))

    def weight(self, examples: Examples) -> float:
        """What the questions count together: their number, or that of the states or users that count alike."""
        if self.settings.loss == "lambdarank":
            assert examples.positions is not None
            return len(np.unique(examples.positions))
        if self.settings.equal_users:
            rows = np.unique(examples.users)
            return len(rows) if self._shares is None else float(self._shares.rows(examples)[rows].sum())
        return len(examples.targets) if examples.weights is None else float(examples.weights.sum())

    def scale(self, examples: Examples) -> float:
        """What the mean loss of a batch is to be multiplied by before its gradient is taken: where users count alike,
        a batch of many has to count more than one of few."""
        return 1.0 if self._shares is None else self.weight(examples) / self._shares.users_a_batch

    def loss(
        self,
        model: SequenceModel,
        hidden: Tensor,
        examples: Examples,
        generator: torch.Generator,
        shard: BatchShard | None = None,
    ) -> Tensor:
        """The mean loss of the supervised states among `hidden` [T, D], and what the model's similarity adds to it.

        With a `shard` of the examples, `hidden` are the states of the shard's inputs and the result is the shard's
        part of the mean: over all shards, values and gradients add up to those of all examples. All processes of the
        group must call it together.
        """
        shard = BatchShard.of(examples) if shard is None else shard
        if self.settings.loss == "lambdarank":
            return self._listwise(model, hidden, shard)
        states = shard.query_states(hidden)
        if shard.group.size > 1 and self._looks_at_all(model, states):
            return self._mean(model, shard.gather(states), BatchShard.of(examples), generator) / shard.group.size
        return self._mean(model, states, shard, generator)

    def _looks_at_all(self, model: SequenceModel, states: Tensor) -> bool:
        """Whether what a question costs depends on the states of others: buckets are filled from all of a batch, and
        what is usual for a draw is the mean over the others."""
        return self.settings.loss == "sce" or (
            isinstance(model, SamplingModel) and model.sampled_attention(states) is not None
        )

    def _mean(self, model: SequenceModel, hidden: Tensor, shard: BatchShard, generator: torch.Generator) -> Tensor:
        """The shard's share of the mean over questions of these states [m, D]."""
        examples = shard.own
        weights = None if examples.weights is None else _tensor(examples.weights, hidden)
        if self.settings.equal_users and len(hidden):
            weights = hidden.new_ones(len(hidden)) if weights is None else weights
            weights = user_weights(weights, _tensor(examples.users, hidden))
            if self._shares is not None:
                weights = weights * _tensor(self._shares.rows(examples)[examples.users], hidden).to(weights)
        draws = model.sampled_attention(hidden) if isinstance(model, SamplingModel) else None
        if draws is None:
            return self._asked(model, hidden, weights, shard, generator)
        weights = even_weights(hidden, weights)
        asked = np.arange(len(hidden)) if examples.positions is None else examples.positions
        loss = self._asked(model, hidden, weights, shard, generator)
        return with_draws(loss, weights, draws, _tensor(asked, hidden))

    def _asked(
        self,
        model: SequenceModel,
        hidden: Tensor,
        weights: Tensor | None,
        shard: BatchShard,
        generator: torch.Generator,
    ) -> Tensor:
        states = _questions(model, hidden)
        targets = _tensor(shard.own.targets, states)
        if self.sampler is not None:
            return self._sampled(model, states, targets, weights, shard, generator)
        assert isinstance(model.similarity, Dot), "settings allow these losses only with scores that are inner products"
        if not len(targets):
            return _nothing(states)
        if self.settings.temperature != 1:
            states = states / self.settings.temperature
        if self.settings.loss == "softmax" and isinstance(model.items, CodeTable) and self._many(model.items):
            mean = self._coded(model.items, states, targets, weights, normal=model.similarity.normal)
            return self._share(mean, shard)
        vectors, places = self._compared_with(model, targets)
        if self.settings.loss == "sce":
            return sce(states, vectors, places, weights, generator=generator, items=self.settings.negatives)
        return self._share(full_softmax(states, vectors, places, weights), shard)

    def _share(self, mean: Tensor, shard: BatchShard) -> Tensor:
        """A mean over the shard's questions → what it is of the mean over all."""
        return mean if shard.group.size == 1 else mean * (self.weight(shard.own) / self.weight(shard.whole))

    def _many(self, items: CodeTable) -> bool:
        """Whether candidates are so many that sums over their codes are faster than products with their vectors."""
        return (items.n_items if self._candidates is None else len(self._candidates)) >= LEAST_CODED

    def _coded(
        self, items: CodeTable, states: Tensor, targets: Tensor, weights: Tensor | None, *, normal: bool
    ) -> Tensor:
        """The full softmax where no item's vector is made."""
        numbers, answers = torch.arange(1, items.n_items + 1, device=states.device), targets - 1
        if self._candidates is not None:
            numbers = self._candidates.to(states.device)
            answers = torch.searchsorted(numbers, targets)
        lengths = items.lengths(numbers) if normal else None
        return coded_softmax(items.tables(states), items.places(numbers), answers, weights, lengths=lengths)

    def _compared_with(self, model: SequenceModel, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The vectors of all candidates [C, I], and where among them the answers are [M]."""
        if self._candidates is None:
            return model.item_vectors()[1:], targets - 1
        candidates = self._candidates.to(targets.device)
        return model.item_vectors(candidates), torch.searchsorted(candidates, targets)

    def _sampled(
        self,
        model: SequenceModel,
        states: Tensor,
        targets: Tensor,
        weights: Tensor | None,
        shard: BatchShard,
        generator: torch.Generator,
    ) -> Tensor:
        # Drawn for the whole batch, of which a shard takes its own: then all processes draw the same.
        settings, sampler = self.settings, self.sampler
        assert sampler is not None
        count = settings.negatives if settings.shared else settings.negatives * len(shard.whole.targets)
        present = self._present(shard.whole)
        drawn = sampler.draw(count, generator, present)
        if not settings.shared and shard.group.size > 1:
            drawn = drawn.of(torch.from_numpy(shard.own_rows), settings.negatives)
        vectors, answers = model.item_vectors(drawn.items.to(states.device)), model.item_vectors(targets)
        loss = _nothing(states)
        if len(targets):
            log_q = None
            if settings.loss == "sampled-softmax" and settings.log_q:
                own = sampler.log_q(torch.from_numpy(shard.own.targets), present)
                log_q = own.to(states.device), drawn.log_q.to(states.device)
            lost = self._against(model, states, targets, answers, weights, shard.own, drawn.items, vectors, log_q)
            loss = self._share(lost, shard)
        return _with_extra(loss, model, states, answers, shard)

    def _against(
        self,
        model: SequenceModel,
        states: Tensor,
        targets: Tensor,
        answers: Tensor,
        weights: Tensor | None,
        examples: Examples,
        drawn: Tensor,
        vectors: Tensor,
        log_q: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """The mean over questions of what they lose against drawn items, whose vectors are given like the answers'."""
        settings, items = self.settings, drawn.to(states.device)
        groups, known = self._grouped(examples, targets)
        if settings.loss == "sampled-softmax" and settings.shared and isinstance(model.similarity, Dot):
            collisions, asked = shared_collisions(targets, items, groups, known), states / settings.temperature
            return shared_softmax(asked, answers, vectors, collisions, weights, log_q=log_q)
        scores = shared_scores
        if not settings.shared:
            rows = len(targets), settings.negatives
            items, vectors, scores = items.view(rows), vectors.view(*rows, -1), own_scores
            log_q = None if log_q is None else (log_q[0], log_q[1].view(rows))
        positive, negatives = scores(
            model.similarity,
            states,
            answers,
            vectors,
            targets,
            items,
            temperature=settings.temperature,
            log_q=log_q,
            groups=groups,
            own=known,
        )
        return self._compared(positive, negatives, weights)

    def _present(self, examples: Examples) -> Tensor:
        """What samplers may take negatives from: the answers, which are counted, or all items of the batch."""
        if self._answers is None:
            return torch.from_numpy(np.concatenate((examples.inputs.items, examples.targets)))
        answers = torch.from_numpy(examples.targets)
        self._answers.observe(answers)
        return answers

    def _grouped(self, examples: Examples, like: Tensor) -> tuple[Tensor | None, Own | None]:
        """Whose answers are no negatives of which question: see `collisions.py`."""
        if examples.own is not None:
            users, items = examples.own
            return _tensor(examples.users, like), (_tensor(users, like), _tensor(items, like))
        # Answers asked of one state are no negatives of each other. A state with one answer has nothing to group.
        if self.settings.task == "recency" and examples.positions is not None:
            return _tensor(examples.positions, like), None
        return None, None

    def _compared(self, positive: Tensor, negatives: Tensor, weights: Tensor | None) -> Tensor:
        offset = self.settings.offset
        match self.settings.loss:
            case "sampled-softmax":
                return sampled_softmax(positive, negatives, weights)
            case "bce":
                return bce(positive + offset, negatives + offset, weights)
            case "gbce":
                return gbce(positive + offset, negatives + offset, self._beta, weights)
            case "bpr":
                return bpr(positive, negatives, weights)
            case "bpr-max":
                return bpr_max(positive, negatives, self.settings.regularisation, weights)
            case "top1":
                return top1(positive, negatives, weights)
            case "top1-max":
                return top1_max(positive, negatives, weights)
        raise AssertionError(f"{self.settings.loss} compares no answer with drawn negatives")

    def _listwise(self, model: SequenceModel, hidden: Tensor, shard: BatchShard) -> Tensor:
        positions = shard.own.positions
        assert positions is not None, "settings allow it only with a task that asks some of the states"
        asked, rows = np.unique(positions, return_inverse=True)
        states = _questions(model, hidden[_tensor(asked, hidden)])
        owners, targets = _tensor(rows, hidden), _tensor(shard.own.targets, hidden)
        loss = _nothing(states)
        if len(targets):
            vectors, places = self._compared_with(model, targets)
            scores = model.similarity.score(states, vectors) / self.settings.temperature
            loss = self._share(lambdarank(scores, owners, places), shard)
        return _with_extra(loss, model, states[owners], model.item_vectors(targets), shard)


def _nothing(states: Tensor) -> Tensor:
    """The loss of a process that has nothing to ask this time: its weights get gradients, of 0, like everyone's."""
    return states.sum() * 0


def _questions(model: SequenceModel, states: Tensor) -> Tensor:
    """What the states ask, at the temperature that the model's similarity has learned."""
    queries = model.head(states)
    return model.similarity.tempered(queries) if isinstance(model.similarity, Dot) else queries


def _with_extra(loss: Tensor, model: SequenceModel, states: Tensor, answers: Tensor, shard: BatchShard) -> Tensor:
    """What the similarity adds is about all questions together."""
    if shard.group.size > 1 and not isinstance(model.similarity, Dot):
        states, answers = shard.gather(states), model.item_vectors(_tensor(shard.whole.targets, states))
    extra = model.similarity.extra_loss(states, answers)
    return loss if extra is None else loss + extra / shard.group.size


def _tensor(array: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(array).to(like.device)


def _task(settings: ObjectiveSettings, n_items: int, kinds: Sequence[str], length: int | None) -> Task:
    if settings.task == "masked-item":
        return MaskedItem(mask=n_items + 1, share=settings.masked, most=settings.most_masked, last=settings.last_masked)
    if settings.task == "recency":
        return Recency(importance=settings.importance, alpha=settings.alpha, share=settings.taken, cuts=settings.cuts)
    if settings.task == "continuation":
        return Continuation(items=settings.plan, cuts=settings.cuts)
    if settings.task == "next-item":
        return next_item
    positive = PositiveEvents(settings.positive, kinds)
    if settings.task == "next-action":
        return NextAction(positive=positive)
    assert length is not None, "what of a window is input depends on how much the model reads"
    chosen = DenseAllAction if settings.task == "dense-all-action" else AllAction
    seconds = round(settings.days * SECONDS_A_DAY)
    return chosen(positive=positive, seconds=seconds, length=length, labels=settings.labels)


SECONDS_A_DAY = 86400


def _trained_items(counts: np.ndarray) -> Tensor:
    """Their numbers, ascending."""
    return torch.from_numpy(np.flatnonzero(counts[1:]) + 1)


def _sampler(
    settings: ObjectiveSettings, counts: np.ndarray, answers: AnswerSampler | None, candidates: Tensor | None
) -> Sampler | None:
    if answers is not None:
        whole = settings.sampler == "answers"
        return answers if whole else MixedSampler(len(counts) - 1, settings.in_batch, candidates, batch=answers)
    match settings.sampler:
        case "uniform":
            return UniformSampler(len(counts) - 1, candidates)
        case "popularity":
            return PopularitySampler(counts, settings.power)
        case "in-batch":
            return InBatchSampler(len(counts) - 1)
        case "mixed":
            return MixedSampler(len(counts) - 1, settings.in_batch, candidates)
    return None
