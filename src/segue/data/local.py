"""The local engine: a log → the core of its events, in their final order.

Text is read block by block; only the ids and a few numbers an event stay in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import narwhals as nw
import numpy as np
import polars as pl

from segue.data.read.gather import (
    GatheredEvents,
    Log,
    ProgressCallback,
    TimeDecision,
    decide_times,
    gather,
    no_user_left,
    open_log,
    refuse_single_item,
)
from segue.data.rules.judge import k_core
from segue.data.settings import PrepareSettings
from segue.data.write.events import Chunk, EventTable, repeated, tied
from segue.data.write.writer import Core, Numbers, final_numbers
from segue.folders import digest


@dataclass(frozen=True, slots=True)
class _LocalEngine:
    """An opened log and its settings."""

    log: Log
    settings: PrepareSettings
    progress: ProgressCallback
    digests: list[tuple[Path, Future[str]]]  # of its files, computed by another thread while they are read

    def decide_times(self) -> TimeDecision:
        return decide_times(self.log, self.settings, self.progress)

    def core(self, times: TimeDecision) -> Core:
        gathered = gather(self.log, times, self.settings, self.progress)
        return _core(gathered, self.settings, timed=times.rule is not None)

    def described(self) -> list[dict[str, Any]]:
        if not self.digests:
            return [{"table": each.label, "rows": each.size} for each in self.log.inputs]
        return [
            {"path": str(path.absolute()), "bytes": path.stat().st_size, "sha256": future.result()}
            for path, future in self.digests
        ]


@contextmanager
def open_local_engine(source: Any, settings: PrepareSettings, progress: ProgressCallback) -> Iterator[_LocalEngine]:
    """Open files or a table, and start to compute the digests of files."""
    log = open_log(source, settings)
    paths = [path for each in log.inputs if (path := getattr(each, "path", None)) is not None]
    pool = ThreadPoolExecutor(max_workers=1)
    try:
        yield _LocalEngine(log, settings, progress, [(path, pool.submit(digest, path)) for path in paths])
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


@dataclass(slots=True)
class _SortedEvents:
    """Yields the events of the core and clears the table; counts duplicates on the way."""

    table: EventTable
    users: Numbers
    items: Numbers
    kinds: Numbers | None
    timed: bool
    dropped: int | None  # duplicates that were removed before
    duplicates: int = 0

    def __iter__(self) -> Iterator[Chunk]:
        n_users, n_items, repeats = len(self.users.ids), len(self.items.ids), 0
        self.table.renumber_users(self.users.final)
        for events in self.table.by_user_and_time(len(self.users.final)):
            candidates = events.take(tied(events)) if self.timed else events
            repeats += int(repeated(candidates, timed=self.timed).sum())
            core = events.take((events.user < n_users) & (self.items.final[events.item] < n_items))
            kind = None if self.kinds is None else self.kinds.final[core.kind]
            yield replace(core, item=self.items.final[core.item] + 1, kind=kind)
        self.table.clear()
        self.duplicates = repeats if self.dropped is None else self.dropped


def _core(gathered: GatheredEvents, settings: PrepareSettings, *, timed: bool) -> Core:
    """Drop duplicates if the settings say so, keep users and items with enough events, number them by id."""
    events = gathered.events
    dropped = events.drop_repeated(len(gathered.users), timed=timed) if settings.drop_duplicates else None
    frame = nw.from_native(events.frame().lazy())
    core = k_core(
        frame,
        min_user=settings.min_user,
        min_item=settings.min_item,
        settle=lambda survivors: survivors.collect(engine="streaming").lazy(),
    )
    core_users, core_items = (survivors.collect() for survivors in core)
    if not len(core_users):
        counts = events.user_counts(len(gathered.users))
        raise no_user_left(gathered.good, len(gathered.items), counts, settings)
    users = _numbered(gathered.users.texts(), core_users, "user")
    items = _numbered(gathered.items.texts(), core_items, "item")
    refuse_single_item(items.ids)
    kinds = None
    if len(gathered.kinds):
        every = np.arange(len(gathered.kinds))
        kinds = final_numbers(gathered.kinds.texts(), every, np.zeros(len(every), dtype=np.int64))
    return Core(
        users=users,
        items=items,
        kinds=None if kinds is None else kinds.ids,
        valued=events.chunks[0].value is not None,
        rows=gathered.rows,
        good=gathered.good,
        rejected=gathered.rejected,
        events=_SortedEvents(events, users, items, kinds, timed, dropped),
    )


def _numbered(texts: pl.Series, survivors: nw.DataFrame[Any], column: str) -> Numbers:
    return final_numbers(texts, survivors[column].to_numpy(), survivors["events"].to_numpy())
