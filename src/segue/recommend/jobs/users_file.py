"""A file of users and optionally times → chunks of user numbers and times, read as a log is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from segue.data.dataset import Data
from segue.data.read.blocks import ROW, LogInput
from segue.data.read.columns import TIME_NAMES, USER_NAMES, Columns, by_rank, listed
from segue.data.read.delimited import DelimitedFile
from segue.data.read.log import Log, count_forms, decide_times, open_file, read_blocks
from segue.data.read.times import UNITS, TimeRule, read_times
from segue.data.settings import PrepareSettings, Role
from segue.errors import InputError

CHUNK_ROWS = 8192  # of one chunk of a job


@dataclass(frozen=True, slots=True, eq=False)
class UserRows:
    """Some rows of a users file."""

    ids: pl.Series  # [n] as they are written
    numbers: np.ndarray  # [n] int64: the data's number of each user, -1 for one that it does not have
    times: np.ndarray | None  # [n] int64 microseconds, as the data's times


def read_users(path: Path, data: Data) -> Iterator[UserRows]:
    """Yield the rows of a file in order, some at a time. A row that cannot be used raises an InputError."""
    opened = open_file(path, named=set())
    log = Log([opened], Columns(names=_columns(opened, data), found=()))
    rule = _time_rule(log, data)
    known = pl.Series(data.users.ids(np.arange(len(data.users))), dtype=pl.String)
    missing = pl.when(pl.col("user").is_null() | (pl.col("user") == "")).then(pl.lit("no user"))
    for _, block in read_blocks(log.inputs, log.columns):
        frame = block.frame.with_columns(pl.lit(None, dtype=pl.String).alias("time_reason"))
        if rule is not None:
            frame = block.frame.hstack(read_times(block.frame["time"], rule))
        bad = frame.select(ROW, pl.coalesce(missing, pl.col("time_reason")).alias("reason")).drop_nulls("reason")
        refusals = [*((one.row, one.reason) for one in block.malformed), *bad.rows()]
        if refusals:
            row, reason = refusals[0]
            raise InputError(f"{opened.label}, row {row}: {reason}; correct the row or take it out.")
        for rows in frame.iter_slices(CHUNK_ROWS):
            indices = known.search_sorted(rows["user"]).to_numpy().astype(np.int64)
            same = (known.gather(np.minimum(indices, len(known) - 1)) == rows["user"]).to_numpy()
            times = None if rule is None else rows["microseconds"].to_numpy()
            yield UserRows(ids=rows["user"], numbers=np.where(same, indices, -1), times=times)


def _columns(log: LogInput, data: Data) -> dict[Role, str]:
    """The columns of the user and of the time: named as in the log, or by a usual name."""
    named: dict[str, str] = data.manifest["log"]["columns"]
    columns: dict[Role, int] = {}
    usual: dict[Role, tuple[tuple[str, ...], ...]] = {"user": USER_NAMES, "time": TIME_NAMES}
    for role, names in usual.items():
        free = [column for column in range(len(log.names)) if column not in columns.values()]
        matches = [column for column in free if log.names[column] == named.get(role)] or by_rank(log, names, free=free)
        if len(matches) > 1:
            could_be = listed(log.names[column] for column in matches)
            raise InputError(f"{log.label}: {could_be} could all be the {role}; take all but one out.")
        if matches:
            columns[role] = matches[0]
    if "user" not in columns:
        # A list of numbers needs no header. In a list of words, the first user would be mistaken for a header.
        if not (len(log.names) == 1 and isinstance(log, DelimitedFile) and log.headerless):
            raise InputError(
                f"{log.label} has no column that looks like the user; call it 'user' in the header line. "
                f"Its columns are {listed(log.names)}.{log.note}"
            )
        columns["user"] = 0
    return {role: log.names[column] for role, column in columns.items()}


def _time_rule(log: Log, data: Data) -> TimeRule | None:
    """How times are read: by their form, or by the format of the log; None if there are none. Times without an offset
    are in the time zone of the log."""
    if "time" not in log.columns.names:
        return None
    label, column, facts = log.inputs[0].label, log.columns.names["time"], data.manifest["log"]["time"]
    if facts["form"] == "row order":
        raise InputError(f"{label} has times ({column!r}), but {data.folder} has none; leave the column out.")
    decision = decide_times(log, PrepareSettings(time_zone=facts.get("zone")), lambda: count_forms(log))
    rule = decision.rule
    if "format" in facts and decision.counts and not any(decision.counts.get(form) for form in ("iso", *UNITS)):
        return TimeRule(form="format", format=facts["format"], zone=facts.get("zone"))
    if rule is not None and rule.dated != (facts["form"] != "order"):
        meant = "an order" if facts["form"] == "order" else "dates"
        raise InputError(f"{label}: {column!r} holds {rule.description()}, but the times of {data.folder} are {meant}.")
    return rule
