"""One user's window, encoded once and continued with every new event.

Tokens that look back only, at places counted from the oldest, do not change when others come after them, so what later
ones need of them is kept. It is of use while a window begins with the very events that it was made from. Nobody has to
say that an event came late, that one was deleted or that the window moved on: it shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from segue.data.batch import Batch
from segue.layers.incremental import Incremental, VectorMap, array, numpy_map
from segue.layers.packed import tensors
from segue.layers.positions.time_buckets import time_buckets
from segue.models.inputs import ItemInputs
from segue.models.items.tables import IdTable
from segue.models.sequence import SequenceModel
from segue.models.similarity.dot import LEAST_LENGTH, Dot

ROOM = 32  # tokens by which a memory grows: that of a short history stays small
MOST_TOKENS = 8  # that are encoded one by one; about here the whole window takes no longer
OVERHEAD = 1000  # bytes that a memory takes beside its arrays, about


class KVCache:
    """What is kept of one user's window. For one thread at a time."""

    def __init__(self, made_from: tuple[bytes, ...], kept: np.ndarray) -> None:
        self.made_from = made_from  # the window's items, times and values
        self.kept = kept  # [blocks, 2, H, capacity, d] float32
        self.question: np.ndarray | None = None  # [Q]: after these events, once a token was encoded alone

    @property
    def size(self) -> int:
        """Bytes."""
        return OVERHEAD + sum(map(len, self.made_from)) + self.kept.nbytes


class IncrementalEncoder:
    """A model that keeps what it encodes, and then encodes what is new: it asks as `SequenceModel.query` does.

    For a model in evaluation mode that is not trained any more.
    """

    def __init__(self, model: SequenceModel) -> None:
        assert model.incremental
        blocks = [cast(Incremental, block) for block in model.blocks]
        self._model = model
        self._token_steps = [block.token_step() for block in blocks]
        self._norm_tokens, self._norm, self._head = numpy_map(model.norm_tokens), numpy_map(model.norm), _head(model)
        self._places, self._scale = array(model.positions.table), np.float32(model.scale)
        self._timed = any(block.timed for block in blocks)
        self._valued = type(model.inputs) is not ItemInputs
        # Where a token is a row of the table, it is not worth a call of torch.
        self._table = array(model.items.into) if type(model.items) is IdTable and not self._valued else None
        self._each = model.inputs.tokens_an_event
        # A token that looks back from the moment of the next event is settled when that event has come.
        self._unsettled = 1 if model.target_time else 0

    def encode(self, windows: Batch, remembered: Sequence[int]) -> tuple[Tensor, list[KVCache]]:
        """The questions after whole windows [B, Q], and memories of the users in these rows."""
        with torch.inference_mode():
            questions, users = self._model.query_with_kv(tensors(windows), remembered)
        memories = [
            KVCache(self._made_from(window_of(windows, row)), self._with_capacity(kept.permute(0, 2, 3, 1, 4).numpy()))
            for row, kept in zip(remembered, users, strict=True)
        ]
        return questions, memories

    def extend(self, memory: KVCache, window: Batch) -> np.ndarray | None:
        """The question after the window of one user [Q]; `memory` is brought up to it.

        None where it cannot be, as the window does not begin with the events remembered, or would take as long to
        encode whole.
        """
        made_from = self._made_from(window)
        if not all(map(bytes.startswith, made_from, memory.made_from)):
            return None
        same = len(made_from[0]) == len(memory.made_from[0])
        if same and memory.question is not None and not self._unsettled:
            return memory.question
        known = len(memory.made_from[0]) // window.items.itemsize * self._each
        first = known - 1 if same else known - self._unsettled
        tokens = len(window.items) * self._each
        if tokens - first > MOST_TOKENS:
            return None
        if memory.kept.shape[3] < tokens:
            memory.kept = self._with_capacity(memory.kept[:, :, :, :first], tokens)
        memory.question = self._head(self._newest(memory.kept, window, first))
        memory.made_from = made_from
        return memory.question

    def _newest(self, kept: np.ndarray, window: Batch, first: int) -> np.ndarray:
        """The state at the newest token [D], all from `first` on having gone through the blocks."""
        buckets, x = self._buckets(window, first), kept
        with np.errstate(over="ignore"):  # a closed gate is 1 / infinity
            for place, vector in enumerate(self._vectors(window, first), first):
                seen = None if buckets is None else buckets[place - first, : place + 1]
                x = self._norm_tokens(vector)
                for token_step, rows in zip(self._token_steps, kept, strict=True):
                    x = token_step(x, rows[:, :, : place + 1], seen)
            return self._norm(x)

    def _vectors(self, window: Batch, first: int) -> np.ndarray:
        """The tokens from `first` on, at their places [m, D]."""
        event = first // self._each
        if self._table is not None:
            vectors = self._table[window.items[event:]]
        else:
            new = Batch(
                items=window.items[event:],
                times=window.times[event:],
                lengths=window.lengths - event,
                values=None if window.values is None else window.values[event:],
            )
            with torch.inference_mode():
                tokens = self._model.inputs(self._model.items, self._model.inputs.expanded(tensors(new)))
            vectors = tokens[first - event * self._each :].numpy()
        placed: np.ndarray = vectors * self._scale
        placed += self._places[first : first + len(placed)]
        return placed

    def _buckets(self, window: Batch, first: int) -> np.ndarray | None:
        """Of the time between every token and the moments that those from `first` on look back from [m, n]."""
        if not self._timed:
            return None
        times = window.times if self._each == 1 else window.times.repeat(self._each)
        moments = times[first:]
        if self._unsettled:
            query_times = times[-1:] if window.query_times is None else window.query_times
            moments = np.concatenate((times[first + 1 :], query_times))
        buckets: np.ndarray = time_buckets(torch.from_numpy(moments[:, None] - times)).numpy()
        return buckets

    def _made_from(self, window: Batch) -> tuple[bytes, ...]:
        """What the tokens of a window depend on; a prefix of it is that of its first events."""
        if not self._valued:
            return window.items.tobytes(), window.times.tobytes()
        values = np.full(len(window.items), np.nan, dtype=np.float32) if window.values is None else window.values
        return window.items.tobytes(), window.times.tobytes(), values.tobytes()

    def _with_capacity(self, kept: np.ndarray, tokens: int = 0) -> np.ndarray:
        """A copy with room for so many tokens, and some more."""
        *before, rows, features = kept.shape
        capacity = min(-(-max(tokens, rows) // ROOM) * ROOM, len(self._places))
        padded = np.empty((*before, capacity, features), dtype=np.float32)
        padded[:, :, :, :rows] = kept
        return padded


def _head(model: SequenceModel) -> VectorMap:
    """`SequenceModel.head` for one state [D] → [Q]; where that is an inner product's or a cosine's, without torch."""
    width, similarity = model.width, model.similarity
    plain = isinstance(model.query_transform, nn.Identity) and isinstance(model.output, nn.Identity)
    if isinstance(similarity, Dot) and plain and model.items.bias is None:
        if similarity.normal:
            return lambda state: state[:width] / max(math.sqrt(state[:width].dot(state[:width])), LEAST_LENGTH)
        return lambda state: state[:width]

    def head(state: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            question: np.ndarray = model.head(torch.from_numpy(state[None]))[0].numpy()
        return question

    return head


def window_of(windows: Batch, row: int) -> Batch:
    """One user's."""
    end = int(windows.lengths[: row + 1].sum())
    events = slice(end - int(windows.lengths[row]), end)
    return Batch(
        items=windows.items[events],
        times=windows.times[events],
        lengths=windows.lengths[row : row + 1],
        query_times=None if windows.query_times is None else windows.query_times[row : row + 1],
        values=None if windows.values is None else windows.values[events],
    )
