"""Item tables: numbers of items → input and output vectors. Row 0 is padding: zero, and never trained.

Here: tables of learned vectors. `content.py` computes vectors from the catalogue, `coded.py` from codes.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, TypeVar

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.nn import functional

from segue.data.vocabulary import PADDING, Vocabulary
from segue.errors import SettingsError
from segue.kinds import Kind
from segue.models.text.encoder import TextEncoder


@dataclass(frozen=True, eq=False)
class DataFacts:
    """The facts of the log and of its catalogue that a model is built from. Only those that its settings need are
    present.

    Content and the text encoder become buffers of the item table, so a run encodes new texts without the catalogue."""

    categories: np.ndarray | None = None  # [V + 1] int64: the category 1 … C of each item
    content: np.ndarray | None = None  # [V + 1, F] float32: content features of each item; row 0 is zero
    codes: np.ndarray | None = None  # [V + 1, parts] uint8: see `training/item_codes.py`
    kinds: tuple[str, ...] = ()
    """Names of the event kinds, by number."""
    texts: TextEncoder | None = None
    """The text encoder fitted to the catalogue; it also encodes the texts of new items."""


NO_FACTS = DataFacts()
"""For models that need only their settings."""


class ItemTable(nn.Module):
    """Base of all tables: a vector for every item, with `mask` one for the mask token, and with `bias` a number for
    every item that is added to its scores."""

    into: nn.Parameter
    """Learned input vectors [rows, D], if the table has any."""
    out: nn.Parameter | None
    """Output vectors, if they are not the input vectors."""
    sparse_gradients = False
    """Whether gradients have only the rows that were looked up; the trainer decides it, by the table's size."""

    def __init__(self, n_items: int, width: int, *, mask: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.n_items = n_items
        self.width = width
        self.out = None
        self.mask = nn.Parameter(torch.zeros(width)) if mask else None
        self.bias = nn.Parameter(torch.zeros(n_items + 1)) if bias else None

    @property
    def learned(self) -> list[nn.Parameter]:
        """The learned input and output vectors."""
        return [self.into] if self.out is None else [self.into, self.out]

    @property
    def outward(self) -> nn.Parameter:
        """The learned output vectors."""
        return self.into if self.out is None else self.out

    @property
    def mask_number(self) -> int:
        """The number of the mask token in a batch, after the last item's."""
        return self.n_items + 1

    def input(self, numbers: Tensor) -> Tensor:
        """Input vectors of items and mask tokens [T, D]."""
        if self.mask is None:
            return self._read(numbers)
        masked = numbers == self.mask_number
        return torch.where(masked[:, None], self.mask, self._read(numbers.masked_fill(masked, PADDING)))

    def output(self, numbers: Tensor | None = None) -> Tensor:
        """Output vectors of these items, or of all [V + 1, D]."""
        raise NotImplementedError

    def answerable(self, counts: np.ndarray) -> np.ndarray:
        """Which items may be recommended [V + 1] bool, given their counts in training: here, those trained on."""
        return counts > 0

    def extended(self, facts: DataFacts) -> ItemTable:  # noqa: ARG002
        """A new table with items added at the end, without training. `facts` describe the added items (row 0 is
        padding)."""
        raise SettingsError(
            "New items need a model with content, and this one knows its items by their ids alone: train one with "
            "model.items = 'ids+vectors' or 'vectors', and content (model.items.texts or model.items.vectors)."
        )

    def clear_padding(self) -> None:
        with torch.no_grad():
            for table in self.learned:
                table[PADDING] = 0
            if self.bias is not None:
                self.bias[PADDING] = 0

    def _read(self, numbers: Tensor) -> Tensor:
        """Input vectors of items."""
        raise NotImplementedError


class IdTable(ItemTable):
    """A learned vector for every item; if `tied`, input and output share it."""

    def __init__(
        self, n_items: int, width: int, *, tied: bool, mask: bool = False, bias: bool = False, rows: int = 0
    ) -> None:
        """`rows`: the number of vectors, if items share them."""
        super().__init__(n_items, width, mask=mask, bias=bias)
        self.into = nn.Parameter(torch.zeros((rows or n_items) + 1, width))
        self.out = None if tied else nn.Parameter(torch.zeros_like(self.into))

    def output(self, numbers: Tensor | None = None) -> Tensor:
        return self.outward if numbers is None else self._rows(self.outward, numbers)

    def _read(self, numbers: Tensor) -> Tensor:
        return self._rows(self.into, numbers)

    def _rows(self, table: Tensor, numbers: Tensor) -> Tensor:
        return functional.embedding(numbers, table, padding_idx=PADDING, sparse=self.sparse_gradients)


class CategoryTable(IdTable):
    """A learned vector for every category, shared by its items: they have equal scores, and a new item has the vector
    of its category."""

    categories: Tensor

    def __init__(self, categories: np.ndarray, width: int, *, tied: bool, mask: bool = False) -> None:
        """`categories` [V + 1] int64: the number 1 … C of each item's category; padding's is 0."""
        super().__init__(len(categories) - 1, width, tied=tied, mask=mask, rows=int(categories.max()))
        self.register_buffer("categories", torch.from_numpy(categories))

    def answerable(self, counts: np.ndarray) -> np.ndarray:
        """Items of a category that was trained on."""
        categories = self.categories.cpu().numpy()
        answerable: np.ndarray = (np.bincount(categories, weights=counts) > 0)[categories]
        return answerable

    def extended(self, facts: DataFacts) -> CategoryTable:
        """`facts.categories` are numbers of this table's categories."""
        assert facts.categories is not None and facts.categories.max() < len(self.into)
        new_categories = torch.from_numpy(facts.categories[1:]).to(self.categories.device)
        return lengthened(self, {"categories": torch.cat((self.categories, new_categories))}, {})

    def output(self, numbers: Tensor | None = None) -> Tensor:
        return self._rows(self.outward, self.categories if numbers is None else self.categories[numbers])

    def _read(self, numbers: Tensor) -> Tensor:
        return self._rows(self.into, self.categories[numbers])


T = TypeVar("T", bound=ItemTable)


def lengthened(table: T, buffers: dict[str, Tensor], parameters: dict[str, nn.Parameter]) -> T:
    """A copy with more items. It shares all tensors but `buffers` and `parameters`, so no large table is copied."""
    longer = copy.copy(table)
    longer._buffers = {**table._buffers, **buffers}
    longer._parameters = {**table._parameters, **parameters}
    for name in parameters:
        longer.__dict__.pop(name, None)  # a plain attribute would shadow the parameter
    longer.n_items = len(next(iter(buffers.values()))) - 1
    return longer


class ItemTableSettings(Kind, frozen=True):
    """The methods of every kind of item table."""

    shared: ClassVar[bool] = True
    """Whether items share weights, so that a negative also lowers the scores of other items."""

    def refuse_silent_catalogue(self, vocabulary: Vocabulary) -> None:
        """Refuse a catalogue without the content that these settings need."""

    def facts(self, vocabulary: Vocabulary, known: DataFacts = NO_FACTS) -> DataFacts:  # noqa: ARG002
        """`known` and the facts of the catalogue that a table of this kind needs. `known` are the event kinds, the
        items' codes and the text encoder of a trained model; without one, this fits one to the catalogue."""
        return known

    def table(self, facts: DataFacts, n_items: int, width: int, *, mask: bool, bias: bool) -> ItemTable:
        """The table, with a mask token if `mask`, and with item biases if `bias` and this kind has them."""
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

    column: Annotated[str, Meta(min_length=1)]
    """The column of the catalogue."""
    tied: bool = True
    """Whether one vector serves as input and as output, or each has its own."""

    def refuse_silent_catalogue(self, vocabulary: Vocabulary) -> None:
        vocabulary.categories(self.column)

    def facts(self, vocabulary: Vocabulary, known: DataFacts = NO_FACTS) -> DataFacts:
        return replace(known, categories=vocabulary.categories(self.column))

    def table(self, facts: DataFacts, n_items: int, width: int, *, mask: bool, bias: bool) -> ItemTable:  # noqa: ARG002
        assert facts.categories is not None and len(facts.categories) == n_items + 1
        return CategoryTable(facts.categories, width, tied=self.tied, mask=mask)
