"""Item tables: numbers → vectors, on the way in and on the way out. Row 0 is padding: zero, and never trained."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from segue.data.vocabulary import PADDING


class IdTable(nn.Module):
    """A learned vector for every item; tied, one for both ways."""

    sparse_gradients = False
    """Whether looking up rows gives a gradient of these rows only; the trainer decides it, by the table's size."""

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
        return table if numbers is None else self._rows(table, numbers)

    def biases(self, numbers: Tensor | None = None) -> Tensor:
        """What is added to the scores of these items, or of all of them [V + 1]."""
        assert self.bias is not None
        return self.bias if numbers is None else self.bias[numbers]

    def _rows(self, table: Tensor, numbers: Tensor) -> Tensor:
        return functional.embedding(numbers, table, padding_idx=PADDING, sparse=self.sparse_gradients)

    def clear_padding(self) -> None:
        with torch.no_grad():
            self.into[PADDING] = 0
            for table in (self.out, self.bias):
                if table is not None:
                    table[PADDING] = 0
