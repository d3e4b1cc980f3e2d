"""The summary of `prepare`: a manifest → lines of text; and the shares of ties and repeats that it holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from segue.data.sequences import Sequences
from segue.data.split import split_last, split_time
from segue.data.write.events import stable_order


@dataclass(slots=True)
class Shares:
    """Ties and repeats, counted while the events are written, some whole users at a time."""

    test_from: int | None
    """The time of `--split time:WHEN` in microseconds; None for `--split last`."""
    users: int = 0
    tied: int = 0  # users whose last two events have the same time
    targets: int = 0  # of the test
    repeats: int = 0  # test targets that occur in their user's history

    def add(self, sequences: Sequences) -> None:
        """Count the events of some users."""
        lengths = np.diff(sequences.offsets)
        last = sequences.offsets[1:][lengths >= 2] - 1
        self.users += sequences.n_users
        self.tied += int((sequences.times[last] == sequences.times[last - 1]).sum())
        split = split_last(sequences)
        if self.test_from is not None:
            split = split_time(sequences, valid_from=self.test_from, test_from=self.test_from)
        in_test = np.arange(sequences.n_events) >= np.repeat(split.valid_end, lengths)
        users = np.repeat(np.arange(sequences.n_users), lengths)
        order = stable_order(users << 32 | sequences.items)
        # an event is a repeat unless it is the user's first one with the item
        repeat = (np.diff(users[order]) == 0) & (np.diff(sequences.items[order]) == 0)
        self.repeats += int(in_test[order[1:]][repeat].sum())
        self.targets += int(in_test.sum())


def summary_lines(manifest: dict[str, Any]) -> list[str]:
    """The lines of the summary, from the columns of the log to the vectors of its items."""
    settings, log, counts = manifest["settings"], manifest["log"], manifest["counts"]
    names = [f"{role} = {name!r}{' (found)' if role in log['found'] else ''}" for role, name in log["columns"].items()]
    lines = [
        f"columns    {', '.join(names)}{'; one row a user' if log['layout'] == 'one row a user' else ''}",
        f"times      {log['time']['description']}",
        f"rows       {counts['rows']:,} read, {counts['good']:,} good, {sum(counts['rejected'].values()):,} rejected",
    ]
    lines += [f"           {count:,} × {reason}" for reason, count in sorted(counts["rejected"].items())]
    if counts["rejected"]:
        lines.append("           rejected.parquet holds the rejected rows; it may contain personal data")
    if counts["duplicates"]:
        action = "dropped" if settings["drop_duplicates"] else "kept (--drop-duplicates leaves them out)"
        lines.append(f"duplicates {counts['duplicates']:,} exact repeats of a row, {action}")
    split = "the last event of each user for test, the one before for validation"
    if manifest["split"]["kind"] == "time":
        time = settings["split"].removeprefix("time:")
        split = f"every event from {time} on for test, as many before for validation"
    lines += [
        f"kept       {counts['users']:,} users, {counts['items']:,} items, {counts['events']:,} events "
        f"(at least {settings['min_user']} a user, {settings['min_item']} an item)",
        f"split      {split}",
        f"ties       {manifest['tie_share']:.1%} of the users have two last events of the same time",
        f"repeats    {manifest['repeat_share']:.1%} of the test targets occur in their history",
    ]
    if rows := counts.get("catalogue"):
        line = f"catalogue  {rows['described']:,} of {counts['items']:,} items described"
        if rows["duplicates"]:
            line += f"; {rows['duplicates']:,} rows with an id of an earlier row were left out"
        lines.append(line + (f"; {rows['rejected']:,} rows could not be read" if rows["rejected"] else ""))
    for name, sizes in counts.get("vectors", {}).items():
        lines.append(
            f"vectors    {name}: {sizes['width']:,} numbers, for {sizes['items']:,} of {counts['items']:,} items"
        )
    return lines
