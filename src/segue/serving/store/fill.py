"""A data folder → the histories in an empty store, once; a stopped filling goes on where it stopped."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import numpy as np

from segue.data.dataset import Data
from segue.serving.store.store import FillState, HistoryStore, Row

CHUNK_EVENTS = 50_000  # in memory and in a transaction at a time; a longer history stands alone


class FillReport(msgspec.Struct, frozen=True):
    """What was added, by this call."""

    users: int
    events: int
    message: str
    """What happened, in a sentence."""


def fill_store(store: HistoryStore, data: Data, progress: Callable[[int], None] | None = None) -> FillReport:
    """Add everybody's events to a store that has none; `progress` is told how many events of the data are in it.

    Each chunk of users is added in one transaction with how far it brings the filling, so it may be stopped anywhere
    and called again, by several processes at once too, while new events arrive. A store that holds other events, or
    another data folder's, is left as it is, and the message says so. Times of a log without dates are its order.
    """
    state = _begun(store, data)
    if state is None:
        return _nothing(f"The store holds events that did not come from {data.folder}; it is left as it is.")
    if state.digest != data.digest:
        return _nothing(f"The store was filled from other data than {data.folder} holds now; it is left as it is.")
    if state.finished:
        return _nothing(f"The store has the histories of {data.folder} already.")
    data.verify()  # everything is read anyway
    return _filled(store, data, state, progress)


def _filled(store: HistoryStore, data: Data, state: FillState, progress: Callable[[int], None] | None) -> FillReport:
    offsets, users, events = data.sequences.offsets, 0, 0
    while not state.finished:
        begin = state.next_user
        end = _chunk_end(offsets, begin)
        reached = FillState(digest=state.digest, next_user=end, finished=end == data.sequences.n_users)
        if store.fill(_histories(data, begin, end), reached, expected=state):
            state, users, events = reached, users + end - begin, events + int(offsets[end] - offsets[begin])
        else:  # another process filled meanwhile: go on from where it is
            state = store.fill_state() or state
        if progress is not None:
            progress(int(offsets[state.next_user]))
    return FillReport(users, events, f"The store was filled from {data.folder}: {events} events of {users} users.")


def _nothing(message: str) -> FillReport:
    return FillReport(users=0, events=0, message=message)


def _begun(store: HistoryStore, data: Data) -> FillState | None:
    """The state to go on from, None for a store that holds events from elsewhere."""
    start = FillState(digest=data.digest, next_user=0, finished=False)
    return store.fill_state() or (start if store.fill([], start, expected=None) else store.fill_state())


def _chunk_end(offsets: np.ndarray, begin: int) -> int:
    """The first user after a chunk that begins with a user."""
    end = int(np.searchsorted(offsets, offsets[begin] + CHUNK_EVENTS, side="right")) - 1
    return min(max(begin + 1, end), len(offsets) - 1)


def _histories(data: Data, begin: int, end: int) -> list[tuple[str, list[Row]]]:
    """Users from one number up to another, with all their events, oldest first."""
    sequences = data.sequences
    cuts = np.asarray(sequences.offsets[begin : end + 1])
    events = slice(int(cuts[0]), int(cuts[-1]))
    n_events = events.stop - events.start
    kinds: list[str | None] = [None] * n_events
    values: list[float | None] = [None] * n_events
    if sequences.kinds is not None:
        names = [name or None for name in data.kinds]
        kinds = [names[kind] for kind in sequences.kinds[events].tolist()]
    if sequences.values is not None:
        values = [value if math.isfinite(value) else None for value in sequences.values[events].tolist()]
    items = data.vocabulary.ids(sequences.items[events])
    rows = list(zip(items, sequences.times[events].tolist(), kinds, values, strict=True))
    places = (cuts - cuts[0]).tolist()
    ids = data.users.ids(np.arange(begin, end))
    return [(user, rows[one:two]) for user, one, two in zip(ids, places, places[1:], strict=False)]
