"""Recency sampling: the last state predicts some recent events that were taken out of the history."""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np
from msgspec import Meta

from segue.data.batch import Batch
from segue.kinds import Count, Kind, ProperShare
from segue.objective.tasks.examples import NO_FACTS, Examples, Task, TaskFacts, sample_without_replacement


class Exponential(Kind, frozen=True, tag="exponential"):
    """An event's importance falls by a factor with each event after it."""

    alpha: Annotated[float, Meta(gt=0, le=1)] = 0.8
    """The factor; with 1 all events have the same."""

    def sampled(self, before: np.ndarray, uniform: np.ndarray) -> np.ndarray:
        """The event, of `before` events [C], that a uniform sample `uniform` [C] in [0, 1) selects: the inverse of the
        cumulative importance, in closed form, so that no small power of alpha is computed."""
        if self.alpha == 1:
            return _event(uniform * before, before)
        # By age a = n - 1 - k: 1 - alpha^a <= uniform * (1 - alpha^n) < 1 - alpha^(a + 1)
        rate = math.log(self.alpha)
        return _event(before - 1 - np.floor(np.log1p(uniform * np.expm1(before * rate)) / rate), before)


class Linear(Kind, frozen=True, tag="linear"):
    """The k-th event has importance k."""

    def sampled(self, before: np.ndarray, uniform: np.ndarray) -> np.ndarray:
        """As for `Exponential`: k (k + 1) <= uniform * n (n + 1) < (k + 1) (k + 2)."""
        return _event((np.sqrt(1 + 4 * uniform * before * (before + 1.0)) - 1) / 2, before)


def _event(position: np.ndarray, before: np.ndarray) -> np.ndarray:
    return np.asarray(np.floor(position).clip(0, before - 1), dtype=np.int64)


class Recency(Task, frozen=True, tag="recency"):
    """Some events of each user, rather recent ones, are taken out, and the last state predicts them: recency sampling
    (Petrov and Macdonald, "Effective and Efficient Training for Sequential Recommendation using Recency Sampling",
    RecSys 2022).

    For causal encoders. Of n events max(1, n * share) are sampled, with replacement, so that there may be fewer
    targets. The rest is the input, in its order; it may hold events later than a target.

    With several cuts the history is queried at several of its events. Each cut samples from the events before it. All
    sampled events leave the input, and each is a target of the last input before its cut, if there is one. If all
    events of a user are sampled, its oldest stays. The targets of one state are adjacent.
    """

    importance: Exponential | Linear = Exponential()
    """How the probability of an event rises towards the newest."""
    share: ProperShare = 0.2
    """Share of the events before a cut that are sampled."""
    cuts: Count = 1
    """Cuts of a user: the end, and others at random, each with equal probability and at most once."""

    def __call__(self, batch: Batch, rng: np.random.Generator, facts: TaskFacts = NO_FACTS) -> Examples:  # noqa: ARG002
        tokens, ends = len(batch.items), np.cumsum(batch.lengths)
        begins = ends - batch.lengths
        user, before = self._cuts(batch.lengths, rng)  # of each cut
        cut = np.repeat(np.arange(len(user)), np.maximum(1, (before * self.share).astype(np.int64)))  # of each sample
        samples = begins[user[cut]] + self.importance.sampled(before[cut], rng.random(len(cut)))
        inputs = _without(samples, batch.lengths)
        lengths = np.add.reduceat(inputs.astype(np.int64), begins)
        last = (np.cumsum(inputs) - 1)[begins[user] + before - 1]  # the last input before the cut, or another user's
        own = last >= (np.cumsum(lengths) - lengths)[user]
        valid = own[cut] & ~inputs[samples]
        pairs = np.unique(last[cut[valid]] * tokens + samples[valid])  # each target once per state
        return Examples(
            inputs=batch.tokens(inputs, lengths, query_times=batch.times[ends - 1], users=batch.users),
            targets=batch.items[pairs % tokens],
            positions=pairs // tokens,
            grouped=True,
        )

    def _cuts(self, lengths: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """The user of each cut, and the number of its events before the cut: at least two, because one must stay."""
        users = np.arange(len(lengths))
        if self.cuts == 1:
            return users, lengths
        possible = np.maximum(0, lengths - 2)  # cuts after 2 … n - 1 events
        sampled = sample_without_replacement(possible, np.minimum(self.cuts - 1, possible), rng)
        user = np.repeat(users, possible)[sampled]
        before = sampled - (np.cumsum(possible) - possible)[user] + 2
        return np.concatenate((users, user)), np.concatenate((lengths, before))


def _without(samples: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """A mask of the inputs [T]: the tokens that are not sampled, or a user's oldest if all are."""
    begins = np.cumsum(lengths) - lengths
    inputs = np.ones(lengths.sum(), dtype=bool)
    inputs[samples] = False
    inputs[begins] |= ~np.logical_or.reduceat(inputs, begins)
    return inputs
