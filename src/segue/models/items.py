"""Item tables: numbers → vectors, on the way in and on the way out. Row 0 is padding: zero, and never trained."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from segue.data.vocabulary import PADDING
from segue.models.settings import BIDIRECTIONAL, ModelSettings


class IdTable(nn.Module):
    """A learned vector for every item; tied, one for both ways."""

    sparse_gradients = False
    """Whether looking up rows gives a gradient of these rows only; the trainer decides it, by the table's size."""
    kinds: tuple[str, ...] = ()
    """What can be done with items: names of the kinds of events in the log, by number. Builders read it here."""

    def __init__(self, n_items: int, width: int, *, tied: bool, mask: bool = False, bias: bool = False) -> None:
        """`mask`: there is a vector for an item that is hidden. `bias`: each item has a number added to its scores."""
        super().__init__()
        self.into = nn.Parameter(torch.zeros(n_items + 1, width))
        self.out = None if tied else nn.Parameter(torch.zeros(n_items + 1, width))
        self.mask = nn.Parameter(torch.zeros(width)) if mask else None
        self.bias = nn.Parameter(torch.zeros(n_items + 1)) if bias else None

    @property
    def n_items(self) -> int:
        return len(self.into) - 1

    @property
    def mask_number(self) -> int:
        """What stands for a hidden item in a batch: no item, for it comes after the last."""
        return self.n_items + 1

    def input(self, numbers: Tensor) -> Tensor:
        if self.mask is None:
            return self._rows(self.into, numbers)
        hidden = numbers == self.mask_number
        return torch.where(hidden[:, None], self.mask, self._rows(self.into, numbers.masked_fill(hidden, PADDING)))

    def output(self, numbers: Tensor | None = None) -> Tensor:
        """Vectors of these items, or of all of them [V + 1, D]."""
        table = self.into if self.out is None else self.out
        return self._all(table) if numbers is None else self._rows(table, numbers)

    def biases(self, numbers: Tensor | None = None) -> Tensor:
        """What is added to the scores of these items, or of all of them [V + 1]."""
        assert self.bias is not None
        return self._all(self.bias) if numbers is None else self.bias[numbers]

    def _all(self, table: Tensor) -> Tensor:
        """The vectors, or numbers, of every item."""
        return table

    def _rows(self, table: Tensor, numbers: Tensor) -> Tensor:
        """The vectors of some items."""
        return functional.embedding(numbers, table, padding_idx=PADDING, sparse=self.sparse_gradients)

    def clear_padding(self) -> None:
        with torch.no_grad():
            self.into[PADDING] = 0
            for table in (self.out, self.bias):
                if table is not None:
                    table[PADDING] = 0


class CategoryTable(IdTable):
    """A learned vector for every category, which its items share: they cannot be told apart, and a new one is known
    as well as its category is."""

    categories: Tensor

    def __init__(self, categories: np.ndarray, width: int, *, tied: bool, mask: bool = False) -> None:
        """`categories` [V + 1] int64: the number 1 … C of each item's category; padding's is 0."""
        super().__init__(int(categories.max()), width, tied=tied, mask=mask)
        self.register_buffer("categories", torch.from_numpy(categories))  # saved: it says whose vector is whose

    @property
    def n_items(self) -> int:
        return len(self.categories) - 1

    def _rows(self, table: Tensor, numbers: Tensor) -> Tensor:
        return super()._rows(table, self.categories[numbers])

    def _all(self, table: Tensor) -> Tensor:
        return super()._rows(table, self.categories)


def make_items(settings: ModelSettings, n_items: int, categories: np.ndarray | None) -> IdTable:
    """A vector for each item, or for each category where `categories` [V + 1] are given.

    Models that look both ways have a mask and, as BERT4Rec does, a bias for each item. Not so where scores are no
    inner products of a bias's kind: of a cosine or a mixture; nor where items share their vector.
    """
    mask = settings.builder in BIDIRECTIONAL
    if categories is not None:
        assert len(categories) == n_items + 1
        return CategoryTable(categories, settings.item_features, tied=settings.tied, mask=mask)
    bias = mask and settings.similarity == "dot"
    return IdTable(n_items, settings.item_features, tied=settings.tied, mask=mask, bias=bias)
