"""Tasks: a batch of histories → what to encode, which states to question, and the right answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from segue.data.batch import Batch, ragged_rows


@dataclass(frozen=True, slots=True, eq=False)
class Examples:
    """Inputs and the answers expected of their states."""

    inputs: Batch
    targets: np.ndarray  # [M] int64, item numbers
    positions: np.ndarray | None = None  # [M] int64, the input tokens questioned; None: all of them, in order
    weights: np.ndarray | None = None  # [M] float32; None: all alike
    own: tuple[np.ndarray, np.ndarray] | None = None  # rows [P] of the inputs, items [P] int64: no negatives of theirs

    @property
    def users(self) -> np.ndarray:
        """Whose each question is [M] int64, by place in the inputs."""
        owner = np.repeat(np.arange(len(self.inputs.lengths)), self.inputs.lengths)
        return owner if self.positions is None else owner[self.positions]


Task = Callable[[Batch, np.random.Generator], Examples]
"""Every user of the batch has at least two events. What is drawn is drawn anew at each call."""

EXTRA = 1
"""Events a training window holds beyond the length of the model, if a task does not say otherwise. Next-item, recency
and continuation take at least one event out of what is read; a model that is asked with a mask counts the mask's place
apart, and masked events stay where they are."""


def next_item(batch: Batch, rng: np.random.Generator) -> Examples:  # noqa: ARG001 (nothing is drawn)
    """Every event but a user's last is an input, and the event after it its answer."""
    ends = np.cumsum(batch.lengths)
    inputs, answers = np.ones(len(batch.items), dtype=bool), np.ones(len(batch.items), dtype=bool)
    inputs[ends - 1] = False
    answers[ends - batch.lengths] = False
    return Examples(
        inputs=batch.tokens(inputs, batch.lengths - 1, query_times=batch.times[ends - 1], users=batch.users),
        targets=batch.items[answers],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedItem:
    """Some events of each user are hidden by a mask, and the states at the masks are asked for them (BERT4Rec).

    For encoders that look both ways. Of a user's n events min(most, max(1, n * share)) are hidden, any of them with
    equal chance, a half rounded up; everything that is hidden is replaced by the mask, none by another item. As an
    answer is asked for after the history, some users come a second time, after all others, with only the last hidden.
    """

    mask: int
    """The number that stands for a hidden item."""
    share: float
    """Of the events that are hidden."""
    most: int
    """Events of a user that are hidden."""
    last: float
    """Share of the users that come a second time."""

    def __call__(self, batch: Batch, rng: np.random.Generator) -> Examples:
        counts = np.maximum(1, np.floor(batch.lengths * self.share + 0.5).astype(np.int64))
        hidden = draw_without_replacement(batch.lengths, np.minimum(counts, self.most), rng)
        again = rng.random(len(batch.lengths)) < self.last
        lengths, ends, tokens = batch.lengths[again], np.cumsum(batch.lengths)[again], len(batch.items)
        rows = np.concatenate((np.arange(tokens), ragged_rows(ends - lengths, lengths)))
        inputs = batch.tokens(rows, np.concatenate((batch.lengths, lengths)))  # arrays of its own: they may be changed
        positions = np.concatenate((hidden, tokens + np.cumsum(lengths) - 1))
        targets = inputs.items[positions]
        inputs.items[positions] = self.mask
        # What else is known of an event is hidden with it: a question's mask has none of it either.
        if inputs.kinds is not None:
            inputs.kinds[positions] = 0
        if inputs.values is not None:
            inputs.values[positions] = np.nan
        return Examples(inputs=inputs, targets=targets, positions=positions)


def draw_without_replacement(lengths: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """`counts[b]` of the `lengths[b]` tokens of each user, every choice with equal chance: packed places, ascending."""
    owner = np.repeat(np.arange(len(lengths)), lengths)
    shuffled = np.lexsort((rng.random(len(owner)), owner))  # user after user, each user's tokens in any order
    place = np.arange(len(owner)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return np.sort(shuffled[place < np.repeat(counts, lengths)])


Importance = Literal["exponential", "linear"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recency:
    """Some events of each user, rather recent ones, are taken out, and the last state is asked for them: recency
    sampling (Petrov and Macdonald, "Effective and Efficient Training for Sequential Recommendation using Recency
    Sampling", RecSys 2022).

    For encoders that look back only. Of n events max(1, n * share) are drawn, with replacement, so that there may be
    fewer answers; event k = 0 … n - 1 with a chance proportional to alpha^(n - k), or to k + 1. The rest is the input,
    in its order; it may hold events later than an answer.

    With several cuts the history is asked about at several of its moments. Each cut draws from the events before it.
    All that was drawn leaves the input, and each is asked from the last input before its cut, if there is one. A
    user's oldest event stays where nothing else would. The answers asked of one state stand together.
    """

    importance: Importance
    alpha: float
    """How much of its importance an event loses with each that follows it, for `exponential`: in (0, 1]."""
    share: float
    """Of the events before a cut that are drawn: in (0, 1)."""
    cuts: int
    """Moments at which a user is asked about: the end, and others drawn, each with equal chance and at most once."""

    def __call__(self, batch: Batch, rng: np.random.Generator) -> Examples:
        tokens, begins = len(batch.items), np.cumsum(batch.lengths) - batch.lengths
        user, before = self._cuts(batch.lengths, rng)  # of each cut
        cut = np.repeat(np.arange(len(user)), np.maximum(1, (before * self.share).astype(np.int64)))  # of each draw
        places = recent_places(before[cut], rng.random(len(cut)), importance=self.importance, alpha=self.alpha)
        drawn = begins[user[cut]] + places
        kept = _without(drawn, batch.lengths)
        lengths = np.add.reduceat(kept.astype(np.int64), begins)
        last = (np.cumsum(kept) - 1)[begins[user] + before - 1]  # the last input before the cut, or another user's
        own = last >= (np.cumsum(lengths) - lengths)[user]
        asked = own[cut] & ~kept[drawn]
        pairs = np.unique(last[cut[asked]] * tokens + drawn[asked])  # each answer once a state
        return Examples(
            inputs=batch.tokens(kept, lengths, query_times=batch.times[begins + batch.lengths - 1], users=batch.users),
            targets=batch.items[pairs % tokens],
            positions=pairs // tokens,
        )

    def _cuts(self, lengths: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """The cuts' users, and how many of the user's events stand before each: two or more, for one has to be left."""
        users = np.arange(len(lengths))
        if self.cuts == 1:
            return users, lengths
        inside = np.maximum(0, lengths - 2)  # cuts after 2 … n - 1 events
        chosen = draw_without_replacement(inside, np.minimum(self.cuts - 1, inside), rng)
        user = np.repeat(users, inside)[chosen]
        before = chosen - (np.cumsum(inside) - inside)[user] + 2
        return np.concatenate((users, user)), np.concatenate((lengths, before))


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """Histories are cut, and what came after a cut is asked for, item by item, the items before it being known.

    For encoders with a decoder. A cut may come after any event but the last; each is an example of its own. The
    history is what lies before it. The answers are the `items` events after it, or as many as there are, and all but
    the last of them are fed to the decoder (teacher forcing): what it is fed is the truth, and never what it would have
    said. The state at the history's last event asks for the first of them.
    """

    items: int
    """Asked for after a cut."""
    cuts: int
    """Of a window, each with equal chance and at most once."""

    def __call__(self, batch: Batch, rng: np.random.Generator) -> Examples:
        begins = np.cumsum(batch.lengths) - batch.lengths
        places = batch.lengths - 1  # cuts after 1 … n - 1 events
        chosen = draw_without_replacement(places, np.minimum(self.cuts, places), rng)
        user = np.repeat(np.arange(len(places)), places)[chosen]
        histories = chosen - (np.cumsum(places) - places)[user] + 1
        asked = np.minimum(self.items, batch.lengths[user] - histories)
        lengths = histories + asked - 1
        inputs = batch.tokens(ragged_rows(begins[user], lengths), lengths)
        return Examples(
            inputs=replace(inputs, histories=histories),
            targets=batch.items[ragged_rows(begins[user] + histories, asked)],
            positions=ragged_rows(np.cumsum(lengths) - asked, asked),
        )


def _without(drawn: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Which tokens stay [T] bool: those not drawn, and the oldest of a user of whom nothing else would stay."""
    begins = np.cumsum(lengths) - lengths
    kept = np.ones(lengths.sum(), dtype=bool)
    kept[drawn] = False
    kept[begins] |= ~np.logical_or.reduceat(kept, begins)
    return kept


def recent_places(before: np.ndarray, chance: np.ndarray, *, importance: Importance, alpha: float) -> np.ndarray:
    """Which of `before` events [C] a uniform draw `chance` [C] in [0, 1) means: the inverse of the summed importance.

    In closed form, so that no small power of alpha is ever looked at, however long the history.
    """
    if importance == "linear":  # k (k + 1) <= chance * n (n + 1) < (k + 1) (k + 2)
        place = np.floor((np.sqrt(1 + 4 * chance * before * (before + 1.0)) - 1) / 2)
    elif alpha == 1:
        place = np.floor(chance * before)
    else:  # by age a = n - 1 - k: 1 - alpha^a <= chance * (1 - alpha^n) < 1 - alpha^(a + 1)
        place = before - 1 - np.floor(np.log1p(chance * np.expm1(before * math.log(alpha))) / math.log(alpha))
    return np.asarray(place.clip(0, before - 1), dtype=np.int64)
