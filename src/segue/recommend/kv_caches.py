"""KV caches of the users that are requested repeatedly, in bounded memory: only their new events are encoded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from segue.data.batch import Batch, take
from segue.layers.packed import tensors
from segue.models.kv_cache import IncrementalEncoder, KVCache, window_of
from segue.models.sequence import SequenceModel

MEGABYTE = 1_000_000
LEAST_EVENTS = 16  # of a cached window: encoding a shorter one whole, in a batch, takes no longer
RECENT = 4096  # users requested last: a user is cached from the second request within these


class KVCaches:
    """The caches of one model by user; the least recently used are dropped first. For one thread at a time.

    A model that cannot encode incrementally encodes every window whole; so does a bound of 0 bytes.
    """

    def __init__(self, model: SequenceModel, *, most_bytes: int) -> None:
        self.bytes = 0
        self.most_bytes = most_bytes
        self._extended = self._whole = 0  # queries of which only new events, or the whole window, were encoded
        self._model = model
        self._encoder = IncrementalEncoder(model) if most_bytes and model.incremental else None
        self._caches: OrderedDict[str, KVCache] = OrderedDict()
        self._recent: OrderedDict[int, None] = OrderedDict()  # hashes, so that no dropped user's name stays here

    @property
    def users(self) -> list[str]:
        """The users with a cache, the least recently used first."""
        return list(self._caches)

    def use_model(self, model: SequenceModel) -> None:
        """Encode with a model that has more items and reads the others as before: the caches stay valid. Queries that
        are being computed may use either."""
        self._model = model
        self._encoder = None if self._encoder is None else IncrementalEncoder(model)

    def queries(self, windows: Batch, users: Sequence[str | None]) -> Tensor:
        """The query vector of each window [B, Q], as from `SequenceModel.query`."""
        if self._encoder is None:
            self._whole += len(users)
            return self._model.query(tensors(windows))
        extended = self._extend(windows, users, self._encoder)
        self._extended += len(extended)
        self._whole += len(users) - len(extended)
        with torch.inference_mode():
            if not extended:
                return self._encode(windows, users, self._encoder)
            queries = torch.empty(len(users), len(next(iter(extended.values()))))
            queries[list(extended)] = torch.from_numpy(np.stack(list(extended.values())))
            rest = [row for row in range(len(users)) if row not in extended]
            if rest:
                others = [users[row] for row in rest]
                queries[rest] = self._encode(take(windows, np.array(rest)), others, self._encoder)
            return queries

    def pop_counts(self) -> tuple[int, int]:
        """Queries since the last call: those of which only new events were encoded, and those of whole windows."""
        counts = self._extended, self._whole
        self._extended = self._whole = 0
        return counts

    def drop(self, user: str) -> None:
        """Drop the cache of a user, and that the user was requested."""
        self._recent.pop(hash(user), None)
        self._drop_cache(user)

    def _extend(
        self, windows: Batch, users: Sequence[str | None], encoder: IncrementalEncoder
    ) -> dict[int, np.ndarray]:
        """The query vectors [Q] of the rows whose users' caches could be extended to their windows."""
        extended: dict[int, np.ndarray] = {}
        for row, user in enumerate(users):
            cache = None if user is None else self._caches.get(user)
            if user is None or cache is None:
                continue
            before = cache.size
            query = encoder.extend(cache, window_of(windows, row))
            self.bytes += cache.size - before
            if query is None:
                self._drop_cache(user)
                self._is_recent(user)
            else:
                self._caches.move_to_end(user)
                extended[row] = query
        self._keep_bound()
        return extended

    def _encode(self, windows: Batch, users: Sequence[str | None], encoder: IncrementalEncoder) -> Tensor:
        """The query vectors of whole windows; users requested recently are cached."""
        cached = {
            row: user
            for row, (user, length) in enumerate(zip(users, windows.lengths.tolist(), strict=True))
            if user is not None and length >= LEAST_EVENTS and self._is_recent(user)
        }
        if not cached:
            return self._model.query(tensors(windows))
        queries, caches = encoder.encode(windows, list(cached))
        for user, cache in zip(cached.values(), caches, strict=True):
            self._drop_cache(user)
            self._caches[user] = cache
            self.bytes += cache.size
        self._keep_bound()
        return queries

    def _is_recent(self, user: str) -> bool:
        """Whether the user is among the recent ones; the call makes it one of them."""
        key = hash(user)
        recent = key in self._recent
        self._recent[key] = None
        self._recent.move_to_end(key)
        if len(self._recent) > RECENT:
            self._recent.popitem(last=False)
        return recent

    def _keep_bound(self) -> None:
        while self.bytes > self.most_bytes:
            self._drop_cache(next(iter(self._caches)))

    def _drop_cache(self, user: str) -> None:
        cache = self._caches.pop(user, None)
        if cache is not None:
            self.bytes -= cache.size
