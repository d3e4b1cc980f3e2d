"""Events → tokens. An event is one token, or two if its value is a token of its own. Other files do not
distinguish them: `encode` returns one state per event."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from segue.errors import SettingsError
from segue.kinds import Count, Kind
from segue.layers.packed import PackedBatch
from segue.layers.positions.periods import ABSOLUTE, RELATIVE, Periods, log_seconds
from segue.models.items.tables import ItemTable

LOG_FOUR_WEEKS = 14.7  # the logarithm of four weeks in seconds; it scales logarithms of times to about one
TIME_WEIGHT_SCALE = 0.2  # initial weights of times, relative to those of items

TimeSignal = Literal["absolute", "since-newest", "since-previous"]
FIVE_STARS = (1.5, 2.5, 3.5, 4.5)


class ItemInputs(nn.Module):
    """Turns events into tokens, and states of tokens into states of events. In this base class, a token is an item."""

    tokens_an_event = 1
    incremental = True
    """Whether a token depends on its own event alone, so that later events do not change it."""
    timed = False
    """Whether tokens depend on times."""
    kinded = False
    """Whether tokens depend on kinds of events."""

    def __init__(self, width: int) -> None:
        """`width`: features of a token."""
        super().__init__()
        self.width = width

    def forward(self, items: ItemTable, batch: PackedBatch) -> Tensor:
        """The tokens of an expanded batch [T', W]."""
        return items.input(batch.items)

    def expanded(self, batch: PackedBatch) -> PackedBatch:
        """The batch with `tokens_an_event` tokens for each event."""
        return batch

    def at_events(self, states: Tensor) -> Tensor:
        """States of tokens [T', W] → the state at the last token of each event [T, W]."""
        return states

    def between_events(self, weights: Tensor) -> Tensor:
        """Attention weights between tokens [..., N', N'] → between events [..., N, N]."""
        return weights


class ValueTable(nn.Module):
    """A learned vector for each range of values, and one for events without a value."""

    edges: Tensor

    def __init__(self, edges: tuple[float, ...], width: int) -> None:
        """A value belongs to the range that begins with the highest of the `edges` not above it."""
        super().__init__()
        self.register_buffer("edges", torch.tensor(edges), persistent=False)  # they are in the settings
        self.table = nn.Parameter(torch.zeros(len(edges) + 2, width))

    def forward(self, values: Tensor | None, tokens: int) -> Tensor:
        """[T] → [T, width]; None: `tokens` events without a value."""
        if values is None:
            return self.table[:1].expand(tokens, -1)
        rows = torch.bucketize(values.contiguous(), self.edges, right=True) + 1
        return functional.embedding(rows.masked_fill(values.isnan(), 0), self.table)


class RatedInputs(ItemInputs):
    """A token is the concatenation of an item's vector and its value's. Only the item's features make the query."""

    def __init__(self, width: int, value_width: int, edges: tuple[float, ...]) -> None:
        super().__init__(width + value_width)
        self.values = ValueTable(edges, value_width)

    def forward(self, items: ItemTable, batch: PackedBatch) -> Tensor:
        vectors = super().forward(items, batch)
        return torch.cat((vectors, self.values(batch.values, vectors.shape[0])), dim=1)


class CombinedInputs(ItemInputs):
    """An event is two tokens with the same time, its item and then its value. The state of the second is the query for
    the next item: the first does not know the value yet.
    """

    tokens_an_event = 2

    def __init__(self, width: int, edges: tuple[float, ...]) -> None:
        super().__init__(width)
        self.values = ValueTable(edges, width)

    def forward(self, items: ItemTable, batch: PackedBatch) -> Tensor:
        vectors = items.input(batch.items[::2])
        values = self.values(None if batch.values is None else batch.values[::2], vectors.shape[0])
        return torch.stack((vectors, values), dim=1).flatten(0, 1)

    def expanded(self, batch: PackedBatch) -> PackedBatch:
        return batch.with_tokens_twice()

    def at_events(self, states: Tensor) -> Tensor:
        return states[1::2]

    def between_events(self, weights: Tensor) -> Tensor:
        from_values = weights[..., 1::2, :]
        return from_values[..., ::2] + from_values[..., 1::2]


class KindTable(nn.Module):
    """A learned vector for each kind of event, and one, zero at initialisation, for events of an unknown kind."""

    def __init__(self, kinds: int, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(kinds + 1, width))

    def forward(self, kinds: Tensor | None, tokens: int) -> Tensor:
        """[T] → [T, width]; None: `tokens` events of an unknown kind."""
        if kinds is None:
            return self.table[-1:].expand(tokens, -1)
        return functional.embedding(kinds, self.table)

    def clear_unknown(self) -> None:
        with torch.no_grad():
            self.table[-1] = 0


class EventInputs(ItemInputs):
    """A token is a linear map of an event's item, kind, value and times side by side.

    The item's vector is scaled to length √width, so that its features are of size one like the others. A missing value
    or time is zero; an indicator feature is one if the value is known.

    As in PinnerFormer, a time may be relative to the newest event of the window. A token then changes with the time of
    later events, so there is no incremental encoding.
    """

    incremental = False

    def __init__(
        self, item_width: int, width: int, *, kinds: int, kind_width: int, times: Sequence[TimeSignal]
    ) -> None:
        super().__init__(width)
        self.kinds = KindTable(kinds, kind_width) if kinds else None
        self.signals = tuple(times)
        self.timed, self.kinded = bool(times), bool(kinds)
        periods = [Periods(ABSOLUTE if name == "absolute" else RELATIVE) for name in times]
        self.periods = nn.ModuleList(periods)
        self.time_width = sum(part.width + 1 for part in periods)
        self.joined = nn.Linear(item_width + (kind_width if kinds else 0) + 2 + self.time_width, width)

    def forward(self, items: ItemTable, batch: PackedBatch) -> Tensor:
        vectors = items.input(batch.items)
        parts = [functional.normalize(vectors, dim=1) * vectors.shape[1] ** 0.5]
        if self.kinds is not None:
            parts.append(self.kinds(batch.kinds, vectors.shape[0]))
        parts += [_value_features(batch.values, vectors), *self._times(batch, vectors)]
        tokens: Tensor = self.joined(torch.cat(parts, dim=1))
        return tokens

    def quieten_times(self) -> None:
        """Scale down the initial weights of times: they have over a hundred features, most of them uninformative, which
        would otherwise dominate the item in the first epochs."""
        with torch.no_grad():
            self.joined.weight[:, self.joined.in_features - self.time_width :] *= TIME_WEIGHT_SCALE

    def _times(self, batch: PackedBatch, like: Tensor) -> list[Tensor]:
        """Time features [T, features of a signal], zero for users without times."""
        has_times, times = batch.per_token(batch.has_times)[:, None].to(like.dtype), batch.times
        parts = []
        for name, periods in zip(self.signals, self.periods, strict=True):
            match name:
                case "absolute":
                    seconds = times
                case "since-newest":
                    seconds = batch.per_token(times[batch.last]) - times
                case "since-previous":
                    seconds = torch.where(batch.position == 0, 0, times - times.roll(1, dims=0))
            logarithm = (log_seconds(seconds) / LOG_FOUR_WEEKS).to(like.dtype)
            parts.append(torch.cat((periods(seconds), logarithm[:, None]), dim=1) * has_times)
        return parts


def _value_features(values: Tensor | None, like: Tensor) -> Tensor:
    """sign(v) · log(1 + |v|) of each value, and one; zeros for events without a value [T, 2]."""
    if values is None:
        return like.new_zeros(like.shape[0], 2)
    largest = torch.finfo(torch.float32).max  # values of a request are float64
    has_value = ~values.isnan()
    finite = torch.where(has_value, values, 0.0).clamp(-largest, largest).to(like.dtype)
    return torch.stack((finite.sign() * finite.abs().log1p(), has_value.to(like.dtype)), dim=1)


class _InputSettings(Kind, frozen=True):
    """The methods of every kind of inputs."""

    def extra_width(self) -> int:
        """Features of a token beyond `model.width`."""
        return 0

    def build(self, item_width: int, width: int, kinds: int) -> ItemInputs:
        """Inputs of tokens with `width` features, from items with `item_width` and events of so many kinds."""
        raise NotImplementedError


class ItemInputSettings(_InputSettings, frozen=True, tag="items"):
    """A token is an item."""

    def build(self, item_width: int, width: int, kinds: int) -> ItemInputs:  # noqa: ARG002  # items are as wide as tokens
        return ItemInputs(width)


class RatedInputSettings(_InputSettings, frozen=True, tag="rated"):
    """A token is an item and its event's value, side by side."""

    value_width: Count = 8
    """Features of a value."""
    value_edges: tuple[float, ...] = FIVE_STARS
    """Bounds between ranges of values, ascending. Values in one range share a vector. The default has a range for each
    of five stars."""

    def __post_init__(self) -> None:
        _refuse_unordered(self.value_edges)

    def extra_width(self) -> int:
        return self.value_width

    def build(self, item_width: int, width: int, kinds: int) -> ItemInputs:  # noqa: ARG002  # as above
        return RatedInputs(width, self.value_width, self.value_edges)


class CombinedInputSettings(_InputSettings, frozen=True, tag="combined"):
    """An event is two tokens: its item, then its value."""

    value_edges: tuple[float, ...] = FIVE_STARS
    """Bounds between ranges of values, ascending. Values in one range share a vector."""

    def __post_init__(self) -> None:
        _refuse_unordered(self.value_edges)

    def build(self, item_width: int, width: int, kinds: int) -> ItemInputs:  # noqa: ARG002  # as above
        return CombinedInputs(width, self.value_edges)


class EventInputSettings(_InputSettings, frozen=True, tag="events"):
    """A token is a whole event: item, kind, value and times side by side through a linear map."""

    kind_width: Count = 16
    """Features of an event's kind."""
    times: tuple[TimeSignal, ...] = ("absolute", "since-newest", "since-previous")
    """Time features of a token: the date; the time before the newest event in the window; the time since the previous
    event. With 'since-newest', tokens depend on the time of the newest event, and on nothing else of later events."""

    def __post_init__(self) -> None:
        if len(set(self.times)) < len(self.times):
            raise SettingsError(f"model.inputs.times must name each signal once, got {list(self.times)}.")

    def build(self, item_width: int, width: int, kinds: int) -> ItemInputs:
        return EventInputs(item_width, width, kinds=kinds, kind_width=self.kind_width, times=self.times)


InputSettings = ItemInputSettings | RatedInputSettings | CombinedInputSettings | EventInputSettings


def _refuse_unordered(edges: tuple[float, ...]) -> None:
    if not edges or any(not low < high for low, high in pairwise(edges)):
        raise SettingsError(f"model.inputs.value_edges must be ascending numbers, at least one, got {list(edges)}.")
