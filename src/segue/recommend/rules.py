"""What an answer may contain: how many items, whether seen ones, which are excluded, which are allowed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import numpy as np

from segue.data.batch import Batch
from segue.errors import InputError
from segue.index.search import Ragged
from segue.recommend.history import KnownItems, identifiers


def _no_items() -> np.ndarray:
    return np.zeros(0, dtype=np.int64)


class Filters(TypedDict, total=False):
    """What an answer may contain, in ids; see `BaseRecommender.recommend_many`."""

    exclude: Iterable[Any] | None
    only: Iterable[Any] | None
    keep_seen: bool | None


@dataclass(frozen=True, slots=True, eq=False)
class Rules:
    """The rules of one answer, items by number. They hold exactly, and an answer has k items whenever k remain."""

    k: int = 10
    keep_seen: bool | None = None
    """Whether items of the history may be recommended; None is the run's default."""
    exclude: np.ndarray = field(default_factory=_no_items)  # [n] int64
    only: np.ndarray | None = None  # [n] int64; None is every item

    def __post_init__(self) -> None:
        k: object = self.k
        if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
            raise InputError(f"k, the number of items of an answer, must be a whole number of at least 1, got {k!r}.")


def read_rules(
    known: KnownItems,
    *,
    k: int,
    exclude: Iterable[Any] | None = None,
    only: Iterable[Any] | None = None,
    keep_seen: bool | None = None,
) -> Rules:
    """Rules in ids → rules in numbers; unknown ids are ignored."""

    def numbers_of(ids: Iterable[Any], name: str) -> np.ndarray:
        numbers = known.names.numbers(identifiers(ids, name), unknown="zero")
        return numbers[numbers > 0]

    return Rules(
        k=k,
        keep_seen=keep_seen,
        exclude=_no_items() if exclude is None else numbers_of(exclude, "exclude"),
        only=None if only is None else numbers_of(only, "only"),
    )


def excluded_items(histories: Batch, rules: Sequence[Rules], *, keep_seen: bool) -> Ragged | None:
    """The items that must not be recommended to each history: those that its rules exclude, and its own items unless
    seen items are kept.

    keep_seen: the default of the run, for rules that leave it open.
    """
    keep = [keep_seen if rule.keep_seen is None else rule.keep_seen for rule in rules]
    if not any(len(rule.exclude) for rule in rules):
        if not any(keep):
            return Ragged.of_lengths(histories.lengths, histories.items)
        if all(keep):
            return None
    rows, keeps = np.arange(len(rules)), np.array(keep, dtype=bool)
    owners = np.repeat(rows, histories.lengths)
    seen = ~keeps[owners]
    owners = np.concatenate((owners[seen], np.repeat(rows, [len(rule.exclude) for rule in rules])))
    numbers = np.concatenate((histories.items[seen], *(rule.exclude for rule in rules)))
    order = np.argsort(owners, kind="stable")
    return Ragged.of_lengths(np.bincount(owners, minlength=len(rules)), numbers[order])
