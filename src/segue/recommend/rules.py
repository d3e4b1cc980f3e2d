"""What an answer may hold: how many items, seen ones or not, those left out, those allowed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from segue.data.batch import Batch
from segue.errors import InputError
from segue.index.search import Ragged


def _nothing() -> np.ndarray:
    return np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Rules:
    """The rules of one answer, items by number. They hold exactly, and k are answered whenever k remain."""

    k: int = 10
    keep_seen: bool | None = None
    """Whether items of the history may be answered; None is the run's own way."""
    exclude: np.ndarray = field(default_factory=_nothing)  # [n] int64
    only: np.ndarray | None = None  # [n] int64; None is every item

    def __post_init__(self) -> None:
        k: object = self.k
        if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
            raise InputError(f"k, the number of items asked for, must be a whole number of at least 1, got {k!r}.")


def left_out(histories: Batch, rules: Sequence[Rules], *, keep_seen: bool) -> Ragged | None:
    """What is no answer to each history: its own items unless they are kept, and what its rules exclude.

    `keep_seen` stands where the rules leave it open.
    """
    keep = [keep_seen if rule.keep_seen is None else rule.keep_seen for rule in rules]
    if not any(len(rule.exclude) for rule in rules):
        if not any(keep):
            return Ragged.of_lengths(histories.lengths, histories.items)
        if all(keep):
            return None
    rows, keeps = np.arange(len(rules)), np.array(keep, dtype=bool)
    extra = np.array([len(rule.exclude) for rule in rules], dtype=np.int64)
    owners = np.repeat(rows, histories.lengths)
    seen = ~keeps[owners]
    owners = np.concatenate((owners[seen], np.repeat(rows, extra)))
    numbers = np.concatenate((histories.items[seen], *(rule.exclude for rule in rules)))
    order = np.argsort(owners, kind="stable")
    return Ragged.of_lengths(np.bincount(owners, minlength=len(rules)), numbers[order])
