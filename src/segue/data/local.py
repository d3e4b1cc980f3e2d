"""The local engine: a log → the core of its events, in their final order.

Text is read block by block; only the ids and a few numbers per event stay in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import narwhals as nw
import numpy as np
import polars as pl

from segue.data.read.blocks import Block
from segue.data.read.log import (
    Log,
    ProgressCallback,
    TimeDecision,
    count_forms,
    log_of_inputs,
    open_inputs,
    read_blocks,
)
from segue.data.read.times import TimeRule, mixture
from segue.data.rules.rejected import Rejected
from segue.data.rules.rows import check_rows, k_core, no_user_left, refuse_many_kinds, stored_values
from segue.data.settings import PrepareSettings
from segue.data.timestamps import MICROSECONDS
from segue.data.write.events import Chunk, EventTable, Numbering, repeated, tied
from segue.data.write.writer import Core, Numbers, final_numbers
from segue.folders import digest

MAX_REJECTED_ROWS = 2_000_000  # stored, if the number of rows is not known beforehand


@contextmanager
def open_local_engine(source: Any, settings: PrepareSettings, progress: ProgressCallback) -> Iterator[_LocalEngine]:
    """Open files or a table; the digests of files are computed by another thread."""
    log = log_of_inputs(open_inputs(source, named=set(settings.named_columns().values())), settings)
    paths = [path for each in log.inputs if (path := getattr(each, "path", None)) is not None]
    pool = ThreadPoolExecutor(max_workers=1)
    try:
        yield _LocalEngine(log, settings, progress, [(path, pool.submit(digest, path)) for path in paths])
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class _LocalEngine:
    """Reads and sorts an opened log in this process."""

    log: Log
    settings: PrepareSettings
    progress: ProgressCallback
    digests: list[tuple[Path, Future[str]]]  # of its files, computed by another thread while they are read

    def count_forms(self) -> dict[str, int]:
        return count_forms(self.log, self.progress)

    def described(self) -> list[dict[str, Any]]:
        if not self.digests:
            return [{"table": each.label, "rows": each.size} for each in self.log.inputs]
        return [
            {"path": str(path.absolute()), "bytes": path.stat().st_size, "sha256": future.result()}
            for path, future in self.digests
        ]

    def core(self, times: TimeDecision) -> Core:
        """Read the rows, drop duplicates if the settings require it, and number users, items and kinds by id."""
        rows, settings, timed = self._read(times), self.settings, times.rule is not None
        events = rows.events
        dropped = events.drop_repeated(len(rows.users), timed=timed) if settings.drop_duplicates else None
        core_users, core_items = k_core(
            nw.from_native(events.frame().lazy()),
            min_user=settings.min_user,
            min_item=settings.min_item,
            settle=lambda survivors: survivors.collect(engine="streaming").lazy(),
        )
        users = _numbers(rows.users, core_users, "user")
        items = _numbers(rows.items, core_items, "item")
        if not len(users.ids):
            good, counts = rows.rows - rows.rejected.total, events.user_counts(len(rows.users))
            raise no_user_left(good, len(rows.items), counts, settings)
        kinds = None
        if every := len(rows.kinds):
            kinds = final_numbers(rows.kinds.texts(), np.arange(every), np.zeros(every, dtype=np.int64))
        return Core(
            users=users,
            items=items,
            kinds=None if kinds is None else kinds.ids,
            valued=events.chunks[0].value is not None,
            rows=rows.rows,
            rejected=rows.rejected,
            events=_SortedEvents(events, users, items, kinds, timed, dropped),
        )

    def _read(self, times: TimeDecision) -> _Rows:
        """Read, check and number every row; raise if too many are rejected."""
        n_rows = times.counts.get("rows")
        max_stored = MAX_REJECTED_ROWS if n_rows is None else int(n_rows * self.settings.max_rejected) + 1
        rows = _Rows(Rejected(list(self.log.columns.names), max_stored))
        for log, block in read_blocks(self.log.inputs, self.log.columns, progress=self.progress):
            rows.add(block, log.label, times.rule)
        rows.rejected.check(rows.rows, most=self.settings.max_rejected, hint=mixture(times.counts))
        return rows


@dataclass(slots=True)
class _Rows:
    """The rows of a log: the good ones as events with running numbers instead of ids, and the rejected ones."""

    rejected: Rejected
    rows: int = 0
    events: EventTable = field(default_factory=EventTable)
    users: Numbering = field(default_factory=Numbering)
    items: Numbering = field(default_factory=Numbering)
    kinds: Numbering = field(default_factory=Numbering)

    def add(self, block: Block, label: str, rule: TimeRule | None) -> None:
        good = checked = check_rows(block.frame, self.rejected.roles, rule)
        if block.malformed or checked["reason"].null_count() < checked.height:
            self.rejected.add(label, block.malformed, checked.filter(pl.col("reason").is_not_null()))
            good = checked.filter(pl.col("reason").is_null())
        self.rows += checked.height + len(block.malformed)
        if not good.height:
            return
        row_order = (len(self.events) + np.arange(good.height)) * MICROSECONDS
        kind = None
        if "kind" in good.columns:
            kind = self.kinds.numbers(good["kind"].fill_null("")).astype(np.uint16)
            refuse_many_kinds(len(self.kinds))
        self.events.append(
            Chunk(
                user=self.users.numbers(good["user"]),
                item=self.items.numbers(good["item"]),
                time=row_order if rule is None else good["microseconds"].to_numpy(),
                kind=kind,
                value=stored_values(good["amount"]) if "amount" in good.columns else None,
                order=good["order_number"].to_numpy() if "order_number" in good.columns else None,
            )
        )


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


def _numbers(running: Numbering, survivors: nw.LazyFrame[Any], column: str) -> Numbers:
    counted = survivors.collect()
    return final_numbers(running.texts(), counted[column].to_numpy(), counted["events"].to_numpy())
