"""Incremental encoding: keys and values of a user's window are cached, and only new events are encoded.

With causal blocks and positions counted from the oldest token, tokens do not change when others are appended. A cache
is valid as long as the window begins with the events that it was made from, which is checked with every use: late
events, deletions and a window that has moved on need no invalidation.
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

CAPACITY_STEP = 32  # tokens by which a cache grows
MAX_NEW_TOKENS = 8  # encoded one by one; for more, encoding the whole window is about as fast
OVERHEAD = 1000  # bytes of a cache beside its arrays, about


class KVCache:
    """Keys and values of one user's window. Not thread-safe."""

    def __init__(self, events: tuple[bytes, ...], kv: np.ndarray) -> None:
        self.events = events  # items, times and values of the window
        self.kv = kv  # [blocks, 2, H, capacity, d] float32
        self.query: np.ndarray | None = None  # [Q]: after these events; set by `IncrementalEncoder.extend`

    @property
    def size(self) -> int:
        """Size in bytes."""
        return OVERHEAD + sum(map(len, self.events)) + self.kv.nbytes


class IncrementalEncoder:
    """Computes `SequenceModel.query` with cached keys and values, for a model in evaluation mode whose weights do not
    change."""

    def __init__(self, model: SequenceModel) -> None:
        assert model.incremental
        blocks = [cast(Incremental, block) for block in model.blocks]
        self._model = model
        self._token_steps = [block.token_step() for block in blocks]
        self._norm_tokens, self._norm, self._head = numpy_map(model.norm_tokens), numpy_map(model.norm), _head(model)
        self._positions, self._scale = array(model.positions.table), np.float32(model.scale)
        self._timed = any(block.timed for block in blocks)
        self._valued = type(model.inputs) is not ItemInputs
        # A token that is a row of a table needs no call of torch.
        self._table = array(model.items.into) if type(model.items) is IdTable and not self._valued else None
        self._tokens_an_event = model.inputs.tokens_an_event
        # With target times, the newest token depends on the time of the event after it.
        self._n_stale = 1 if model.target_time else 0

    def encode(self, windows: Batch, rows: Sequence[int]) -> tuple[Tensor, list[KVCache]]:
        """The queries of whole windows [B, Q], and caches of the users in `rows`."""
        with torch.inference_mode():
            queries, kvs = self._model.query_with_kv(tensors(windows), rows)
        caches = [
            KVCache(self._events(window_of(windows, row)), self._with_capacity(kv.permute(0, 2, 3, 1, 4).numpy()))
            for row, kv in zip(rows, kvs, strict=True)
        ]
        return queries, caches

    def extend(self, cache: KVCache, window: Batch) -> np.ndarray | None:
        """The query after one user's window [Q]; the cache is extended to it. None if the window does not begin with
        the cached events, or has so many new ones that encoding all is as fast."""
        events = self._events(window)
        if not all(map(bytes.startswith, events, cache.events)):
            return None
        same = len(events[0]) == len(cache.events[0])
        if same and cache.query is not None and not self._n_stale:
            return cache.query
        n_cached = len(cache.events[0]) // window.items.itemsize * self._tokens_an_event
        first = n_cached - 1 if same else n_cached - self._n_stale
        tokens = len(window.items) * self._tokens_an_event
        if tokens - first > MAX_NEW_TOKENS:
            return None
        if cache.kv.shape[3] < tokens:
            cache.kv = self._with_capacity(cache.kv[:, :, :, :first], tokens)
        cache.query = self._head(self._newest(cache.kv, window, first))
        cache.events = events
        return cache.query

    def _newest(self, kv: np.ndarray, window: Batch, first: int) -> np.ndarray:
        """Encode the tokens from `first` on; the state at the newest [D]."""
        buckets, x = self._buckets(window, first), kv
        with np.errstate(over="ignore"):  # a closed gate is 1 / infinity
            for position, vector in enumerate(self._tokens(window, first), first):
                token_buckets = None if buckets is None else buckets[position - first, : position + 1]
                x = self._norm_tokens(vector)
                for token_step, block_kv in zip(self._token_steps, kv, strict=True):
                    x = token_step(x, block_kv[:, :, : position + 1], token_buckets)
            return self._norm(x)

    def _tokens(self, window: Batch, first: int) -> np.ndarray:
        """The tokens from `first` on, with their positions [m, D]."""
        event = first // self._tokens_an_event
        if self._table is not None:
            vectors = self._table[window.items[event:]]
        else:
            new = window.tokens(slice(event, None), window.lengths - event)
            with torch.inference_mode():
                inputs = self._model.inputs(self._model.items, self._model.inputs.expanded(tensors(new)))
            vectors = inputs[first - event * self._tokens_an_event :].numpy()
        tokens: np.ndarray = vectors * self._scale
        tokens += self._positions[first : first + len(tokens)]
        return tokens

    def _buckets(self, window: Batch, first: int) -> np.ndarray | None:
        """Time buckets of each token from `first` on, as a query, with every token, as a key [m, n]."""
        if not self._timed:
            return None
        times = window.times if self._tokens_an_event == 1 else window.times.repeat(self._tokens_an_event)
        until = times[first:]
        if self._n_stale:
            query_times = times[-1:] if window.query_times is None else window.query_times
            until = np.concatenate((times[first + 1 :], query_times))
        buckets: np.ndarray = time_buckets(torch.from_numpy(until[:, None] - times)).numpy()
        return buckets

    def _events(self, window: Batch) -> tuple[bytes, ...]:
        """The bytes that the tokens of a window depend on; those of its first events are a prefix of each part."""
        if not self._valued:
            return window.items.tobytes(), window.times.tobytes()
        values = np.full(len(window.items), np.nan, dtype=np.float32) if window.values is None else window.values
        return window.items.tobytes(), window.times.tobytes(), values.tobytes()

    def _with_capacity(self, kv: np.ndarray, tokens: int = 0) -> np.ndarray:
        """A copy with capacity for at least so many tokens."""
        *leading, filled, features = kv.shape
        capacity = min(-(-max(tokens, filled) // CAPACITY_STEP) * CAPACITY_STEP, len(self._positions))
        padded = np.empty((*leading, capacity, features), dtype=np.float32)
        padded[:, :, :, :filled] = kv
        return padded


def _head(model: SequenceModel) -> VectorMap:
    """`SequenceModel.head` for one state [D] → [Q]; without torch for an inner product or a cosine."""
    width, similarity = model.items.width, model.similarity
    plain = isinstance(model.query_transform, nn.Identity) and isinstance(model.output, nn.Identity)
    if isinstance(similarity, Dot) and plain and model.items.bias is None:
        if similarity.normal:
            return lambda state: state[:width] / max(math.sqrt(state[:width].dot(state[:width])), LEAST_LENGTH)
        return lambda state: state[:width]

    def head(state: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            query: np.ndarray = model.head(torch.from_numpy(state[None]))[0].numpy()
        return query

    return head


def window_of(windows: Batch, row: int) -> Batch:
    """The window of one user."""
    end = int(windows.lengths[: row + 1].sum())
    events = slice(end - int(windows.lengths[row]), end)
    query_times = None if windows.query_times is None else windows.query_times[row : row + 1]
    return windows.tokens(events, windows.lengths[row : row + 1], query_times=query_times)
