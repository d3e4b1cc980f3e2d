"""Seconds, CPU and peak memory of `segue prepare` as a shop grows: users and items grow with the events.

    python -m bench scale --folder /large/disk

The `prepare` bench has 500 thousand users and 100 thousand items at every size; here there is a user for every 20
events and an item for every 100, so 100 million events are of 5 million users and 1 million items.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.data import make_log
from bench.data.prepare import MEGABYTE, SEGUE, measure_command
from bench.tables import publish

SIZES = (1_000_000, 10_000_000, 100_000_000)
EVENTS_A_USER, EVENTS_AN_ITEM = 20, 100
NOTES = (
    f"A user for every {EVENTS_A_USER} events and an item for every {EVENTS_AN_ITEM}, otherwise the logs of the "
    "`prepare` bench. Starting Python and computing the log's digest are counted.",
    "peak MB is resident memory, children included; bytes/event is what it grew by from the smallest log on, ids "
    "included. times the smallest is µs/event against that of the first row.",
)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench scale", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--events", type=int, nargs="+", default=list(SIZES), help="sizes of the logs")
    parser.add_argument(
        "--folder", type=Path, help="where logs are generated, and stay for the next time; 100 million take 4 GB"
    )
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="segue-bench-", dir=options.folder) as name:
        runs = [
            _run(log_of(events, options.folder or Path(name)), Path(name) / f"data-{events}", events)
            for events in sorted(options.events)
        ]
    rows = [_row(run, smallest=runs[0]) for run in runs]
    publish("scale", title="segue prepare as a shop grows", rows=rows, notes=NOTES, body=runs)


def log_of(events: int, folder: Path) -> Path:
    """The log of this size, generated where it is not there yet."""
    path = folder / f"segue-scale-{events}.csv"
    if not path.exists():
        partial = path.with_suffix(".partial")
        make_log.make_log(partial, events=events, users=events // EVENTS_A_USER, items=max(2, events // EVENTS_AN_ITEM))
        partial.rename(path)
    return path


def _run(log: Path, out: Path, events: int) -> dict[str, Any]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds, peak, report = measure_command([*SEGUE, "prepare", str(log), "--out", str(out), "--json"])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    size = log.stat().st_size
    counts = report["counts"]
    return {"events": events, "seconds": seconds, "cpu": cpu, "peak": peak, "log bytes": size, "counts": counts}


def _row(run: dict[str, Any], *, smallest: dict[str, Any]) -> dict[str, Any]:
    events, more = run["events"], run["events"] - smallest["events"]
    each, least = (1e6 * of["seconds"] / of["events"] for of in (run, smallest))
    return {
        "events": events,
        "users kept": run["counts"]["users"],
        "items kept": run["counts"]["items"],
        "seconds": run["seconds"],
        "CPU seconds": run["cpu"],
        "µs/event": each,
        "times the smallest": each / least,
        "peak MB": run["peak"] / MEGABYTE,
        "bytes/event": (run["peak"] - smallest["peak"]) / more if more else "–",
    }


if __name__ == "__main__":
    main(sys.argv[1:])
