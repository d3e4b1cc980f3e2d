"""A file of users and perhaps moments → chunks of user numbers and moments, read as a log is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import narwhals as nw
import numpy as np
import polars as pl

from segue.data.blocks import LogInput
from segue.data.columns import TIME_NAMES, USER_NAMES, Columns, by_rank, listed, named_position
from segue.data.dataset import Data
from segue.data.gather import Log, look_at_times
from segue.data.reader import LogBlock, open_file, read_blocks
from segue.data.settings import PrepareSettings
from segue.data.times import TimeRule, read_times
from segue.errors import InputError

CHUNK_ROWS = 65536


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """Some rows of a users file."""

    users: pl.Series  # [n] ids as they are written
    numbers: np.ndarray  # [n] int64: the data's number of each user, -1 for one it does not have
    moments: np.ndarray | None  # [n] int64 microseconds, as the data's times


def read_users(
    path: Path, data: Data, *, user_column: str | None = None, time_column: str | None = None
) -> Iterator[Asked]:
    """The rows of a file, in its order, some at a time. A row that cannot be used stops everything with a sentence."""
    columns = {role: name for role, name in (("user", user_column), ("time", time_column)) if name is not None}
    opened = open_file(path, named=set(columns.values()))
    log = Log([opened], Columns(names=_found(opened, data, columns), found=()))  # type: ignore[arg-type]
    rule = _time_rule(log, data)
    known = pl.Series(data.users.ids(np.arange(len(data.users))), dtype=pl.String)
    for block in read_blocks(log.inputs, log.columns, roles=list(log.columns.names)):
        frame = _checked(block, rule)
        for rows in frame.iter_slices(CHUNK_ROWS):
            moments = None if rule is None else rows["microseconds"].to_numpy()
            yield Asked(users=rows["user"], numbers=_numbers(known, rows["user"]), moments=moments)


def _found(log: LogInput, data: Data, named: dict[str, str]) -> dict[str, str]:
    """The columns of the user and of the time: as named, as the log called them, or by their names."""
    usual: dict[str, str] = data.manifest["settings"]["columns"]
    places: dict[str, int] = {}
    for role, ranks in (("user", USER_NAMES), ("time", TIME_NAMES)):
        free = [place for place in range(len(log.names)) if place not in places.values()]
        if role in named:
            places[role] = named_position(log, role, named[role])
            continue
        same = [place for place in free if log.names[place] == usual.get(role)]
        found = same or by_rank(log, ranks, free=free)
        if len(found) > 1:
            raise InputError(f"{log.label}: {listed(log.names[place] for place in found)} could all be the {role}; rename.")
        if found:
            places[role] = found[0]
    if "user" not in places:
        places["user"] = _only_column(log, data)
    return {role: log.names[place] for role, place in places.items()}


def _only_column(log: LogInput, data: Data) -> int:
    """A file with nothing but users may call them what it likes, if it calls them anything."""
    if len(log.names) > 1:
        raise InputError(
            f"{log.label} has no column that looks like the user; name it 'user'. Its columns are {listed(log.names)}."
        )
    if data.users.number(log.names[0]) is not None:
        raise InputError(f"{log.label} begins with a user ({log.names[0]!r}) where its header should be; add one: user.")
    return 0


def _time_rule(log: Log, data: Data) -> TimeRule | None:
    """How the moments are read, None where there are none; times without an offset are in the zone of the log."""
    if "time" not in log.columns.names:
        return None
    label, column, facts = log.inputs[0].label, log.columns.names["time"], data.manifest["settings"]["time"]
    if facts["form"] == "row order":
        raise InputError(f"{label} asks about times ({column!r}), but {data.folder} has none; leave the column out.")
    form: dict[str, Any] = {"time_format": facts["format"]} if "format" in facts else {}
    rule = look_at_times(log, PrepareSettings(time_zone=facts.get("zone")), _silent).rule
    if rule is not None and rule.form == "iso" and form and not _any_iso(log):
        rule = look_at_times(log, PrepareSettings(time_zone=facts.get("zone"), **form), _silent).rule
    if rule is not None and rule.dated != (facts["form"] != "order"):
        meant = "an order" if facts["form"] == "order" else "dates"
        raise InputError(f"{label}: {column!r} holds {rule.description()}, but the times of {data.folder} are {meant}.")
    return rule
