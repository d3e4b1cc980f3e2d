"""A data folder → histories in an empty store, once; an interrupted fill resumes."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import numpy as np

from segue.data.dataset import Data
from segue.serving.store.store import FillState, HistoryStore, Row

CHUNK_EVENTS = 50_000  # in memory and in one transaction; a longer history is a chunk of its own


class FillReport(msgspec.Struct, frozen=True):
    """What one call of `fill_store` added."""

    users: int
    events: int
    message: str


def fill_store(store: HistoryStore, data: Data, progress: Callable[[int], None] | None = None) -> FillReport:
    """Add all users' events to an empty store; `progress` is called with the number of events in it.

    Each chunk of users is added in one transaction together with the new fill state. So this may be interrupted and
    called again, also by several processes at once and while new events arrive. A store with other events, or those
    of other data, is not changed; the message reports it. In a log without dates, times are positions in the log.
    """
    start = FillState(digest=data.digest, next_user=0, finished=False)
    state = store.fill_state() or (start if store.fill([], start, expected=None) else store.fill_state())
    if state is None:
        return FillReport(0, 0, f"The store holds events that did not come from {data.folder}; it is left as it is.")
    if state.digest != data.digest:
        return FillReport(
            0, 0, f"The store was filled from other data than {data.folder} holds now; it is left as it is."
        )
    was_finished = state.finished
    if was_finished:
        return FillReport(0, 0, f"The store has the histories of {data.folder} already.")
    data.verify()  # all of it is read anyway
    offsets, n_users, users, events = data.sequences.offsets, data.sequences.n_users, 0, 0
    while not state.finished:
        begin = state.next_user
        chunk_end = int(np.searchsorted(offsets, offsets[begin] + CHUNK_EVENTS, side="right")) - 1
        end = min(max(begin + 1, chunk_end), n_users)
        new = FillState(digest=state.digest, next_user=end, finished=end == n_users)
        if store.fill(_histories(data, begin, end), new, expected=state):
            state, users, events = new, users + end - begin, events + int(offsets[end] - offsets[begin])
        else:  # another process has filled meanwhile: continue after it
            state = store.fill_state() or state
        if progress is not None:
            progress(int(offsets[state.next_user]))
    return FillReport(users, events, f"The store was filled from {data.folder}: {events} events of {users} users.")


def _histories(data: Data, begin: int, end: int) -> list[tuple[str, list[Row]]]:
    """Users `begin` to `end`, each with all events, oldest first."""
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
    bounds = (cuts - cuts[0]).tolist()
    ids = data.users.ids(np.arange(begin, end))
    return [(user, rows[one:two]) for user, one, two in zip(ids, bounds, bounds[1:], strict=False)]
