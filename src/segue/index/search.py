"""What every index does: questions' vectors → best items. And the ragged lists of items it is told to leave out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from torch import Tensor


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

    def save(self, path: Path) -> None:
        """Write everything to one file."""
        ...
