"""A log → a data folder: look at the times, read and judge, keep the core, sort and write.

The order of work, whichever engine does it; what is made of the engine's numbers is the same for all.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import polars as pl

from segue.data.dataset import Data
from segue.data.local import open_local_engine
from segue.data.read.catalogue import Catalogue, described_items, open_catalogue, with_arrays
from segue.data.read.gather import Log, Progress, TimeLook
from segue.data.read.times import TimeRule, forced_rule, looks_like_number_or_time, read_time
from segue.data.read.vectors import VectorFile, apart, open_vectors, widths
from segue.data.sequences import Sequences
from segue.data.settings import SPLIT_BY_TIME, EngineName, PrepareSettings, on_spark, share
from segue.data.split import validation_start
from segue.data.write.summary import Shares
from segue.data.write.writer import Core, write_sequences, write_table
from segue.errors import InputError, SettingsError
from segue.folders import Replaced, complete_folder, refuse_existing, write_manifest


class Engine(Protocol):
    """Reads a log and brings its events into their final order."""

    @property
    def log(self) -> Log: ...

    def look_at_times(self) -> TimeLook:
        """Decide how the times are read, over the whole column."""
        ...

    def core(self, look: TimeLook) -> Core:
        """Read and judge every row, stop when too many are bad, keep users and items with enough events."""
        ...

    def described(self) -> list[dict[str, Any]]:
        """The log, for the manifest."""
        ...


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
    engine: EngineName = "local",
    spark_remote: str | None = None,
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
    engine: `local`, or `spark`, which makes the same folder and also takes folders, addresses such as s3a://…, the
        name of a table, and a Spark DataFrame (not the tables above).
    spark_remote: the address of a Spark Connect server (sc://host:port); see `spark_session.open_session` for what is
        used without it.
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
    return prepare_folder(
        source,
        settings,
        out=out,
        items=items,
        overwrite=overwrite,
        engine=engine,
        spark_remote=spark_remote,
        progress=progress,
    )


def prepare_folder(
    source: Any,
    settings: PrepareSettings,
    *,
    out: str | Path | None = None,
    items: Any = None,
    overwrite: bool = False,
    engine: EngineName = "local",
    spark_remote: str | None = None,
    progress: Progress | None = None,
) -> Data:
    """`prepare` with its settings as one object."""
    told = progress or _silent
    folder = _temporary_folder() if out is None else Path(out)
    replaced: Replaced = "data" if overwrite else False
    refuse_existing(folder, overwrite=replaced)
    forced_rule(settings)
    with _opened(engine, spark_remote, source, settings, told) as opened:
        log = opened.log
        _refuse_unreadable_moment(settings, log)
        told_of, arrays = apart(items)
        catalogue = None if told_of is None else open_catalogue(told_of, item=log.columns.names["item"])
        vectors = [open_vectors(path) for path in arrays]
        look = opened.look_at_times()
        core = opened.core(look)
        with complete_folder(folder, overwrite=replaced) as staging:
            body = _written(staging, core, look, settings, catalogue, vectors, told)
            about = {"source": opened.described(), "settings": _settings(settings, log, look)}
            write_manifest(staging, "data", about | body)
    return Data.open(folder)


@contextmanager
def _opened(
    engine: EngineName, remote: str | None, source: Any, settings: PrepareSettings, progress: Progress
) -> Iterator[Engine]:
    """The engine that was asked for, with the log open."""
    if on_spark(engine, remote):
        from segue.data.spark.engine import open_spark_engine  # pyspark is an extra

        with open_spark_engine(source, settings, progress, remote=remote) as opened:
            yield opened
        return
    with open_local_engine(source, settings, progress) as opened:
        yield opened


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


def _written(
    folder: Path,
    core: Core,
    look: TimeLook,
    settings: PrepareSettings,
    catalogue: Catalogue | None,
    vectors: Sequence[VectorFile],
    progress: Progress,
) -> dict[str, Any]:
    """Write every file but the manifest; gives the manifest's facts about them."""
    total = int(core.users.counts.sum())
    shares = Shares(_test_from(settings, look.rule))
    write_sequences(folder, core, met=shares.add, progress=lambda done: progress("sorting and writing", done, total))
    table = pl.DataFrame({"id": core.items.ids, "count": core.items.counts})
    counts = _counts(core)
    if catalogue is not None:
        described, counts["catalogue"] = described_items(catalogue, core.items.ids, max_rejected=settings.max_rejected)
        table = table.hstack(described.drop("id"))
    table = with_arrays(table, vectors)
    if found := widths(table):
        counts["vectors"] = found
    write_table(folder / "items.parquet", table)
    write_table(folder / "users.parquet", pl.DataFrame({"id": core.users.ids}))
    write_table(folder / "rejected.parquet", core.rejected.table())
    return {
        "counts": counts,
        "tie_share": shares.tie_share if look.rule is not None else 0.0,
        "repeat_share": shares.repeat_share,
        "split": _split(folder, shares.test_from),
        "kinds": [] if core.kinds is None else core.kinds.to_list(),
        "has_time": look.rule is not None and look.rule.dated,
    }


def _test_from(settings: PrepareSettings, rule: TimeRule | None) -> int | None:
    """The moment from which events are tested, None for `--split last`."""
    if settings.split == "last" or rule is None:
        return None
    text = settings.split.removeprefix(SPLIT_BY_TIME)
    try:
        return read_time(text, replace(rule, zone=settings.time_zone))
    except ValueError as error:
        raise SettingsError(
            f"--split time:{text} is neither a date nor a number in the unit of the times ({rule.description()}): "
            f"{error}."
        ) from error


def _split(folder: Path, test_from: int | None) -> dict[str, Any]:
    """The split as the manifest tells it."""
    if test_from is None:
        return {"kind": "last"}
    offsets, items, times = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("offsets", "items", "times"))
    written = Sequences(offsets=offsets, items=items, times=times)
    return {"kind": "time", "valid_from": validation_start(written, test_from=test_from), "test_from": test_from}


def _counts(core: Core) -> dict[str, Any]:
    return {
        "rows": core.rows,
        "kept": core.kept,
        "rejected": dict(sorted(core.rejected.counts.items())),
        "duplicates": core.events.duplicates,
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
