"""Recommenders whose explanations are tested: one whose scores are sums of small whole numbers, and real ones."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import numpy as np
import polars as pl
import torch
from settings_tables import model_settings
from torch import Tensor, nn

from segue.data.vocabulary import Vocabulary
from segue.index.exact import ExactIndex
from segue.layers.packed import PackedBatch
from segue.models.build import build_model
from segue.models.sequence import SequenceModel
from segue.recommend.recommender import Recommender

LETTERS = list("abcdef")


class Votes(nn.Module):
    """The score of an item is the sum over events of (item's number * event's item) % 7."""

    length = 3
    window_step = 1
    timed, input_kinds = False, ()

    def __init__(self, n_items: int) -> None:
        super().__init__()
        numbers = torch.arange(n_items + 1)
        self.table = (numbers[:, None] * numbers[None, :] % 7).float()  # [item, event's item]
        self.tokens: list[int] = []  # of each call
        self.query_times: list[list[int] | None] = []

    def answerable(self, counts: np.ndarray) -> np.ndarray:
        return counts > 0

    def query(self, batch: PackedBatch) -> Tensor:
        self.tokens.append(len(batch.items))
        self.query_times.append(None if batch.query_times is None else batch.query_times.tolist())
        votes = nn.functional.one_hot(batch.items, len(self.table)).float()
        owners = torch.repeat_interleave(torch.arange(batch.size), batch.lengths)
        return torch.zeros(batch.size, len(self.table)).index_add_(0, owners, votes)

    def item_vectors(self) -> Tensor:
        return self.table

    def attention(self, batch: PackedBatch) -> None:
        """None: there is no attention."""


def recommender_of(model: nn.Module, ids: list[str], *, counts: list[int] | None = None, **further: Any) -> Recommender:
    """A recommender of items with titles; those with a count of zero are cold."""
    counts = counts or [1] * len(ids)
    table = pl.DataFrame({"id": ids, "count": counts, "title": [f"Title {name}" for name in ids]})
    sequence_model = cast(SequenceModel, model)
    index = ExactIndex.build(sequence_model.item_vectors(), candidates=np.array([0, *counts]) > 0)
    return Recommender(sequence_model, index, Vocabulary(table), **further)


def voting(**further: Any) -> Recommender:
    return recommender_of(Votes(len(LETTERS)), LETTERS, **further)


def network_recommender(ids: list[str], *, counts: list[int] | None = None, **numbers: Any) -> Recommender:
    options = model_settings(**({"width": 8, "depth": 2, "heads": 2, "length": 5} | numbers))
    model = build_model(options, len(ids), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        for parameter in model.parameters():  # no parameter is zero or one by its initialisation
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))
    return recommender_of(model, ids, counts=counts)


REAL_IDS = [f"i{number}" for number in range(9)]


@cache
def half_known(builder: str, positions: str, length: int = 5) -> Recommender:
    """Real models for which i2 is cold."""
    counts = [1, 1, 0, 1, 1, 1, 1, 1, 1]
    return network_recommender(REAL_IDS, counts=counts, kind=builder, positions=positions, length=length)
