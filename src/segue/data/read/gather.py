"""A log → compact events, ids by running number, and the rows that cannot be used.

Two passes: a light one over the times alone decides their unit for the whole column, the second reads everything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
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

Progress = Callable[[str, int, int], None]
"""Told of (what is being done, how much of it, of how much)."""

HELD_REJECTED_ROWS = 2_000_000  # where the number of rows is not known beforehand
MOST_KINDS = 1 << 16


@dataclass(frozen=True, slots=True)
class Log:
    """A log whose columns are known."""

    inputs: list[LogInput]
    columns: Columns
    ordered: bool = False
    """There is no time, but a column that gives the order; it takes the place of the time."""


@dataclass(frozen=True, slots=True)
class TimeLook:
    """What the first pass found out."""

    rule: TimeRule | None
    """None: no time column, the row order is the order."""
    counts: dict[str, int] = field(default_factory=dict)
    """How many times look like each form, where they were counted."""


@dataclass(slots=True)
class Gathered:
    """What the second pass brings home."""

    events: EventTable
    users: Numbering
    items: Numbering
    kinds: Numbering
    rejected: Rejected
    rows: int = 0
    kept: int = 0


def open_log(source: Any, settings: PrepareSettings) -> Log:
    """Open the files or the table and find the columns; every file must have them."""
    return known_log(open_inputs(source, named=set(settings.named_columns().values())), settings)


def known_log(inputs: list[LogInput], settings: PrepareSettings) -> Log:
    """Find the columns of opened inputs."""
    columns = find_columns(inputs[0], settings)
    ordered = "order" in columns.names and "time" not in columns.names
    if ordered:
        names: dict[Role, str] = {("time" if role == "order" else role): name for role, name in columns.names.items()}
        columns = replace(columns, names=names)
    for log in inputs:
        columns.positions(log)
    return Log(inputs, columns, ordered)


def look_at_times(log: Log, settings: PrepareSettings, progress: Progress) -> TimeLook:
    """Decide how the times are read, over the whole column."""
    return known_times(log, settings) or decided_times(_counted_votes(log, progress), settings)


def known_times(log: Log, settings: PrepareSettings) -> TimeLook | None:
    """How the times are read where no value has to be looked at for it."""
    if "time" not in log.columns.names:
        return TimeLook(None)
    if log.ordered:
        return TimeLook(TimeRule(form="order", forced=True))
    forced = forced_rule(settings)
    made_of = time_type(log.inputs, log.columns)
    if made_of != "text or numbers":
        if forced is not None:
            raise SettingsError("--time-format is for times written as text or numbers; this log's are dates already.")
        return TimeLook(TimeRule(form="instant", zone=settings.time_zone if made_of == "wall clock" else None))
    return None if forced is None else TimeLook(forced)


def decided_times(counts: Mapping[str, int], settings: PrepareSettings) -> TimeLook:
    """How the times are read, after what all of them look like."""
    return TimeLook(decide(counts, zone=settings.time_zone), dict(counts))


def _counted_votes(log: Log, progress: Progress) -> Counter[str]:
    counts: Counter[str] = Counter()
    watch = _Watch(log, "looking at the times", progress)
    for block in read_blocks(log.inputs, log.columns, roles=["time"]):
        counts.update(votes(block.frame["time"]))
        watch.tell(block)
    return counts


def gather(log: Log, look: TimeLook, settings: PrepareSettings, progress: Progress) -> Gathered:
    """Read, judge and number every row; stop when too many are bad."""
    known = look.counts.get("rows")
    hold = HELD_REJECTED_ROWS if known is None else int(known * settings.max_rejected) + 1
    roles = list(log.columns.names)
    gathered = Gathered(EventTable(), Numbering(), Numbering(), Numbering(), Rejected(list(roles), hold))
    watch = _Watch(log, "reading", progress)
    for block in read_blocks(log.inputs, log.columns, roles=roles):
        _take(block, gathered, log, look.rule)
        watch.tell(block)
    refuse_useless(gathered.rejected, rows=gathered.rows, kept=gathered.kept, look=look, settings=settings)
    return gathered


def refuse_useless(rejected: Rejected, *, rows: int, kept: int, look: TimeLook, settings: PrepareSettings) -> None:
    """Stop when too many rows are bad, or all."""
    rejected.check(rows, most=settings.max_rejected, hint=mixture(look.counts))
    if not kept:
        raise InputError("No row of the log can be used; are --user, --item and --time the right columns?")


def refuse_many_kinds(count: int) -> None:
    """Stop when the kinds are too many for their numbers."""
    if count > MOST_KINDS:
        raise InputError(f"The --kind column holds more than {MOST_KINDS} different values; expected a few kinds.")


def refuse_single_item(ids: pl.Series) -> None:
    """Stop when there is nothing to choose from."""
    if len(ids) == 1:
        raise InputError(
            f"Only one item is left ({ids[0]!r}), and one item cannot be ranked against anything; "
            "give a log with more items, or lower --min-user and --min-item."
        )


def nobody_left(kept: int, items: int, user_counts: np.ndarray, settings: PrepareSettings) -> InputError:
    """The sentence about a core without users. user_counts: [all users] the events of each."""
    enough = int((user_counts >= settings.min_user).sum())
    return InputError(
        f"Nobody is left: of {len(user_counts)} users and {items} items with {kept} events, "
        f"{enough} users have the {settings.min_user} events that --min-user asks for (the most active has "
        f"{int(user_counts.max())}), and none on items with {settings.min_item} events (--min-item). Lower one or both."
    )


def _take(block: LogBlock, gathered: Gathered, log: Log, rule: TimeRule | None) -> None:
    judged = judge(block.frame, log.columns.names, rule)
    gathered.rejected.add_malformed(block.input.label, block.malformed)
    good = judged
    if judged["reason"].null_count() < judged.height:
        gathered.rejected.add_judged(block.input.label, judged.filter(pl.col("reason").is_not_null()))
        good = judged.filter(pl.col("reason").is_null())
    gathered.rows += judged.height + len(block.malformed)
    if good.height:
        gathered.events.append(_chunk(good, gathered, rule))
        gathered.kept += good.height


def _chunk(good: pl.DataFrame, gathered: Gathered, rule: TimeRule | None) -> Chunk:
    row_order = (gathered.kept + np.arange(good.height)) * MICROSECONDS
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
        order=good["place"].to_numpy() if "place" in good.columns else None,
    )


def stored_values(amounts: pl.Series) -> np.ndarray:
    """Numbers as they are stored [n] float32, NaN where there is none."""
    return amounts.cast(pl.Float32).fill_null(float("nan")).to_numpy()


class _Watch:
    """Turns blocks read into progress over all inputs."""

    def __init__(self, log: Log, stage: str, progress: Progress) -> None:
        ends = np.cumsum([each.size for each in log.inputs]).tolist()
        self._total = ends[-1]
        self._before = {id(each): end - each.size for each, end in zip(log.inputs, ends, strict=True)}
        self._stage, self._progress = stage, progress

    def tell(self, block: LogBlock) -> None:
        self._progress(self._stage, min(self._before[id(block.input)] + block.done, self._total), self._total)
