"""An item table of codes: an item has a few small numbers, each the index of a vector that many items share.

RecJPQ: Petrov and Macdonald, "RecJPQ: Training Large-Catalogue Sequential Recommenders", WSDM 2024.
`code_assignment.py` assigns the codes. A score is a sum of numbers from small tables, here and in `index/`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.nn import functional

from segue.data.vocabulary import PADDING
from segue.kinds import Count
from segue.models.items.tables import DataFacts, ItemTable, ItemTableSettings
from segue.models.similarity.dot import LEAST_LENGTH

AT_A_TIME = 1 << 16  # items scored at a time, which bounds the memory for their rows


class CodeTable(ItemTable):
    """An item's vector is the concatenation of its parts, and its fixed codes choose the vector of each part. Only
    `parts` times `values` short vectors are learned. Items with the same codes have equal scores."""

    codes: Tensor
    firsts: Tensor

    def __init__(self, codes: np.ndarray, width: int, *, values: int, tied: bool, mask: bool = False) -> None:
        """`codes` [V + 1, parts] uint8, each below `values`; row 0 is ignored."""
        super().__init__(len(codes) - 1, width, mask=mask)
        self.parts, self.values = codes.shape[1], values
        assert width % self.parts == 0
        # Row 0 is padding, as in a table of ids.
        self.into = nn.Parameter(torch.zeros(self.parts * values + 1, width // self.parts))
        self.out = None if tied else nn.Parameter(torch.zeros_like(self.into))
        self.register_buffer("codes", torch.from_numpy(codes))
        firsts = torch.arange(self.parts, dtype=torch.int32) * values + 1
        self.register_buffer("firsts", firsts, persistent=False)

    @property
    def centroids(self) -> Tensor:
        """The output vectors that parts choose from [parts, values, D / parts]."""
        return self.outward[1:].view(self.parts, self.values, -1)

    def output(self, numbers: Tensor | None = None) -> Tensor:
        if numbers is None:
            numbers = torch.arange(self.n_items + 1, device=self.codes.device)
        return self._vectors(self.outward, numbers)

    def score(self, queries: Tensor, *, normal: bool) -> Tensor:
        """Inner products of queries [B, D] with all items [B, V + 1], as sums of one number from each part's table of
        products; with `normal`, items are scaled to length one."""
        tables, scores = self.tables(queries), []
        for numbers in torch.split(torch.arange(self.n_items + 1, device=self.codes.device), AT_A_TIME):
            products = functional.embedding_bag(self.code_rows(numbers), tables, mode="sum")  # [v, B]
            scores.append(products / self.lengths(numbers)[:, None] if normal else products)
        return torch.cat(scores).T

    def tables(self, queries: Tensor) -> Tensor:
        """The products of queries [B, D] with all centroids, after a row of zeros [parts · values + 1, B]."""
        query_parts = queries.view(len(queries), self.parts, -1).permute(1, 2, 0)
        return functional.pad(torch.bmm(self.centroids, query_parts).flatten(0, 1), (0, 0, 1, 0))

    def code_rows(self, numbers: Tensor) -> Tensor:
        """The rows of these items' codes in the tables of products and of vectors [..., parts] int32."""
        return (self.codes[numbers] + self.firsts) * (numbers != PADDING).unsqueeze(-1)

    def lengths(self, numbers: Tensor) -> Tensor:
        """The lengths of these items' output vectors [n]."""
        squares = functional.embedding(self.code_rows(numbers), self.outward.square().sum(1, keepdim=True))
        return squares.sum((1, 2)).clamp(min=LEAST_LENGTH**2).sqrt()

    def _read(self, numbers: Tensor) -> Tensor:
        return self._vectors(self.into, numbers)

    def _vectors(self, table: Tensor, numbers: Tensor) -> Tensor:
        return functional.embedding(self.code_rows(numbers), table, padding_idx=PADDING).flatten(-2)


class CodeSettings(ItemTableSettings, frozen=True, tag="codes"):
    """An item's vector consists of parts that many items share, for catalogues whose vectors do not fit into memory."""

    parts: Count = 8
    """Parts of an item's vector; an item takes one byte for each."""
    values: Annotated[int, Meta(ge=2, le=256)] = 256
    """Vectors that a part chooses from; at most as many as there are items."""
    assignment: Literal["clusters", "learned"] = "clusters"
    """How codes are assigned: by clusters of items that are close together in training histories, or by product
    quantisation of the item vectors of a small model that is trained first, which is more accurate."""
    tied: bool = True
    """Whether one vector serves as input and as output, or each has its own."""

    def table(self, facts: DataFacts, n_items: int, width: int, *, mask: bool, bias: bool) -> ItemTable:  # noqa: ARG002
        assert facts.codes is not None and len(facts.codes) == n_items + 1
        return CodeTable(facts.codes, width, values=min(self.values, n_items), tied=self.tied, mask=mask)
