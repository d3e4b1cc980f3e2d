"""A log → a data folder: look at the times, read and judge, keep the core, sort and write.

The local engine's order of work. Text passes through in blocks; what stays is the ids and some numbers an event.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import narwhals as nw
import numpy as np
import polars as pl

from segue.data.catalogue import Catalogue, described_items, open_catalogue, with_arrays
from segue.data.dataset import Data
from segue.data.gather import Gathered, Log, Progress, TimeLook, gather, look_at_times, open_log
from segue.data.rules import k_core
from segue.data.sequences import Sequences
from segue.data.settings import SPLIT_BY_TIME, PrepareSettings, share
from segue.data.split import validation_start
from segue.data.summary import Shares
from segue.data.times import TimeRule, forced_rule, looks_like_number_or_time, moment
from segue.data.vectors import VectorFile, apart, open_vectors, widths
from segue.data.writer import Numbers, final_numbers, write_sequences, write_table
from segue.errors import InputError, SettingsError
from segue.folders import complete_folder, digest, refuse_existing, write_manifest


def prepare(
    source: Any,
    *,
    out: str | Path | None = None,
    user: str | None = None,
    item: str | None = None,
    time: str | None = None,
    value: str | None = None,
    kind: str | None = None,
    items: Any = None,
    min_user: int = 5,
    min_item: int = 5,
    split: str = "last",
    time_format: str | None = None,
    time_zone: str | None = None,
    order: str | None = None,
    drop_duplicates: bool = False,
    max_rejected: float | str = 0.01,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Data:
    """Turn a log into a data folder and open it.

    source: a path, several paths, or a pandas, polars or Arrow table. Logs are CSV, TSV, JSON lines or Parquet, plain
        or packed with gzip or zstd.
    out: the folder to make; without it, a temporary one that is removed at exit (`Data.save` keeps it).
    user, item, time, value, kind: names of columns; user, item and time are found when they are not named.
    items: a catalogue with ids, titles and any further columns, lists of numbers among them (vectors): a path or a
        table. Or several paths: with it, arrays of vectors (x.npy), each with its ids beside it (x.ids.txt, one a
        line, or x.ids.npy).
    min_user, min_item: leave out users and items with fewer events, until all that are left have enough.
    split: `last`, or `time:WHEN` with a date or a number in the unit of the time column.
    time_format: how times are written (`%d/%m/%Y %H:%M`) or their unit (order, s, ms, us, ns), where it is not clear.
    time_zone: the zone of times without an offset; UTC when not given.
    order: a column of whole numbers that orders events of the same time.
    max_rejected: stop when a larger share of the rows cannot be used: 0.01 or "1%".
    """
    settings = PrepareSettings(
        user=user,
        item=item,
        time=time,
        value=value,
        kind=kind,
        order=order,
        min_user=min_user,
        min_item=min_item,
        split=split,
        time_format=time_format,
        time_zone=time_zone,
        drop_duplicates=drop_duplicates,
        max_rejected=share(max_rejected),
    )
    return prepare_folder(source, settings, out=out, items=items, overwrite=overwrite, progress=progress)


def prepare_folder(
    source: Any,
    settings: PrepareSettings,
    *,
    out: str | Path | None = None,
    items: Any = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Data:
    """`prepare` with its settings as one object."""
    told = progress or _silent
    folder = _temporary_folder() if out is None else Path(out)
    refuse_existing(folder, overwrite=overwrite)
    forced_rule(settings)
    log = open_log(source, settings)
    _refuse_unreadable_moment(settings, log)
    told_of, arrays = apart(items)
    catalogue = None if told_of is None else open_catalogue(told_of, item=log.columns.names["item"])
    vectors = [open_vectors(path) for path in arrays]
    with _digests(log) as described_source:
        look = look_at_times(log, settings, told)
        gathered = gather(log, look, settings, told)
        core = _core(gathered, settings, timed=look.rule is not None)
        with complete_folder(folder, overwrite=overwrite) as staging:
            body = _written(staging, core, look, settings, catalogue, vectors, told)
            about = {"source": described_source(), "settings": _settings(settings, log, look)}
            write_manifest(staging, "data", about | body)
    return Data.open(folder)


def _silent(stage: str, done: int, total: int) -> None: ...


def _temporary_folder() -> Path:
    """A folder's name in a place that is removed when Python ends."""
    place = Path(tempfile.mkdtemp(prefix="segue-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    return place / "data"


def _refuse_unreadable_moment(settings: PrepareSettings, log: Log) -> None:
    """Say early what is wrong with --split time:WHEN."""
    if settings.split == "last":
        return
    if "time" not in log.columns.names:
        raise InputError(
            "--split time:… needs times, and no column holds them; name it with --time, or use --split last."
        )
    if not looks_like_number_or_time(settings.split.removeprefix(SPLIT_BY_TIME)):
        raise SettingsError(
            f"--split {settings.split}: expected a date such as time:2024-05-01 or time:2024-05-01T12:00, "
            "or a number in the unit of the time column."
        )


@contextmanager
def _digests(log: Log) -> Iterator[Any]:
    """Compute the digests of the log's files beside the reading; gives a function that waits for them."""
    paths = [path for each in log.inputs if (path := getattr(each, "path", None)) is not None]
    pool = ThreadPoolExecutor(max_workers=1)
    futures: list[tuple[Path, Future[str]]] = [(path, pool.submit(digest, path)) for path in paths]

    def described() -> list[dict[str, Any]]:
        if not futures:
            return [{"table": each.label, "rows": each.size} for each in log.inputs]
        return [
            {"path": str(path.absolute()), "bytes": path.stat().st_size, "sha256": future.result()}
            for path, future in futures
        ]

    try:
        yield described
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


@dataclass(slots=True)
class _Core:
    """What is left to write."""

    gathered: Gathered
    users: Numbers
    items: Numbers
    kinds: Numbers | None
    duplicates: int | None  # None: still in, and counted while writing


def _core(gathered: Gathered, settings: PrepareSettings, *, timed: bool) -> _Core:
    """Drop duplicates if asked, keep users and items with enough events, number them by id."""
    events = gathered.events
    duplicates = events.drop_repeated(len(gathered.users), timed=timed) if settings.drop_duplicates else None
    frame = nw.from_native(events.frame().lazy())
    kept_users, kept_items = k_core(
        frame,
        min_user=settings.min_user,
        min_item=settings.min_item,
        collect=lambda lazy: lazy.collect(engine="streaming"),
    )
    if not len(kept_users):
        raise _nobody_left(gathered, settings)
    users = _numbered(gathered.users.texts(), kept_users, "user")
    items = _numbered(gathered.items.texts(), kept_items, "item")
    if len(items.ids) == 1:
        raise InputError(
            f"Only one item is left ({items.ids[0]!r}), and one item cannot be ranked against anything; "
            "give a log with more items, or lower --min-user and --min-item."
        )
    kinds = None
    if len(gathered.kinds):
        every = np.arange(len(gathered.kinds))
        kinds = final_numbers(gathered.kinds.texts(), every, np.zeros(len(every), dtype=np.int64))
    return _Core(gathered, users, items, kinds, duplicates)


def _numbered(texts: pl.Series, kept: nw.DataFrame[Any], column: str) -> Numbers:
    return final_numbers(texts, kept[column].to_numpy(), kept["events"].to_numpy())


def _nobody_left(gathered: Gathered, settings: PrepareSettings) -> InputError:
    counts = gathered.events.user_counts(len(gathered.users))
    enough = int((counts >= settings.min_user).sum())
    return InputError(
        f"Nobody is left: of {len(gathered.users)} users and {len(gathered.items)} items with {gathered.kept} events, "
        f"{enough} users have the {settings.min_user} events that --min-user asks for (the most active has "
        f"{int(counts.max())}), and none on items with {settings.min_item} events (--min-item). Lower one or both."
    )


def _written(
    folder: Path,
    core: _Core,
    look: TimeLook,
    settings: PrepareSettings,
    catalogue: Catalogue | None,
    vectors: Sequence[VectorFile],
    progress: Progress,
) -> dict[str, Any]:
    """Write every file but the manifest; gives the manifest's facts about them."""
    gathered, total = core.gathered, len(core.gathered.events)
    shares = Shares(_test_from(settings, look.rule))
    repeats = write_sequences(
        folder,
        gathered.events,
        users=core.users,
        items=core.items,
        kinds=None if core.kinds is None else core.kinds.places,
        timed=look.rule is not None,
        met=shares.add,
        progress=lambda done: progress("sorting and writing", done, total),
    )
    table = pl.DataFrame({"id": core.items.ids, "count": core.items.counts})
    counts = _counts(core, repeats if core.duplicates is None else core.duplicates)
    if catalogue is not None:
        described, counts["catalogue"] = described_items(catalogue, core.items.ids, max_rejected=settings.max_rejected)
        table = table.hstack(described.drop("id"))
    table = with_arrays(table, vectors)
    if found := widths(table):
        counts["vectors"] = found
    write_table(folder / "items.parquet", table)
    write_table(folder / "users.parquet", pl.DataFrame({"id": core.users.ids}))
    write_table(folder / "rejected.parquet", gathered.rejected.table())
    return {
        "counts": counts,
        "tie_share": shares.tie_share if look.rule is not None else 0.0,
        "repeat_share": shares.repeat_share,
        "split": _split(folder, shares.test_from),
        "kinds": [] if core.kinds is None else core.kinds.ids.to_list(),
        "has_time": look.rule is not None and look.rule.dated,
    }


def _test_from(settings: PrepareSettings, rule: TimeRule | None) -> int | None:
    """The moment from which events are tested, None for `--split last`."""
    if settings.split == "last" or rule is None:
        return None
    said = settings.split.removeprefix(SPLIT_BY_TIME)
    found = moment(said, rule)
    if found is None:
        raise SettingsError(
            f"--split time:{said} is neither a date nor a number in the unit of the times ({rule.description()})."
        )
    return found


def _split(folder: Path, test_from: int | None) -> dict[str, Any]:
    """The split as the manifest tells it."""
    if test_from is None:
        return {"kind": "last"}
    offsets, items, times = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("offsets", "items", "times"))
    written = Sequences(offsets=offsets, items=items, times=times)
    return {"kind": "time", "valid_from": validation_start(written, test_from=test_from), "test_from": test_from}


def _counts(core: _Core, duplicates: int) -> dict[str, Any]:
    gathered = core.gathered
    return {
        "rows": gathered.rows,
        "kept": gathered.kept,
        "rejected": dict(sorted(gathered.rejected.counts.items())),
        "duplicates": duplicates,
        "users": len(core.users.ids),
        "items": len(core.items.ids),
        "events": int(core.users.counts.sum()),
    }


def _settings(settings: PrepareSettings, log: Log, look: TimeLook) -> dict[str, Any]:
    """What was asked and what was assumed, for the manifest and the summary."""
    rule = look.rule
    names = {("order" if log.ordered and role == "time" else role): name for role, name in log.columns.names.items()}
    time = {"form": "row order", "description": "no time column: the row order is the order"}
    if rule is not None:
        time = {"form": rule.form, "description": rule.description()}
        time |= {"format": rule.format} if rule.format is not None else {}
        time |= {"zone": rule.zone} if rule.zone is not None else {}
        if rule.form == "order":
            time["stored"] = "the number times 1,000,000, so that its seconds are the order"
    return {
        "columns": names,
        "found": list(log.columns.found),
        "layout": "one row a user" if log.columns.lists else "one row an event",
        "time": time,
        "min_user": settings.min_user,
        "min_item": settings.min_item,
        "split": settings.split,
        "drop_duplicates": settings.drop_duplicates,
        "max_rejected": settings.max_rejected,
    }
