"""What a token is made of: an item, an item and its event's value side by side, or the two as tokens of their own."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from segue.layers.packed import PackedBatch
from segue.models.items import ItemTable
from segue.models.settings import ModelSettings


class Inputs(Protocol):
    """From events to tokens, and back to the states that stand for events."""

    width: int
    """Features of a token."""
    tokens_an_event: int

    def __call__(self, items: ItemTable, batch: PackedBatch) -> Tensor:
        """The tokens of a batch that was expanded [T', W]."""
        ...

    def expanded(self, batch: PackedBatch) -> PackedBatch:
        """The batch with as many tokens as the events have together."""
        ...

    def at_events(self, states: Tensor) -> Tensor:
        """The states [T', W] that know everything of their event and nothing of the next [T, W]."""
        ...

    def between_events(self, weights: Tensor) -> Tensor:
        """Attention weights between tokens [..., N', N'] as weights between events [..., N, N]."""
        ...


class ItemInputs(nn.Module):
    """A token is an item."""

    tokens_an_event = 1

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, items: ItemTable, batch: PackedBatch) -> Tensor:
        return items.input(batch.items)

    def expanded(self, batch: PackedBatch) -> PackedBatch:
        return batch

    def at_events(self, states: Tensor) -> Tensor:
        return states

    def between_events(self, weights: Tensor) -> Tensor:
        return weights


class ValueTable(nn.Module):
    """A learned vector for each range of values, and one for events without a value."""

    edges: Tensor

    def __init__(self, edges: tuple[float, ...], width: int) -> None:
        """A value belongs to the range that begins with the highest of the `edges` not above it."""
        super().__init__()
        self.register_buffer("edges", torch.tensor(edges), persistent=False)  # the settings have them
        self.table = nn.Parameter(torch.zeros(len(edges) + 2, width))

    def forward(self, values: Tensor | None, tokens: int) -> Tensor:
        """[T] → [T, width]; without any values, `tokens` times that of an event without one."""
        if values is None:
            return self.table[:1].expand(tokens, -1)
        rows = torch.bucketize(values.contiguous(), self.edges, right=True) + 1
        return functional.embedding(rows.masked_fill(values.isnan(), 0), self.table)


class RatedInputs(ItemInputs):
    """A token is an item's vector and its value's, one after the other. Questions are asked with the item's part."""

    def __init__(self, width: int, value_width: int, edges: tuple[float, ...]) -> None:
        super().__init__(width + value_width)
        self.values = ValueTable(edges, value_width)

    def forward(self, items: ItemTable, batch: PackedBatch) -> Tensor:
        vectors = super().forward(items, batch)
        return torch.cat((vectors, self.values(batch.values, vectors.shape[0])), dim=1)


class CombinedInputs(nn.Module):
    """An event is two tokens, its item and then its value, at the same time; the second is asked for what comes next.

    The first cannot be: it does not know the value yet, and the value belongs to an event that has happened.
    """

    tokens_an_event = 2

    def __init__(self, width: int, edges: tuple[float, ...]) -> None:
        super().__init__()
        self.width = width
        self.values = ValueTable(edges, width)

    def forward(self, items: ItemTable, batch: PackedBatch) -> Tensor:
        vectors = items.input(batch.items[::2])
        values = self.values(None if batch.values is None else batch.values[::2], vectors.shape[0])
        return torch.stack((vectors, values), dim=1).flatten(0, 1)

    def expanded(self, batch: PackedBatch) -> PackedBatch:
        return batch.doubled()

    def at_events(self, states: Tensor) -> Tensor:
        return states[1::2]

    def between_events(self, weights: Tensor) -> Tensor:
        asking = weights[..., 1::2, :]
        return asking[..., ::2] + asking[..., 1::2]


def make_inputs(settings: ModelSettings) -> Inputs:
    """What `model.inputs` asks for."""
    match settings.inputs:
        case "items":
            return ItemInputs(settings.width)
        case "rated":
            return RatedInputs(settings.width, settings.value_width, settings.value_edges)
        case "combined":
            return CombinedInputs(settings.width, settings.value_edges)
