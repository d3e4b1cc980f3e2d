"""Items by name, by number and by their counts in training: what every answer needs, whatever finds the best items.

Nothing here imports torch: an exported model is answered from by the same rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Literal

import msgspec
import numpy as np

from segue.data.batch import Batch, cut_by_budget
from segue.data.kinds import Kinds
from segue.data.vocabulary import Names
from segue.recommend.answer import Ranking, Recommendation, ScoredItem
from segue.recommend.history import ReadHistory, identifiers, pack_histories
from segue.recommend.rules import Rules

Find = Callable[[np.ndarray], Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]]
"""Rows of histories that are not empty → some of these rows, their items [b, k'] and scores [b, k'], until all are
answered."""
Rank = Callable[[Batch], Ranking]


class KnownItems:
    """The items of a run, of which some may be answered and read."""

    def __init__(
        self,
        names: Names,
        counts: np.ndarray,
        answerable: np.ndarray,
        *,
        kinds: Sequence[str] = (),
        timed: bool = False,
    ) -> None:
        """`counts` [V + 1] int64: events of each item in training; number 0 is padding. `answerable` [V + 1] bool:
        those with a count, and those of which the model knows the content. `kinds`: names of the kinds of events that
        the model tells apart, by number; `timed`: whether it looks at times."""
        self.names = names
        self.kinds = Kinds(kinds)
        self.timed = timed
        self.counts = counts
        self.answerable = answerable

    def rules(
        self, *, k: int, exclude: Iterable[Any] | None, only: Iterable[Any] | None, keep_seen: bool | None
    ) -> Rules:
        """Rules in ids → rules in numbers; unknown ids are ignored."""
        return Rules(
            k=k,
            keep_seen=keep_seen,
            exclude=self._numbers([] if exclude is None else exclude, "exclude"),
            only=None if only is None else self._numbers(only, "only"),
        )

    def answers(
        self, histories: Sequence[ReadHistory], rank: Rank, *, query_times: np.ndarray | None
    ) -> list[Recommendation]:
        """Histories in ids → answers in ids. `query_times` [B]: the questions' seconds."""
        packed = pack_histories(histories, self.names, known=self.answerable, kinds=self.kinds, query_times=query_times)
        ranking = rank(packed.batch)
        return [
            Recommendation(
                items=items,
                unknown=unknown,
                fallback="popularity" if fallback else None,
                untimed=msgspec.UNSET if fallback else self.untimed(history),
            )
            for history, items, unknown, fallback in zip(
                histories, self.scored(ranking), packed.unknown, ranking.fallback.tolist(), strict=True
            )
        ]

    def untimed(self, history: ReadHistory) -> Literal[True] | msgspec.UnsetType:
        """Whether the model would look at times and the history has none, as an answer says it."""
        return True if self.timed and not history.has_times else msgspec.UNSET

    def ranking(
        self, histories: Batch, rules: Sequence[Rules], find: Find, *, length: int, tokens: int, most_rows: int
    ) -> Ranking:
        """Answers in numbers to whole histories of items that are known, some perhaps empty; each has its rules.

        Memory is bounded: histories, of which `length` events are encoded, are answered in groups of similar length,
        of at most so many `tokens` and `most_rows`.
        """
        assert len(rules) == len(histories.lengths)
        empty = histories.lengths == 0
        width = min(max((rule.k for rule in rules), default=1), len(self.names))
        items = np.zeros((len(empty), width), dtype=np.int64)
        scores = np.full((len(empty), width), -np.inf, dtype=np.float32)
        popular: dict[int, np.ndarray] = {}  # many questions may share one set of rules
        for row in np.flatnonzero(empty).tolist():
            rule = rules[row]
            if id(rule) not in popular:
                popular[id(rule)] = self._popular(rule)
            best = popular[id(rule)]
            items[row, : len(best)], scores[row, : len(best)] = best, self.counts[best]
        for rows in similar_lengths(histories, length, tokens, most_rows):
            for chosen, found, values in find(rows):
                items[chosen, : found.shape[1]], scores[chosen, : found.shape[1]] = found, values
        # A question's row is as wide as the largest k of all.
        beyond = np.arange(width) >= np.array([rule.k for rule in rules], dtype=np.int64)[:, None]
        items[beyond], scores[beyond] = 0, -np.inf
        return Ranking(items=items, scores=scores, fallback=empty)

    def scored(self, ranking: Ranking) -> list[list[ScoredItem]]:
        """Numbers → ids and titles, without the padding at the end of a row."""
        answered = ranking.items > 0
        numbers = ranking.items[answered]
        ids, titles = self.names.ids(numbers), self.names.titles(numbers)
        scored = list(map(ScoredItem, ids, titles, ranking.scores[answered].tolist()))
        ends = np.cumsum(answered.sum(axis=1)).tolist()
        return [scored[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]

    def _numbers(self, ids: Iterable[Any], name: str) -> np.ndarray:
        """Numbers of the ids that are known; `name` is what the caller calls the list."""
        numbers = self.names.numbers(identifiers(ids, name), unknown="zero")
        return numbers[numbers > 0]

    def _popular(self, rules: Rules) -> np.ndarray:
        """The items trained on most [≤ k]; equal counts, the lower number first."""
        if rules.only is None:
            candidates = self._by_count[: rules.k + len(rules.exclude)]
        else:
            candidates = self._by_count[np.isin(self._by_count, rules.only)]
        kept = (self.counts[candidates] > 0) & ~np.isin(candidates, rules.exclude)
        best: np.ndarray = candidates[kept][: rules.k]
        return best

    @cached_property
    def _by_count(self) -> np.ndarray:
        return np.argsort(-self.counts, kind="stable")


def similar_lengths(histories: Batch, length: int, tokens: int, most_rows: int) -> Iterator[np.ndarray]:
    """Rows of histories that are not empty, shortest first, as many at a time as the budgets allow."""
    if len(histories.items) <= tokens and len(histories.lengths) <= most_rows and histories.lengths.all():
        if len(histories.lengths):
            yield np.arange(len(histories.lengths))
        return
    rows = np.flatnonzero(histories.lengths)
    lengths = np.minimum(histories.lengths[rows], length)
    order = np.argsort(lengths, kind="stable")
    for group in cut_by_budget(lengths[order], tokens):
        for begin in range(0, len(group), most_rows):
            yield rows[order[group[begin : begin + most_rows]]]
