"""A log → compact events, ids by running number, and the rows that cannot be used.

Two passes: the first reads the times alone and decides their unit for the whole column, the second reads everything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import polars as pl

from segue.data.read.blocks import LogInput
from segue.data.read.columns import Columns, find_columns
from segue.data.read.log import LogBlock, open_inputs, read_blocks, time_type
from segue.data.read.times import TimeRule, decide, forced_rule, mixture, votes
from segue.data.rules.judge import judge
from segue.data.rules.rejected import Rejected
from segue.data.settings import PrepareSettings, Role
from segue.data.timestamps import MICROSECONDS
from segue.data.write.events import Chunk, EventTable, Numbering
from segue.errors import InputError, SettingsError

ProgressCallback = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""

MAX_REJECTED_ROWS = 2_000_000  # stored, if the number of rows is not known beforehand
MAX_KINDS = 1 << 16


@dataclass(frozen=True, slots=True)
class Log:
    """A log whose columns are known."""

    inputs: list[LogInput]
    columns: Columns
    ordered: bool = False
    """There is no time, and a column that gives the order is read instead of it."""


@dataclass(frozen=True, slots=True)
class TimeDecision:
    """How the times are read."""

    rule: TimeRule | None
    """None without a time column: events keep the order of their rows."""
    counts: dict[str, int] = field(default_factory=dict)
    """How many values fit each form, if they were counted."""


@dataclass(slots=True)
class GatheredEvents:
    """The result of the second pass."""

    events: EventTable
    users: Numbering
    items: Numbering
    kinds: Numbering
    rejected: Rejected
    rows: int = 0
    good: int = 0


def open_log(source: Any, settings: PrepareSettings) -> Log:
    """Open the files or the table and find the columns; every file must have them."""
    return log_of_inputs(open_inputs(source, named=set(settings.named_columns().values())), settings)


def log_of_inputs(inputs: list[LogInput], settings: PrepareSettings) -> Log:
    """Find the columns of opened inputs."""
    columns = find_columns(inputs[0], settings)
    ordered = "order" in columns.names and "time" not in columns.names
    if ordered:
        names: dict[Role, str] = {("time" if role == "order" else role): name for role, name in columns.names.items()}
        columns = replace(columns, names=names)
    for log in inputs:
        columns.positions(log)
    return Log(inputs, columns, ordered)


def decide_times(log: Log, settings: PrepareSettings, progress: ProgressCallback) -> TimeDecision:
    """Decide how the times are read, over the whole column."""
    decision = decide_without_votes(log, settings)
    if decision is not None:
        return decision
    counts: Counter[str] = Counter()
    reporter = _ProgressReporter(log, "reading the times", progress)
    for block in read_blocks(log.inputs, log.columns, roles=["time"]):
        counts.update(votes(block.frame["time"]))
        reporter.report(block)
    return TimeDecision(decide(counts, zone=settings.time_zone), counts)


def decide_without_votes(log: Log, settings: PrepareSettings) -> TimeDecision | None:
    """How the times are read, if that follows without reading any; else None."""
    if "time" not in log.columns.names:
        return TimeDecision(None)
    if log.ordered:
        return TimeDecision(TimeRule(form="order", forced=True))
    forced = forced_rule(settings)
    column_type = time_type(log.inputs, log.columns)
    if column_type != "text or numbers":
        if forced is not None:
            raise SettingsError("--time-format is for times as text or numbers; this log holds dates: leave it out.")
        return TimeDecision(TimeRule(form="instant", zone=settings.time_zone if column_type == "local times" else None))
    return None if forced is None else TimeDecision(forced)


def gather(log: Log, times: TimeDecision, settings: PrepareSettings, progress: ProgressCallback) -> GatheredEvents:
    """Read, judge and number every row; stop if too many are bad."""
    rows = times.counts.get("rows")
    max_stored = MAX_REJECTED_ROWS if rows is None else int(rows * settings.max_rejected) + 1
    roles = list(log.columns.names)
    gathered = GatheredEvents(EventTable(), Numbering(), Numbering(), Numbering(), Rejected(list(roles), max_stored))
    reporter = _ProgressReporter(log, "reading", progress)
    for block in read_blocks(log.inputs, log.columns, roles=roles):
        _add_block(block, gathered, log, times.rule)
        reporter.report(block)
    refuse_unusable(gathered.rejected, rows=gathered.rows, good=gathered.good, times=times, settings=settings)
    return gathered


def refuse_unusable(
    rejected: Rejected, *, rows: int, good: int, times: TimeDecision, settings: PrepareSettings
) -> None:
    """Refuse a log with too many bad rows, or without a good one."""
    rejected.check(rows, most=settings.max_rejected, hint=mixture(times.counts))
    if not good:
        raise InputError("No row of the log can be used; are --user, --item and --time the right columns?")


def refuse_many_kinds(count: int) -> None:
    """Refuse more kinds than 16 bits can number."""
    if count > MAX_KINDS:
        raise InputError(f"The --kind column holds more than {MAX_KINDS} different values; expected a few kinds.")


def refuse_single_item(ids: pl.Series) -> None:
    """Refuse a core of one item."""
    if len(ids) == 1:
        raise InputError(
            f"Only one item is left ({ids[0]!r}), and one item cannot be ranked against anything; "
            "give a log with more items, or lower --min-user and --min-item."
        )


def no_user_left(events: int, items: int, user_counts: np.ndarray, settings: PrepareSettings) -> InputError:
    """The error of a core without users. user_counts: [all users] the events of each."""
    enough = int((user_counts >= settings.min_user).sum())
    return InputError(
        f"No user is left: of {len(user_counts)} users and {items} items with {events} events, "
        f"{enough} users have the {settings.min_user} events that --min-user requires (the most active has "
        f"{int(user_counts.max())}), and none on items with {settings.min_item} events (--min-item). Lower one or both."
    )


def _add_block(block: LogBlock, gathered: GatheredEvents, log: Log, rule: TimeRule | None) -> None:
    judged = judge(block.frame, log.columns.names, rule)
    gathered.rejected.add_malformed(block.input.label, block.malformed)
    good = judged
    if judged["reason"].null_count() < judged.height:
        gathered.rejected.add_judged(block.input.label, judged.filter(pl.col("reason").is_not_null()))
        good = judged.filter(pl.col("reason").is_null())
    gathered.rows += judged.height + len(block.malformed)
    if good.height:
        gathered.events.append(_chunk(good, gathered, rule))
        gathered.good += good.height


def _chunk(good: pl.DataFrame, gathered: GatheredEvents, rule: TimeRule | None) -> Chunk:
    row_order = (gathered.good + np.arange(good.height)) * MICROSECONDS
    kind = value = None
    if "kind" in good.columns:
        kind = gathered.kinds.numbers(good["kind"].fill_null("")).astype(np.uint16)
        refuse_many_kinds(len(gathered.kinds))
    if "amount" in good.columns:
        value = stored_values(good["amount"])
    return Chunk(
        user=gathered.users.numbers(good["user"]),
        item=gathered.items.numbers(good["item"]),
        time=row_order if rule is None else good["microseconds"].to_numpy(),
        kind=kind,
        value=value,
        order=good["order_number"].to_numpy() if "order_number" in good.columns else None,
    )


def stored_values(amounts: pl.Series) -> np.ndarray:
    """Values as they are stored [n] float32, NaN if there is none."""
    return amounts.cast(pl.Float32).fill_null(float("nan")).to_numpy()


class _ProgressReporter:
    """Reports blocks as progress over all inputs."""

    def __init__(self, log: Log, stage: str, progress: ProgressCallback) -> None:
        ends = np.cumsum([each.size for each in log.inputs]).tolist()
        self._total = ends[-1]
        self._before = {id(each): end - each.size for each, end in zip(log.inputs, ends, strict=True)}
        self._stage, self._progress = stage, progress

    def report(self, block: LogBlock) -> None:
        self._progress(self._stage, min(self._before[id(block.input)] + block.done, self._total), self._total)
