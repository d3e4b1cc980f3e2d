"""Ranked item numbers → answers in ids, in the shape that Python, the command line and the service share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from segue.recommend.history import History
from segue.recommend.known_items import KnownItems
from segue.recommend.rules import Rules


class ScoredItem(msgspec.Struct, frozen=True):
    """An item of an answer."""

    id: str
    title: str | None
    """From the catalogue; null where it has none."""
    score: float
    """Higher is better. Comparable within one answer only; of a popularity answer, the events trained on."""


UNTIMED = "The history has no times, which this model looks at: the answer is made without them."


class Recommendation(msgspec.Struct, frozen=True):
    """An answer: the items, best first, and what has to be said about them."""

    items: list[ScoredItem]
    unknown: list[str] = []
    """Ids of the history that the model does not know, each once; they were left out of the question."""
    fallback: Literal["popularity"] | None = None
    """Set where the history had nothing the model knows, so that the most frequent items are the answer."""
    untimed: Literal[True] | msgspec.UnsetType = msgspec.UNSET
    """There, and true, where the model looks at times and the history has none: the answer is made without them."""

    @property
    def ids(self) -> list[str]:
        """The ids alone, best first."""
        return [item.id for item in self.items]


BEAM = 8
"""Plans that are followed side by side unless asked otherwise."""


class PlannedItem(msgspec.Struct, frozen=True):
    """A step of a plan."""

    id: str
    title: str | None
    """From the catalogue; null where it has none."""
    log_probability: float
    """The natural logarithm of its chance to come here, after the history and the steps before it; in a popularity
    answer, of its share of the events trained on."""


class Plan(msgspec.Struct, frozen=True):
    """The next items as one plan, the first to come first."""

    items: list[PlannedItem]
    score: float
    """The logarithm of the whole plan's chance: the sum of the steps'."""
    unknown: list[str] = []
    """Ids of the history that the model does not know, each once; they were left out of the question."""
    fallback: Literal["popularity"] | None = None
    """Set where the history had nothing the model knows, so that the most frequent items are the plan."""

    @property
    def ids(self) -> list[str]:
        """The ids alone, in their order."""
        return [item.id for item in self.items]


@dataclass(frozen=True, slots=True, eq=False)
class Ranking:
    """Answers in numbers, one row for each history: item 0 and score -inf stand after the last item of a row."""

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
            popular[id(rule)] = _popular_items(known, rule)
        best = popular[id(rule)]
        ranking.fill(np.array([row]), best[None], known.counts[best][None])
    return ranking


def _popular_items(known: KnownItems, rules: Rules) -> np.ndarray:
    """The most frequent items in training that the rules allow [≤ k]; equal counts, the lower number first."""
    if rules.only is None:
        candidates = known.by_count[: rules.k + len(rules.exclude)]
    else:
        candidates = known.by_count[np.isin(known.by_count, rules.only)]
    allowed = (known.counts[candidates] > 0) & ~np.isin(candidates, rules.exclude)
    best: np.ndarray = candidates[allowed][: rules.k]
    return best


def recommendations(
    known: KnownItems, histories: Sequence[History], unknown: Sequence[list[str]], ranking: Ranking
) -> list[Recommendation]:
    """A ranking in numbers → answers in ids. `unknown`: the unknown ids of each history."""
    return [
        Recommendation(
            items=items,
            unknown=ids,
            fallback="popularity" if fallback else None,
            untimed=msgspec.UNSET if fallback else untimed(known, history),
        )
        for history, items, ids, fallback in zip(
            histories, scored_items(known, ranking), unknown, ranking.fallback.tolist(), strict=True
        )
    ]


def scored_items(known: KnownItems, ranking: Ranking) -> list[list[ScoredItem]]:
    """Item numbers → ids and titles, without the padding at the end of a row."""
    filled = ranking.items > 0
    numbers = ranking.items[filled]
    ids, titles = known.names.ids(numbers), known.names.titles(numbers)
    scored = list(map(ScoredItem, ids, titles, ranking.scores[filled].tolist()))
    ends = np.cumsum(filled.sum(axis=1)).tolist()
    return [scored[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def untimed(known: KnownItems, history: History) -> Literal[True] | msgspec.UnsetType:
    """True if the model uses times and the history has none; otherwise the field is left out of the answer."""
    return True if known.timed and not history.has_times else msgspec.UNSET
