"""Item tables: numbers → vectors, on the way in and on the way out. Row 0 is padding: zero, and never trained.

Here those whose vectors are learned; `content.py` has the one that makes them of what the catalogue says.
"""

from __future__ import annotations

import copy
from typing import ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from segue.data.vocabulary import PADDING, Vocabulary
from segue.errors import SettingsError
from segue.kinds import Kind
from segue.models.facts import DataFacts
from segue.models.text.encoder import TextEncoder


class ItemTable(nn.Module):
    """What all tables have: a vector for every item, one for a hidden item where `mask` says so, and where `bias` does
    a number for every item that is added to its scores."""

    into: nn.Parameter
    """Learned vectors [rows, D], where the table has any."""
    out: nn.Parameter | None
    """Others for the way out, where the two ways differ."""
    sparse_gradients = False
    """Whether looking up rows gives a gradient of these rows only; the trainer decides it, by the table's size."""

    def __init__(self, n_items: int, width: int, *, mask: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.n_items = n_items
        self.width = width
        self.out = None
        self.mask = nn.Parameter(torch.zeros(width)) if mask else None
        self.bias = nn.Parameter(torch.zeros(n_items + 1)) if bias else None

    @property
    def learned(self) -> list[nn.Parameter]:
        """The learned vectors, of both ways."""
        return [self.into] if self.out is None else [self.into, self.out]

    @property
    def mask_number(self) -> int:
        """What stands for a hidden item in a batch: no item, for it comes after the last."""
        return self.n_items + 1

    def input(self, numbers: Tensor) -> Tensor:
        if self.mask is None:
            return self._read(numbers)
        hidden = numbers == self.mask_number
        return torch.where(hidden[:, None], self.mask, self._read(numbers.masked_fill(hidden, PADDING)))

    def output(self, numbers: Tensor | None = None) -> Tensor:
        """Vectors of these items, or of all of them [V + 1, D]."""
        raise NotImplementedError

    def biases(self, numbers: Tensor | None = None) -> Tensor:
        """What is added to the scores of these items, or of all of them [V + 1]."""
        assert self.bias is not None
        return self.bias if numbers is None else self.bias[numbers]

    def answerable(self, counts: np.ndarray) -> np.ndarray:
        """Which items may be answered [V + 1] bool: of vectors that are learned, those that were trained on."""
        return counts > 0

    def extended(self, facts: DataFacts) -> ItemTable:  # noqa: ARG002  # what is learned for an id is learned in training
        """A table with new items at the end, of which `facts` tell as of a catalogue of their own (row 0 is padding);
        this one stays as it is, and nothing is trained."""
        raise SettingsError(
            "This model knows its items by their ids alone, so it can say nothing of new ones: train one with "
            "model.items = 'ids+vectors' or 'vectors', and content (model.items.texts or model.items.vectors)."
        )

    def clear_padding(self) -> None:
        with torch.no_grad():
            for table in self.learned:
                table[PADDING] = 0
            if self.bias is not None:
                self.bias[PADDING] = 0

    def _read(self, numbers: Tensor) -> Tensor:
        """Vectors of items on the way in."""
        raise NotImplementedError


class IdTable(ItemTable):
    """A learned vector for every item; tied, one for both ways."""

    def __init__(
        self, n_items: int, width: int, *, tied: bool, mask: bool = False, bias: bool = False, rows: int = 0
    ) -> None:
        """`rows`: vectors there are, where items share them."""
        super().__init__(n_items, width, mask=mask, bias=bias)
        self.into = nn.Parameter(torch.zeros((rows or n_items) + 1, width))
        self.out = None if tied else nn.Parameter(torch.zeros_like(self.into))

    def output(self, numbers: Tensor | None = None) -> Tensor:
        table = self.into if self.out is None else self.out
        return self._all(table) if numbers is None else self._rows(table, numbers)

    def _read(self, numbers: Tensor) -> Tensor:
        return self._rows(self.into, numbers)

    def _all(self, table: Tensor) -> Tensor:
        """The vectors of every item."""
        return table

    def _rows(self, table: Tensor, numbers: Tensor) -> Tensor:
        """The vectors of some items."""
        return functional.embedding(numbers, table, padding_idx=PADDING, sparse=self.sparse_gradients)


class CategoryTable(IdTable):
    """A learned vector for every category, which its items share: they cannot be told apart, and a new one is known
    as well as its category is."""

    categories: Tensor

    def __init__(self, categories: np.ndarray, width: int, *, tied: bool, mask: bool = False) -> None:
        """`categories` [V + 1] int64: the number 1 … C of each item's category; padding's is 0."""
        super().__init__(len(categories) - 1, width, tied=tied, mask=mask, rows=int(categories.max()))
        self.register_buffer("categories", torch.from_numpy(categories))  # saved: it says whose vector is whose

    def answerable(self, counts: np.ndarray) -> np.ndarray:
        """Those of a category that was trained on, whichever of its items it was."""
        categories = self.categories.cpu().numpy()
        answerable: np.ndarray = (np.bincount(categories, weights=counts) > 0)[categories]
        return answerable

    def extended(self, facts: DataFacts) -> CategoryTable:
        """Of the new items' categories, the numbers that they have here."""
        assert facts.categories is not None and facts.categories.max() < len(self.into)
        added = torch.from_numpy(facts.categories[1:]).to(self.categories.device)
        return lengthened(self, {"categories": torch.cat((self.categories, added))}, {})

    def _rows(self, table: Tensor, numbers: Tensor) -> Tensor:
        return super()._rows(table, self.categories[numbers])

    def _all(self, table: Tensor) -> Tensor:
        return super()._rows(table, self.categories)


T = TypeVar("T", bound=ItemTable)


def lengthened(table: T, buffers: dict[str, Tensor], parameters: dict[str, nn.Parameter]) -> T:
    """A copy with more items, which shares all but the tensors given: however large the table, it is there at once."""
    longer = copy.copy(table)
    longer._buffers = {**table._buffers, **buffers}
    longer._parameters = {**table._parameters, **parameters}
    for name in parameters:
        longer.__dict__.pop(name, None)  # a plain attribute would hide it
    longer.n_items = len(next(iter(buffers.values()))) - 1
    return longer


class ItemTableSettings(Kind, frozen=True):
    """What every kind of item table can do."""

    shared: ClassVar[bool] = True
    """Whether items share weights with others, which would be pushed away with an item that is a negative."""

    def refuse_silent_catalogue(self, vocabulary: Vocabulary) -> None:
        """Refuse a catalogue without the content that these settings need."""

    def facts(
        self,
        vocabulary: Vocabulary,  # noqa: ARG002
        kinds: tuple[str, ...] = (),
        *,
        texts: TextEncoder | None = None,  # noqa: ARG002
        codes: np.ndarray | None = None,  # noqa: ARG002
    ) -> DataFacts:
        """The facts that a table of this kind needs. `kinds`: the event kinds of the data. `texts`: the text encoder of
        a trained model; without it one is fitted. `codes`: the items' codes, which come from the log."""
        return DataFacts(kinds=kinds)

    def table(self, facts: DataFacts, n_items: int, width: int, *, mask: bool, bias: bool) -> ItemTable:
        """The table, with a vector for a hidden item if `mask`, and a bias for each item if `bias` and it can."""
        raise NotImplementedError


class IdSettings(ItemTableSettings, frozen=True, tag="ids"):
    """A learned vector for each item id."""

    shared: ClassVar[bool] = False
    tied: bool = True
    """Whether one vector serves as input and as output, or each has its own."""

    def table(self, facts: DataFacts, n_items: int, width: int, *, mask: bool, bias: bool) -> ItemTable:  # noqa: ARG002
        return IdTable(n_items, width, tied=self.tied, mask=mask, bias=bias)


class CategorySettings(ItemTableSettings, frozen=True, tag="categories"):
    """A learned vector for each value of a catalogue column: items with the same value share it, and an item unseen in
    training has one too."""

    column: str
    """The column of the catalogue."""
    tied: bool = True
    """Whether one vector serves as input and as output, or each has its own."""

    def refuse_silent_catalogue(self, vocabulary: Vocabulary) -> None:
        vocabulary.categories(self.column)

    def facts(
        self,
        vocabulary: Vocabulary,
        kinds: tuple[str, ...] = (),
        *,
        texts: TextEncoder | None = None,  # noqa: ARG002
        codes: np.ndarray | None = None,  # noqa: ARG002
    ) -> DataFacts:
        return DataFacts(categories=vocabulary.categories(self.column), kinds=kinds)

    def table(self, facts: DataFacts, n_items: int, width: int, *, mask: bool, bias: bool) -> ItemTable:  # noqa: ARG002
        assert facts.categories is not None and len(facts.categories) == n_items + 1
        return CategoryTable(facts.categories, width, tied=self.tied, mask=mask)
