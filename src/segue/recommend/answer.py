"""Ranked item numbers → answers in ids, in the shape that Python, the command line and the service share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Unpack

import msgspec
import numpy as np

from segue.data.batch import Batch
from segue.recommend.history import History, KnownItems, Timestamp, pack_histories, read_histories
from segue.recommend.rules import Filters, Rules, read_rules

T = TypeVar("T")


class ScoredItem(msgspec.Struct, frozen=True):
    """An item of an answer."""

    id: str
    title: str | None
    """From the catalogue; null if it has none."""
    score: float
    """Higher is better. Comparable within one answer only; in a popularity answer, the item's count in training."""


UNTIMED = "This model uses times and the history has none: the answer is computed without them."


class Recommendation(msgspec.Struct, frozen=True):
    """An answer: the items, best first, and how they were computed."""

    items: list[ScoredItem]
    unknown: list[str] = []
    """Ids of the history that the model does not know, each once; they were skipped."""
    fallback: Literal["popularity"] | None = None
    """Set if the model knows no item of the history: the answer is the most frequent items."""
    untimed: Literal[True] | msgspec.UnsetType = msgspec.UNSET
    """Present and true if the model uses times and the history has none: the answer is computed without them."""

    @property
    def ids(self) -> list[str]:
        """The ids alone, best first."""
        return [item.id for item in self.items]


BEAM = 8
"""The default width of the beam search."""


class PlannedItem(msgspec.Struct, frozen=True):
    """A step of a plan."""

    id: str
    title: str | None
    """From the catalogue; null if it has none."""
    log_probability: float
    """The natural logarithm of its probability, given the history and the steps before it; in a popularity answer, of
    its share of the training events."""


class Plan(msgspec.Struct, frozen=True):
    """The next items as one plan, in order."""

    items: list[PlannedItem]
    score: float
    """The log probability of the whole plan: the sum over its steps."""
    unknown: list[str] = []
    """Ids of the history that the model does not know, each once; they were skipped."""
    fallback: Literal["popularity"] | None = None
    """Set if the model knows no item of the history: the plan is the most frequent items."""

    @property
    def ids(self) -> list[str]:
        """The ids alone, in order."""
        return [item.id for item in self.items]


class Contribution(msgspec.Struct, frozen=True):
    """The contribution of one entry of a history to an item's score."""

    item: str
    title: str | None
    """From the catalogue; null if it has none."""
    known: bool
    """Whether the model knows the item; an unknown one is skipped."""
    contribution: float | None
    """The score with the whole history minus the score without this entry; contributions need not add up to the score.
    Null if the item is unknown, if it is the only known entry, or if the entry is too old to be read: it is older than
    the model's length, and, in a run with counts, not among the newest 50 known entries, which the counts read."""


class CountReason(msgspec.Struct, frozen=True):
    """A count of the training log that adds to an item's score."""

    item: str
    """The entry of the history that it stems from: the item itself, if it is repeated."""
    title: str | None
    """From the catalogue; null if it has none."""
    kind: Literal["followed", "together", "repeated"]
    """The item followed the entry, users have both close together, or the item is in the history already."""
    distance: int
    """Known events from the entry to the end of the history: 1 is the newest. An item that followed the entry did so at
    the same distance."""
    count: int
    """How often it followed, how many users have both close together, or how often it is in the history."""
    score: float
    """What it adds to the score; it may be negative."""
    sentence: str
    """The reason in words, such as: followed “Teapot” 37 times."""


class Attention(msgspec.Struct, frozen=True):
    """The attention weights of one layer of the model."""

    name: str
    """`layer 1` and so on, or the position of the layer in the model."""
    rows: list[int | None]
    """The tokens that attend: indices in `contributions`, oldest first. Null is a token that is not an entry: the query
    token after the history, or the steps of a decoder in order."""
    columns: list[int | None]
    """The tokens attended to, in the same way: at most the newest 64 entries that the model encoded, and then the query
    token if there is one; or the steps of a decoder that attends to its previous steps."""
    weights: list[list[list[float]]]
    """[head][row][column], to six decimals; zero above the diagonal if attention is causal. A row sums to one, or to
    less if it also attends to entries older than these; with hard attention it is one at a single entry. HSTU's weights
    are not normalised: they have no fixed sum and may be negative."""


class Explanation(msgspec.Struct, frozen=True):
    """Why an item is recommended: the contribution of each entry of the history, what counts add, and the attention
    weights."""

    item: ScoredItem
    rank: int | None
    """Its rank, 1 the best; null if the rules do not allow it."""
    contributions: list[Contribution]
    """One for each entry of the history, oldest first."""
    counts: list[CountReason] = []
    """What item-to-item counts add to the score, the largest addition first. Empty if the run has no counts, if they
    add nothing, and in a popularity answer."""
    counts_score: float = 0.0
    """The sum over `counts`; the rest of the score is the model's."""
    attention: list[Attention] = []
    """One for each layer with attention, in the order of the model: the answer is computed from the last row of the
    last one, or from the first row if rows are steps. Empty if the model has none, if it was not requested, and in a
    popularity answer."""
    plan: list[PlannedItem] = []
    """The items that the steps in `attention` choose under the same rules, each the likeliest after those before it;
    empty if the model does not plan."""
    unknown: list[str] = []
    """Ids of the history that the model does not know, each once; they were skipped."""
    fallback: Literal["popularity"] | None = None
    """Set if the model knows no item of the history: the score is then the item's count in training."""
    untimed: Literal[True] | msgspec.UnsetType = msgspec.UNSET
    """Present and true if the model uses times and the history has none: the answer is computed without them."""


@dataclass(frozen=True, slots=True, eq=False)
class Ranking:
    """Answers in numbers, one row for each history, padded with item 0 and score -inf."""

    items: np.ndarray  # [B, k'] int64
    scores: np.ndarray  # [B, k'] float32
    fallback: np.ndarray  # [B] bool: answered by popularity

    def fill(self, rows: np.ndarray, items: np.ndarray, scores: np.ndarray) -> None:
        """Set the answers of some rows [b] to items and scores [b, ≤ k']."""
        self.items[rows, : items.shape[1]], self.scores[rows, : items.shape[1]] = items, scores


def begin_ranking(known: KnownItems, lengths: np.ndarray, rules: Sequence[Rules]) -> Ranking:
    """A ranking in which histories of no event are answered by popularity, and all others are still to be filled.

    lengths [B]: known events of each history.
    """
    assert len(rules) == len(lengths)
    width = min(max((rule.k for rule in rules), default=1), len(known.names))
    ranking = Ranking(
        items=np.zeros((len(lengths), width), dtype=np.int64),
        scores=np.full((len(lengths), width), -np.inf, dtype=np.float32),
        fallback=lengths == 0,
    )
    popular: dict[int, np.ndarray] = {}  # many histories may share one set of rules
    for row in np.flatnonzero(ranking.fallback).tolist():
        rule = rules[row]
        if id(rule) not in popular:
            if rule.only is None:
                candidates = known.by_count[: rule.k + len(rule.exclude)]
            else:
                candidates = known.by_count[np.isin(known.by_count, rule.only)]
            allowed = (known.counts[candidates] > 0) & ~np.isin(candidates, rule.exclude)
            popular[id(rule)] = candidates[allowed][: rule.k]
        best = popular[id(rule)]
        ranking.fill(np.array([row]), best[None], known.counts[best][None])
    return ranking


def recommendations(
    known: KnownItems, histories: Sequence[History], unknown: Sequence[list[str]], ranking: Ranking
) -> list[Recommendation]:
    """A ranking in numbers → answers in ids. `unknown`: the unknown ids of each history."""
    answers = named_items(ScoredItem, known, ranking.items, ranking.scores)
    return [
        Recommendation(
            items=items,
            unknown=ids,
            fallback="popularity" if fallback else None,
            untimed=msgspec.UNSET if fallback else untimed(known, history),
        )
        for history, items, ids, fallback in zip(histories, answers, unknown, ranking.fallback.tolist(), strict=True)
    ]


def named_items(
    kind: Callable[[str, str | None, float], T], known: KnownItems, items: np.ndarray, values: np.ndarray
) -> list[list[T]]:
    """Item numbers and values [B, k'] → ids, titles and values as a `kind` of item, without the padding of a row."""
    filled = items > 0
    numbers = items[filled]
    named = list(map(kind, known.names.ids(numbers), known.names.titles(numbers), values[filled].tolist()))
    ends = np.cumsum(filled.sum(axis=1)).tolist()
    return [named[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def untimed(known: KnownItems, history: History) -> Literal[True] | msgspec.UnsetType:
    """True if the model uses times and the history has none; otherwise the field is left out of the answer."""
    return True if known.timed and not history.has_times else msgspec.UNSET


class BaseRecommender(ABC):
    """Recommends in ids; subclasses encode histories and score items."""

    known: KnownItems

    @abstractmethod
    def rank(self, histories: Batch, rules: Sequence[Rules]) -> Ranking:
        """Answers in numbers to whole histories of known items; an empty history is answered by popularity."""

    def recommend(
        self, history: Iterable[Any], k: int = 10, *, now: Timestamp | None = None, **filters: Unpack[Filters]
    ) -> Recommendation:
        """The k items that come next: `recommend_many` for one history."""
        return self.recommend_many([history], k, now=now, **filters)[0]

    def recommend_many(
        self,
        histories: Iterable[Iterable[Any]],
        k: int = 10,
        *,
        now: Timestamp | None = None,
        exclude: Iterable[Any] | None = None,
        only: Iterable[Any] | None = None,
        keep_seen: bool | None = None,
    ) -> list[Recommendation]:
        """The k items that come next in each history, best first; fewer only if fewer remain.

        histories: each a list of entries, oldest first: an id, or {item, time?, kind?, value?}. If every entry has a
            time, entries are sorted by it. An unknown id is skipped and named in the answer; a history without any
            known id is answered by popularity, and the answer has `fallback` set. The model encodes the newest
            entries, up to its length; seen items are those of the whole history.
        now: the request time, for models that use it.
        exclude: ids that must not be recommended.
        only: ids that may be recommended. Ids unknown to the model are ignored; if none is known, the answer is empty.
        keep_seen: whether items of the history may be recommended; None is the run's default.
        """
        read, query_times = read_histories(histories, now)
        rules = read_rules(self.known, k=k, exclude=exclude, only=only, keep_seen=keep_seen)
        batch, unknown = pack_histories(read, self.known, query_times=query_times)
        return recommendations(self.known, read, unknown, self.rank(batch, [rules] * len(read)))
