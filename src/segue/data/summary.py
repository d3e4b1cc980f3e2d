"""A data folder's manifest → what `prepare` tells its user, and the shares it needs for that."""

from __future__ import annotations

from typing import Any

import numpy as np

from segue.data.events import stable_order
from segue.data.sequences import Sequences
from segue.data.split import Split

USERS_AT_A_TIME = 1 << 17


def tie_share(sequences: Sequences) -> float:
    """The share of users whose last event has the same time as the one before."""
    offsets = np.asarray(sequences.offsets)
    last = offsets[1:][np.diff(offsets) >= 2] - 1
    return float((sequences.times[last] == sequences.times[last - 1]).sum() / max(1, sequences.n_users))


def repeat_share(sequences: Sequences, split: Split) -> float:
    """The share of test targets that occur in their history: that are not their user's first event with the item."""
    repeats = targets = 0
    for begin in range(0, sequences.n_users, USERS_AT_A_TIME):
        end = min(begin + USERS_AT_A_TIME, sequences.n_users)
        offsets = np.asarray(split.offsets[begin : end + 1])
        start = int(offsets[0])
        users = np.repeat(np.arange(end - begin), np.diff(offsets))
        items = np.asarray(sequences.items[start : int(offsets[-1])])
        tested = np.arange(start, int(offsets[-1])) >= np.asarray(split.valid_end[begin:end])[users]
        order = stable_order(users << 32 | items)
        again = (np.diff(users[order]) == 0) & (np.diff(items[order]) == 0)
        repeats += int(tested[order[1:]][again].sum())
        targets += int(tested.sum())
    return repeats / max(1, targets)


def summary_lines(manifest: dict[str, Any]) -> list[str]:
    """What was assumed, kept, rejected and found, a line each."""
    settings, counts = manifest["settings"], manifest["counts"]
    lines = [
        f"columns    {_columns(settings)}",
        f"times      {settings['time']['description']}",
        f"rows       {counts['rows']:,} read, {counts['kept']:,} good, {sum(counts['rejected'].values()):,} rejected",
    ]
    lines += [f"           {count:,} × {reason}" for reason, count in sorted(counts["rejected"].items())]
    if counts["rejected"]:
        lines.append("           the rejected rows are in rejected.parquet, which may hold personal data")
    fate = "dropped" if settings["drop_duplicates"] else "kept (--drop-duplicates leaves them out)"
    if counts["duplicates"]:
        lines.append(f"duplicates {counts['duplicates']:,} exact repeats of a row, {fate}")
    lines += [
        f"kept       {counts['users']:,} users, {counts['items']:,} items, {counts['events']:,} events "
        f"(at least {settings['min_user']} a user, {settings['min_item']} an item)",
        f"split      {_split(manifest)}",
        f"ties       {manifest['tie_share']:.1%} of the users have a last event of the same time as the one before",
        f"repeats    {manifest['repeat_share']:.1%} of the test targets occur in their history",
    ]
    if "catalogue" in counts:
        lines.append(f"catalogue  {_catalogue(counts)}")
    return lines


def _columns(settings: dict[str, Any]) -> str:
    found = set(settings["found"])
    parts = [f"{role} = {name!r}{' (found)' if role in found else ''}" for role, name in settings["columns"].items()]
    return ", ".join(parts) + ("; one row a user" if settings["layout"] == "one row a user" else "")


def _split(manifest: dict[str, Any]) -> str:
    if manifest["split"]["kind"] == "last":
        return "the last event of each user for test, the one before for validation"
    moment = manifest["settings"]["split"].removeprefix("time:")
    return f"every event from {moment} on for test, as many before for validation"


def _catalogue(counts: dict[str, Any]) -> str:
    met = counts["catalogue"]
    text = f"{met['described']:,} of {counts['items']:,} items described"
    if met["duplicates"]:
        text += f"; {met['duplicates']:,} further rows with an id met before were left out"
    return text + (f"; {met['rejected']:,} rows could not be read" if met["rejected"] else "")
