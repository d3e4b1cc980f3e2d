"""An item table of codes: a few small numbers an item, each of which names a vector that many items share.

RecJPQ: Petrov and Macdonald, "RecJPQ: Training Large-Catalogue Sequential Recommenders", WSDM 2024. `assign.py` says
which codes items get.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.nn import functional

from segue.data.vocabulary import PADDING, Vocabulary
from segue.kinds import Count
from segue.models.facts import DataFacts
from segue.models.items.tables import ItemTable, ItemTableSettings
from segue.models.similarity.dot import LEAST_LENGTH
from segue.models.text.encoder import TextEncoder

AT_A_TIME = 1 << 16  # items scored at a time: what finds their parts is never in memory for all of them


class CodeTable(ItemTable):
    """An item's vector is its parts side by side, and its codes, which are not learned, say which vector each part is:
    `parts` times `values` short vectors are all that is learned, however many items there are.

    Items with the same codes cannot be told apart.
    """

    codes: Tensor
    firsts: Tensor

    def __init__(self, codes: np.ndarray, width: int, *, values: int, tied: bool, mask: bool = False) -> None:
        """`codes` [V + 1, parts] uint8, each below `values`; padding's mean nothing."""
        super().__init__(len(codes) - 1, width, mask=mask)
        self.parts, self.values = codes.shape[1], values
        assert width % self.parts == 0
        # Row 0 is padding's part, as it is in a table of ids.
        self.into = nn.Parameter(torch.zeros(self.parts * values + 1, width // self.parts))
        self.out = None if tied else nn.Parameter(torch.zeros_like(self.into))
        self.register_buffer("codes", torch.from_numpy(codes))
        firsts = torch.arange(self.parts, dtype=torch.int32) * values + 1
        self.register_buffer("firsts", firsts, persistent=False)

    @property
    def centroids(self) -> Tensor:
        """The vectors that parts of items may be, on the way out [parts, values, D / parts]."""
        return self._outward[1:].view(self.parts, self.values, -1)

    def output(self, numbers: Tensor | None = None) -> Tensor:
        everything = torch.arange(self.n_items + 1, device=self.codes.device) if numbers is None else numbers
        return self._vectors(self._outward, everything)

    def score(self, queries: Tensor, *, normal: bool) -> Tensor:
        """The inner products of questions [B, D] with every item [B, V + 1], without an item's vector ever being made;
        with `normal`, items have the length one.

        A part's products with all that it may be are a small table, and a score is a sum of one number of each: so
        items with the same codes have the very same score.
        """
        tables, scores = self.tables(queries), []
        for numbers in torch.split(torch.arange(self.n_items + 1, device=self.codes.device), AT_A_TIME):
            found = functional.embedding_bag(self.places(numbers), tables, mode="sum")  # [v, B]
            scores.append(found / self.lengths(numbers)[:, None] if normal else found)
        return torch.cat(scores).T

    def tables(self, queries: Tensor) -> Tensor:
        """The products of questions [B, D] with all that parts may be, padding's first [parts · values + 1, B]."""
        asked = queries.view(len(queries), self.parts, -1).permute(1, 2, 0)
        return functional.pad(torch.bmm(self.centroids, asked).flatten(0, 1), (0, 0, 1, 0))

    def places(self, numbers: Tensor) -> Tensor:
        """The rows of these items' parts, in the tables of products and of vectors [..., parts] int32."""
        return (self.codes[numbers] + self.firsts) * (numbers != PADDING).unsqueeze(-1)

    def lengths(self, numbers: Tensor) -> Tensor:
        """The lengths of these items' vectors on the way out [n]: squares add up part by part."""
        squares = functional.embedding(self.places(numbers), self._outward.square().sum(1, keepdim=True))
        return squares.sum((1, 2)).clamp(min=LEAST_LENGTH**2).sqrt()

    @property
    def _outward(self) -> Tensor:
        return self.into if self.out is None else self.out

    def _read(self, numbers: Tensor) -> Tensor:
        return self._vectors(self.into, numbers)

    def _vectors(self, table: Tensor, numbers: Tensor) -> Tensor:
        return functional.embedding(self.places(numbers), table, padding_idx=PADDING).flatten(-2)


class CodeSettings(ItemTableSettings, frozen=True, tag="codes"):
    """An item's vector is made of parts that many items share, for catalogues whose vectors do not fit into memory."""

    parts: Count = 8
    """Parts of an item's vector. One byte for each part is stored of an item."""
    values: Annotated[int, Meta(ge=2, le=256)] = 256
    """Vectors that a part chooses from; at most as many as there are items."""
    assignment: Literal["clusters", "learned"] = "clusters"
    """How codes are found: by clusters of items that come close together in training histories, or by product
    quantisation of the item vectors of a small model that is trained first, which is more accurate."""
    tied: bool = True
    """Whether one vector serves as input and as output, or each has its own."""

    def facts(
        self,
        vocabulary: Vocabulary,  # noqa: ARG002
        kinds: tuple[str, ...] = (),
        *,
        texts: TextEncoder | None = None,  # noqa: ARG002
        codes: np.ndarray | None = None,
    ) -> DataFacts:
        return DataFacts(codes=codes, kinds=kinds)

    def table(self, facts: DataFacts, n_items: int, width: int, *, mask: bool, bias: bool) -> ItemTable:  # noqa: ARG002
        assert facts.codes is not None and len(facts.codes) == n_items + 1
        return CodeTable(facts.codes, width, values=min(self.values, n_items), tied=self.tied, mask=mask)
