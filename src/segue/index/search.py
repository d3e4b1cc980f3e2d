"""What every index does: questions' vectors → best items. The ragged lists of items it is told to leave out; and how
much of the best an index finds that does not look at everything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

if TYPE_CHECKING:
    from torch import Tensor  # who has ragged lists alone need not wait for it

RECALL_AT = 100  # answers that recall is reported for
SAME_SCORE = 1e-5  # scores that differ by less than this share of them may differ by rounding alone


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Some item numbers for each question: question b has numbers[offsets[b] : offsets[b + 1]]."""

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
        """Each number's question [N]."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    def rows(self, rows: slice) -> Ragged:
        """Those of consecutive questions, counted from the first of them."""
        offsets = self.offsets[rows.start : rows.stop + 1]
        return Ragged(offsets=offsets - offsets[0], numbers=self.numbers[offsets[0] : offsets[-1]])

    def take(self, questions: np.ndarray) -> Ragged:
        """Those of some questions, in the order given."""
        lengths = np.diff(self.offsets)[questions]
        chosen = np.arange(lengths.sum()) + np.repeat(self.offsets[questions] - np.cumsum(lengths) + lengths, lengths)
        return Ragged.of_lengths(lengths, self.numbers[chosen])

    @staticmethod
    def of_lengths(lengths: np.ndarray, numbers: np.ndarray) -> Ragged:
        """From packed numbers and how many each question has."""
        return Ragged(offsets=np.concatenate(([0], np.cumsum(lengths))), numbers=numbers)

    @staticmethod
    def of_lists(lists: Sequence[Sequence[int] | np.ndarray]) -> Ragged:
        """From one list a question."""
        lengths = np.fromiter((len(numbers) for numbers in lists), dtype=np.int64, count=len(lists))
        parts = [np.asarray(numbers, dtype=np.int64) for numbers in lists]
        return Ragged.of_lengths(lengths, np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """The rows of an index and those of items that are added, in the order of the items' numbers."""

    numbers: np.ndarray  # [n] int64, ascending
    order: np.ndarray  # [n] int64: places among the old rows and, after them, the new ones

    @staticmethod
    def of(old: np.ndarray, new: np.ndarray) -> Joined:
        """From both numbers, each ascending; of an item that is in both, the new row stays."""
        kept = np.flatnonzero(~np.isin(old, new))
        numbers, rows = np.concatenate((old[kept], new)), np.concatenate((kept, len(old) + np.arange(len(new))))
        order = np.argsort(numbers, kind="stable")
        return Joined(numbers[order], rows[order])


class ItemIndex(Protocol):
    """Finds the items whose vectors answer a question best."""

    @property
    def n_items(self) -> int:
        """Items of the catalogue, those that are never answered included."""
        ...

    def search(
        self, queries: Tensor, k: int, *, exclude: Ragged | None = None, only: np.ndarray | Ragged | None = None
    ) -> tuple[Tensor, Tensor]:
        """The best items of each question [B, k'] int64 and their scores [B, k'] float32, best first.

        `exclude`: a question's items that are no answer. `only`: the items that may be one, for all questions or
        for each. Numbers that are no item of the index are ignored in both. Equal scores: the lower number first.
        There are k answers whenever k remain; k' is less than k when the index has fewer items, and a question with
        fewer answers than k' has item 0 and score -inf at its end.
        """
        ...

    def with_items(self, vectors: Tensor, numbers: np.ndarray, *, n_items: int) -> ItemIndex:
        """An index of the same kind that answers these items too: their vectors [m, D] and numbers [m], ascending.

        Of an item that was there already the new vector counts. This index stays as it is, and nothing is learned
        anew. `n_items`: items of the catalogue with them.
        """
        ...

    def save(self, path: Path) -> None:
        """Write everything to one file."""
        ...


class Recall(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an approximation finds of the best, measured when it was made."""

    k: int
    share: float
    questions: int


def recall(index: ItemIndex, exact: ItemIndex, queries: Tensor, k: int) -> float:
    """The share of the best k that an index finds; `exact` is one of the same items that finds them all.

    An answer counts when it is as good as the k-th best: which of many equal items is answered costs nobody anything.
    """
    return share_found(index.search(queries, k)[1], exact.search(queries, k)[1])


def share_found(scores: Tensor, best: Tensor) -> float:
    """`recall` of scores [B, k], given the best there are [B, k], best first; 1 where nothing was asked."""
    if not best.numel():
        return 1.0
    border = best[:, -1:]
    return float((scores >= border - SAME_SCORE * border.abs()).double().mean())
