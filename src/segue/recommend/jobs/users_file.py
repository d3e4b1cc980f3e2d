"""A file of users and perhaps moments → chunks of user numbers and moments, read as a log is read."""

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
from segue.data.read.gather import Log, look_at_times
from segue.data.read.log import LogBlock, open_file, read_blocks
from segue.data.read.times import UNITS, TimeRule, read_times
from segue.data.settings import PrepareSettings, Role
from segue.errors import InputError

CHUNK_ROWS = 8192  # answered at a time, by one worker


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """Some rows of a users file."""

    users: pl.Series  # [n] ids as they are written
    numbers: np.ndarray  # [n] int64: the data's number of each user, -1 for one it does not have
    moments: np.ndarray | None  # [n] int64 microseconds, as the data's times


def read_users(path: Path, data: Data) -> Iterator[Asked]:
    """The rows of a file, in its order, some at a time. A row that cannot be used stops everything with a sentence."""
    opened = open_file(path, named=set())
    log = Log([opened], Columns(names=_found(opened, data), found=()))
    rule = _time_rule(log, data)
    known = pl.Series(data.users.ids(np.arange(len(data.users))), dtype=pl.String)
    for block in read_blocks(log.inputs, log.columns, roles=list(log.columns.names)):
        frame = _checked(block, rule)
        for rows in frame.iter_slices(CHUNK_ROWS):
            moments = None if rule is None else rows["microseconds"].to_numpy()
            yield Asked(users=rows["user"], numbers=_numbers(known, rows["user"]), moments=moments)


def _found(log: LogInput, data: Data) -> dict[Role, str]:
    """The columns of the user and of the time: called as in the log, or by a usual name."""
    called: dict[str, str] = data.manifest["settings"]["columns"]
    places: dict[Role, int] = {}
    ranks: dict[Role, tuple[tuple[str, ...], ...]] = {"user": USER_NAMES, "time": TIME_NAMES}
    for role, names in ranks.items():
        free = [place for place in range(len(log.names)) if place not in places.values()]
        found = [place for place in free if log.names[place] == called.get(role)] or by_rank(log, names, free=free)
        if len(found) > 1:
            could_be = listed(log.names[place] for place in found)
            raise InputError(f"{log.label}: {could_be} could all be the {role}; take all but one out.")
        if found:
            places[role] = found[0]
    if "user" not in places:
        places["user"] = _only_column(log)
    return {role: log.names[place] for role, place in places.items()}


def _only_column(log: LogInput) -> int:
    """A bare list of numbers needs no header; of words, the first would be taken for one and its user forgotten."""
    if len(log.names) == 1 and isinstance(log, DelimitedFile) and log.headerless:
        return 0
    raise InputError(
        f"{log.label} has no column that looks like the user; call it 'user' in the header line. "
        f"Its columns are {listed(log.names)}.{log.note}"
    )


def _time_rule(log: Log, data: Data) -> TimeRule | None:
    """How the moments are read, None where there are none: by what they look like, else as the log wrote its times.

    Times without an offset are in the zone of the log.
    """
    if "time" not in log.columns.names:
        return None
    label, column, facts = log.inputs[0].label, log.columns.names["time"], data.manifest["settings"]["time"]
    if facts["form"] == "row order":
        raise InputError(f"{label} asks about times ({column!r}), but {data.folder} has none; leave the column out.")
    look = look_at_times(log, PrepareSettings(time_zone=facts.get("zone")), lambda *_: None)
    rule = look.rule
    if "format" in facts and look.counts and not any(look.counts.get(form) for form in ("iso", *UNITS)):
        return TimeRule(form="format", format=facts["format"], zone=facts.get("zone"))
    if rule is not None and rule.dated != (facts["form"] != "order"):
        meant = "an order" if facts["form"] == "order" else "dates"
        raise InputError(f"{label}: {column!r} holds {rule.description()}, but the times of {data.folder} are {meant}.")
    return rule


def _checked(block: LogBlock, rule: TimeRule | None) -> pl.DataFrame:
    """The block with `microseconds` where there are moments; the first row that cannot be used is an error."""
    if block.malformed:
        first = block.malformed[0]
        raise InputError(f"{block.input.label}, row {first.row}: {first.reason}; correct the row or take it out.")
    frame = block.frame.with_columns(pl.lit(None, dtype=pl.String).alias("time_reason"))
    if rule is not None:
        frame = block.frame.hstack(read_times(block.frame["time"], rule))
    missing = pl.when(pl.col("user").is_null() | (pl.col("user") == "")).then(pl.lit("no user"))
    bad = frame.select(ROW, pl.coalesce(missing, pl.col("time_reason")).alias("reason")).drop_nulls("reason")
    if bad.height:
        row, reason = bad.row(0)
        raise InputError(f"{block.input.label}, row {row}: {reason}; correct the row or take it out.")
    return frame


def _numbers(known: pl.Series, users: pl.Series) -> np.ndarray:
    """Places in the sorted ids, -1 for those that are not there."""
    places = known.search_sorted(users).to_numpy().astype(np.int64)
    inside = np.minimum(places, len(known) - 1)
    same = (known.gather(inside) == users).to_numpy()
    return np.where(same, places, -1)
