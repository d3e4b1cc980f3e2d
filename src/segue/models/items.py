"""Item tables: numbers → vectors, on the way in and on the way out. Row 0 is padding: zero, and never trained."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from segue.data.vocabulary import PADDING


class IdTable(nn.Module):
    """A learned vector for every item; tied, one for both ways."""

    def __init__(self, n_items: int, width: int, *, tied: bool) -> None:
        super().__init__()
        self.into = nn.Parameter(torch.zeros(n_items + 1, width))
        self.out = None if tied else nn.Parameter(torch.zeros(n_items + 1, width))

    @property
    def n_items(self) -> int:
        return len(self.into) - 1

    def input(self, numbers: Tensor) -> Tensor:
        return functional.embedding(numbers, self.into, padding_idx=PADDING)

    def output(self, numbers: Tensor | None = None) -> Tensor:
        """Vectors of these items, or of all of them [V + 1, D]."""
        table = self.into if self.out is None else self.out
        return table if numbers is None else functional.embedding(numbers, table, padding_idx=PADDING)

    def clear_padding(self) -> None:
        with torch.no_grad():
            self.into[PADDING] = 0
            if self.out is not None:
                self.out[PADDING] = 0
