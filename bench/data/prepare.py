"""Seconds and peak memory of `segue prepare` on generated logs, plain CSV in random order, with some bad rows.

    python -m bench prepare --events 1000000 10000000

The real command runs as a child process; memory is that of the child and its own children together.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from bench.data import make_log
from bench.tables import publish

SEGUE = (sys.executable, "-m", "segue")  # what .venv/bin/segue runs
SIZES = (1_000_000, 10_000_000, 50_000_000)
MEGABYTE = 1 << 20
SAMPLE_SECONDS = 0.02
NOTES = (
    f"{make_log.USERS:,} users, {make_log.ITEMS:,} items by Zipf's law, ids of 12 to 16 characters, random order, "
    f"{make_log.BAD_SHARE:.1%} bad rows. Starting Python and computing the log's digest are counted.",
    "peak MB is resident memory, children included; bytes an event is what it grew by from the smallest log on.",
)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench prepare", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--events", type=int, nargs="+", default=list(SIZES), help="sizes of the logs")
    parser.add_argument("--folder", type=Path, help="where logs are generated; 50 million events take 2 GB")
    parser.add_argument("--json", type=Path, help="write the results here too")
    chosen = parser.parse_args(argv)
    runs = [_run(events, chosen.folder) for events in sorted(chosen.events)]
    rows = [_row(run, smallest=runs[0]) for run in runs]
    written = publish("prepare", title="segue prepare", rows=rows, notes=NOTES, body=runs)
    if chosen.json:
        shutil.copyfile(written, chosen.json)


def _run(events: int, place: Path | None) -> dict[str, Any]:
    """Generate a log, prepare it, and say what that took."""
    with tempfile.TemporaryDirectory(prefix="segue-bench-", dir=place) as name:
        log, out = Path(name) / "log.csv", Path(name) / "data"
        make_log.make_log(log, events=events)
        seconds, peak, printed = measured([*SEGUE, "prepare", str(log), "--out", str(out), "--json"])
        size = log.stat().st_size
    return {"events": events, "seconds": seconds, "peak bytes": peak, "log bytes": size, "counts": printed["counts"]}


def measured(command: list[str]) -> tuple[float, int, dict[str, Any]]:
    """Seconds, peak resident bytes and the JSON that a command prints; its end is waited for without busy waiting."""
    with tempfile.TemporaryFile() as answer:
        began = time.perf_counter()
        child = subprocess.Popen(command, stdout=answer)
        watcher = _PeakMemory(child.pid)
        watcher.start()
        _, status = os.waitpid(child.pid, 0)
        seconds = time.perf_counter() - began
        child.returncode = os.waitstatus_to_exitcode(status)
        watcher.ended.set()
        watcher.join()
        if child.returncode:
            raise SystemExit(f"bench: {' '.join(command)} failed with exit code {child.returncode}")
        answer.seek(0)
        return seconds, watcher.peak, json.load(answer)


class _PeakMemory(threading.Thread):
    """Samples the resident memory of a process and its children until told to stop.

    The process's own peak is the kernel's (VmHWM), so that nothing between two samples is missed. What `wait4` says
    will not do: it begins with the memory of the process that started this one.
    """

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self.peak = 0
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(SAMPLE_SECONDS):
            try:
                process = psutil.Process(self._pid)
                family = [process, *process.children(recursive=True)]
                together = sum(each.memory_info().rss for each in family)
                self.peak = max(self.peak, together, _own_peak(self._pid))
            except (psutil.Error, OSError):
                continue


def _own_peak(pid: int) -> int:
    """Bytes; 0 of a process that has ended."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found.group(1)) * 1024 if found else 0


def _row(run: dict[str, Any], *, smallest: dict[str, Any]) -> dict[str, Any]:
    events, seconds, peak = run["events"], run["seconds"], run["peak bytes"]
    more = events - smallest["events"]
    return {
        "events": events,
        "seconds": seconds,
        "events/s": events / seconds,
        "µs/event": 1e6 * seconds / events,
        "peak MB": peak / MEGABYTE,
        "bytes/event": (peak - smallest["peak bytes"]) / more if more else "–",
    }


if __name__ == "__main__":
    main(sys.argv[1:])
