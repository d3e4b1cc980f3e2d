"""The interface of an index, the item lists that filter its answers, and the recall of an approximate one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

import msgspec
import numpy as np

from segue.data.batch import ragged_rows

if TYPE_CHECKING:
    from torch import Tensor  # importing `Ragged` alone must not import torch

RECALL_AT = 100  # k of the reported recall
SAME_SCORE = 1e-5  # relative difference of scores below which rounding may explain it


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """A list of item numbers for each query: query b has numbers[offsets[b] : offsets[b + 1]]."""

    offsets: np.ndarray  # [B + 1] int64
    numbers: np.ndarray  # [N] int64

    def __post_init__(self) -> None:
        assert len(self.offsets)
        assert self.offsets[0] == 0
        assert self.offsets[-1] == len(self.numbers)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def owners(self) -> np.ndarray:
        """The query of each number [N]."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    def rows(self, rows: slice) -> Ragged:
        """The lists of consecutive queries."""
        offsets = self.offsets[rows.start : rows.stop + 1]
        return Ragged(offsets=offsets - offsets[0], numbers=self.numbers[offsets[0] : offsets[-1]])

    def take(self, queries: np.ndarray) -> Ragged:
        """The lists of these queries, in this order."""
        lengths = np.diff(self.offsets)[queries]
        return Ragged.of_lengths(lengths, self.numbers[ragged_rows(self.offsets[queries], lengths)])

    def joined(self, other: Ragged) -> Ragged:
        """Each query's list with that of another."""
        owners = np.concatenate((self.owners, other.owners))
        order = np.argsort(owners, kind="stable")
        lengths = np.diff(self.offsets) + np.diff(other.offsets)
        return Ragged.of_lengths(lengths, np.concatenate((self.numbers, other.numbers))[order])

    @staticmethod
    def of_lengths(lengths: np.ndarray, numbers: np.ndarray) -> Ragged:
        """The lists with these lengths, given the numbers of all queries one after another."""
        return Ragged(offsets=np.concatenate(([0], np.cumsum(lengths))), numbers=numbers)

    @staticmethod
    def of_lists(lists: Sequence[Sequence[int] | np.ndarray]) -> Ragged:
        """The given lists, one for each query."""
        lengths = np.fromiter((len(numbers) for numbers in lists), dtype=np.int64, count=len(lists))
        parts = [np.asarray(numbers, dtype=np.int64) for numbers in lists]
        return Ragged.of_lengths(lengths, np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64))


Only = np.ndarray | Ragged | None
"""The items that may be returned: for all queries, or for each; None is every item."""
BestItems: TypeAlias = "tuple[Tensor, Tensor]"
"""Items [B, k'] int64 and their scores [B, k'] float32, best first."""


def merged_rows(old: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, np.ndarray | slice]:
    """All numbers of an index and of added items, ascending [n], and the indices of their rows in the old rows followed
    by the new ones [n]; a slice: all of them. Both numbers are ascending; an item in both has its new row."""
    if not len(old) or not len(new) or new[0] > old[-1]:
        return np.concatenate((old, new)), slice(None)  # avoids a copy of large arrays
    remaining = np.flatnonzero(~np.isin(old, new))
    numbers = np.concatenate((old[remaining], new))
    rows = np.concatenate((remaining, len(old) + np.arange(len(new))))
    order = np.argsort(numbers, kind="stable")
    return numbers[order], rows[order]


class ItemIndex(Protocol):
    """Finds the items with the highest scores for a query."""

    n_items: int
    """Items of the catalogue, including those that are never recommended."""

    def search(self, queries: Tensor, k: int, *, exclude: Ragged | None = None, only: Only = None) -> BestItems:
        """The best items of each query and their scores.

        `exclude`: each query's items that must not be returned. It and `only` may name items that the index does not
        have. Among equal scores, lower numbers come first. k' is less than k if the index has, or `only` allows, fewer
        items; a query with fewer results ends with items 0 of score -inf.
        """

    def with_items(self, vectors: Tensor, numbers: np.ndarray, *, n_items: int) -> ItemIndex:
        """A new index of the same kind with these items added: vectors [m, D] and ascending numbers [m].

        Vectors of items that the index already has are replaced. Nothing is fitted again. `n_items`: items of the
        catalogue, including the new ones.
        """

    def save(self, path: Path) -> None:
        """Write the index to one file."""


class Recall(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The recall of an approximate index, measured when it was built."""

    k: int
    share: float
    queries: int


def recall(index: ItemIndex, exact: ItemIndex, queries: Tensor, k: int) -> float:
    """The share of the best k items that an index finds; `exact` scores all of the same items.

    A result counts if its score reaches the k-th best: which of several items of equal score is returned is no loss.
    """
    return recall_of_scores(index.search(queries, k)[1], exact.search(queries, k)[1])


def recall_of_scores(scores: Tensor, best: Tensor) -> float:
    """Recall of scores [B, k], given the highest scores [B, k], best first; 1 without any."""
    if not best.numel():
        return 1.0
    threshold = best[:, -1:]
    return float((scores >= threshold - SAME_SCORE * threshold.abs()).double().mean())
