"""A log → a data folder: decide how times are read, read and check the rows, compute the k-core, sort and write.

The steps and their order are the same for both engines; an engine only reads, checks and sorts. The executors of the
Spark engine run the local parsers and rules over Arrow tables.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, Unpack

import numpy as np
import polars as pl

from segue.data.dataset import Data
from segue.data.local import open_local_engine
from segue.data.read.catalogue import Catalogue, described_items, open_catalogue
from segue.data.read.log import Log, ProgressCallback, TimeDecision, decide_times
from segue.data.read.times import TimeRule, forced_rule, looks_like_number_or_time, read_time
from segue.data.read.vectors import VectorFile, open_vectors, split_sources, widths, with_arrays
from segue.data.sequences import Sequences
from segue.data.settings import SPLIT_BY_TIME, PrepareOptions, PrepareSettings
from segue.data.split import validation_start
from segue.data.write.summary import Shares
from segue.data.write.writer import Core, write_sequences, write_table
from segue.errors import InputError, SettingsError
from segue.folders import Replaced, complete_folder, refuse_existing, write_manifest


class Engine(Protocol):
    """Reads a log and sorts its events."""

    @property
    def log(self) -> Log: ...

    def count_forms(self) -> dict[str, int]:
        """How many values of the time column fit each form."""

    def core(self, times: TimeDecision) -> Core:
        """The users and items with enough events, of rows that pass the rules; raises if too many are rejected."""

    def described(self) -> list[dict[str, Any]]:
        """The sources of the log, for the manifest."""


def prepare(
    source: Any,
    *,
    out: str | Path | None = None,
    items: Any = None,
    overwrite: bool = False,
    progress: ProgressCallback | None = None,
    **options: Unpack[PrepareOptions],
) -> Data:
    """Turn a log into a data folder and open it.

    source: a path, several paths, or a pandas, polars or Arrow table. Logs are CSV, TSV, JSON lines or Parquet, plain
        or compressed with gzip or zstd. engine="spark" does not take tables in memory.
    out: the new folder; without it, a temporary one that is removed at exit (`Data.save` copies it).
    items: a catalogue with ids, titles and any further columns, lists of numbers (vectors) among them: a path or a
        table. Or several paths: the catalogue and arrays of vectors (x.npy), each with a file of ids (x.ids.txt, one
        id a line, or x.ids.npy).

    options: the columns user, item, time, value, kind and order; min_user, min_item, split, time_format, time_zone,
        drop_duplicates, max_rejected, engine and spark_remote. `segue.data.settings.PrepareSettings` describes each.
    """
    settings = PrepareSettings(**options)  # type: ignore[arg-type]  # a share as text becomes a number
    return prepare_folder(source, settings, out=out, items=items, overwrite=overwrite, progress=progress)


def prepare_folder(
    source: Any,
    settings: PrepareSettings,
    *,
    out: str | Path | None = None,
    items: Any = None,
    overwrite: bool = False,
    progress: ProgressCallback | None = None,
) -> Data:
    """`prepare` with its settings as one object."""
    progress = progress or (lambda _stage, _done, _total: None)
    if out is None:
        out = Path(tempfile.mkdtemp(prefix="segue-")) / "data"
        atexit.register(shutil.rmtree, out.parent, ignore_errors=True)
    folder = Path(out)
    replaced: Replaced = "data" if overwrite else False
    refuse_existing(folder, overwrite=replaced)
    forced_rule(settings)
    open_engine: Callable[[Any, PrepareSettings, ProgressCallback], AbstractContextManager[Engine]] = open_local_engine
    if settings.engine == "spark":
        from segue.data.spark.engine import open_spark_engine  # pyspark is an extra

        open_engine = open_spark_engine
    with open_engine(source, settings, progress) as engine:
        log = engine.log
        _refuse_unreadable_split(settings, log)
        table, arrays = split_sources(items)
        catalogue = None if table is None else open_catalogue(table, item=log.columns.names["item"])
        vectors = [open_vectors(path) for path in arrays]
        times = decide_times(log, settings, engine.count_forms)
        core = engine.core(times)
        with complete_folder(folder, overwrite=replaced) as staging:
            body = _write_files(staging, core, times.rule, settings, progress)
            body["counts"] |= _write_items(staging / "items.parquet", core, catalogue, vectors, settings.max_rejected)
            about = {"source": engine.described(), "settings": settings.stored(), "log": _log_facts(log, times.rule)}
            write_manifest(staging, "data", about | body)
    return Data.open(folder)


def _refuse_unreadable_split(settings: PrepareSettings, log: Log) -> None:
    """Refuse a --split time:WHEN that cannot be read, before the log is read."""
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


def _write_files(
    folder: Path, core: Core, rule: TimeRule | None, settings: PrepareSettings, progress: ProgressCallback
) -> dict[str, Any]:
    """Write every file but the items and the manifest, and return their entries of the manifest."""
    shares = Shares(_test_from(settings, rule))
    write_sequences(folder, core, on_written=shares.add, progress=progress)
    split: dict[str, Any] = {"kind": "last"}
    if (test_from := shares.test_from) is not None:
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("offsets", "items", "times")}
        valid_from = validation_start(Sequences(**arrays), test_from=test_from)
        split = {"kind": "time", "valid_from": valid_from, "test_from": test_from}
    write_table(folder / "users.parquet", pl.DataFrame({"id": core.users.ids}))
    write_table(folder / "rejected.parquet", core.rejected.table())
    return {
        "counts": {
            "rows": core.rows,
            "good": core.rows - core.rejected.total,
            "rejected": dict(sorted(core.rejected.counts.items())),
            "duplicates": core.events.duplicates,
            "users": len(core.users.ids),
            "items": len(core.items.ids),
            "events": int(core.users.counts.sum()),
        },
        "tie_share": shares.tied / max(1, shares.users) if rule is not None else 0.0,
        "repeat_share": shares.repeats / max(1, shares.targets),
        "split": split,
        "kinds": [] if core.kinds is None else core.kinds.to_list(),
        "has_time": rule is not None and rule.dated,
    }


def _write_items(
    path: Path, core: Core, catalogue: Catalogue | None, vectors: Sequence[VectorFile], max_rejected: float
) -> dict[str, Any]:
    """Write the vocabulary, and return the counts of the catalogue and of its vectors."""
    counts: dict[str, Any] = {}
    table = pl.DataFrame({"id": core.items.ids, "count": core.items.counts})
    if catalogue is not None:
        described, counts["catalogue"] = described_items(catalogue, core.items.ids, max_rejected=max_rejected)
        table = table.hstack(described.drop("id"))
    table = with_arrays(table, vectors)
    if sizes := widths(table):
        counts["vectors"] = sizes
    write_table(path, table)
    return counts


def _test_from(settings: PrepareSettings, rule: TimeRule | None) -> int | None:
    """The time of the first test event in microseconds, None for `--split last`."""
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


def _log_facts(log: Log, rule: TimeRule | None) -> dict[str, Any]:
    """The log's entries of the manifest: its columns, its layout and how its times were read."""
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
    }
