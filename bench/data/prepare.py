"""Seconds and peak memory of `segue prepare` on generated logs, plain CSV in random order, with some bad rows.

    python -m bench prepare --events 1000000 10000000
    python -m bench prepare --events 10000000 --times seconds ISO format --repeats 3

The command runs as a child process; memory is that of the child and its own children together. With several --times,
the same events are written with their times as epoch seconds, in ISO 8601 and in a --time-format; the logs are prepared
alternately, and the medians of the repeats are shown.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import statistics
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
    "peak MB is resident memory, children included; bytes an event is its growth from the smallest log on.",
    "ratio: seconds, or CPU seconds (user and system, which other work on the machine changes less), over those of the "
    "first of --times.",
)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench prepare", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--events", type=int, nargs="+", default=list(SIZES), help="sizes of the logs")
    parser.add_argument("--times", nargs="+", choices=list(make_log.TIME_FORMATS), default=["seconds"])
    parser.add_argument("--repeats", type=int, default=1, help="how often each log is prepared; medians are shown")
    parser.add_argument("--folder", type=Path, help="where logs are generated; 50 million events take 2 GB")
    parser.add_argument("--json", type=Path, help="write the results here too")
    arguments = parser.parse_args(argv)
    runs = [run for events in sorted(arguments.events) for run in _runs(events, arguments)]
    rows = [_row(run, smallest=runs[0], times=arguments.times) for run in runs]
    written = publish("prepare", title="segue prepare", rows=rows, notes=NOTES, body=runs)
    if arguments.json:
        shutil.copyfile(written, arguments.json)


def _runs(events: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Generate a log for each form of times, and prepare them alternately."""
    runs = []
    with tempfile.TemporaryDirectory(prefix="segue-bench-", dir=arguments.folder) as name:
        folder = Path(name)
        for times in arguments.times:
            make_log.make_log(folder / f"{times}.csv", events=events, times=times)
        measurements = [(times, _measure(folder, times)) for _ in range(arguments.repeats) for times in arguments.times]
        for times in arguments.times:
            own = [numbers for name, numbers in measurements if name == times]
            medians = {key: statistics.median(each[key] for each in own) for key in ("seconds", "cpu seconds")}
            size = (folder / f"{times}.csv").stat().st_size
            runs.append({"events": events, "times": times, "log bytes": size, **own[-1], **medians})
    for run in runs:
        run["ratios"] = {f"{key} ratio": run[key] / runs[0][key] for key in ("seconds", "cpu seconds")}
    return runs


def _measure(folder: Path, times: str) -> dict[str, Any]:
    """Prepare one log."""
    time_format = make_log.TIME_FORMATS[times]
    options = ["--time-format", time_format] if times == "format" and time_format else []
    before = _cpu_seconds()
    out = folder / "data"
    command = [*SEGUE, "prepare", str(folder / f"{times}.csv"), "--out", str(out), "--json", *options]
    seconds, peak, report = measure_command(command)
    shutil.rmtree(out)
    cpu = _cpu_seconds() - before
    return {"seconds": seconds, "cpu seconds": cpu, "peak bytes": peak, "counts": report["counts"]}


def _cpu_seconds() -> float:
    """User and system time of all children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure_command(command: list[str]) -> tuple[float, int, dict[str, Any]]:
    """Seconds, peak resident bytes and the JSON that a command prints; waits for its end without polling."""
    with tempfile.TemporaryFile() as output:
        start = time.perf_counter()
        child = subprocess.Popen(command, stdout=output)
        watcher = _PeakMemory(child.pid)
        watcher.start()
        _, status = os.waitpid(child.pid, 0)
        seconds = time.perf_counter() - start
        child.returncode = os.waitstatus_to_exitcode(status)
        watcher.ended.set()
        watcher.join()
        if child.returncode:
            raise SystemExit(f"bench: {' '.join(command)} failed with exit code {child.returncode}")
        output.seek(0)
        return seconds, watcher.peak, json.load(output)


class _PeakMemory(threading.Thread):
    """Samples the resident memory of a process and its children until `ended` is set.

    The process's own peak is the kernel's (VmHWM), so that nothing between two samples is missed. The peak of `wait4`
    starts with the memory of the parent process.
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
                total = sum(each.memory_info().rss for each in family)
                self.peak = max(self.peak, total, _own_peak(self._pid))
            except (psutil.Error, OSError):
                continue


def _own_peak(pid: int) -> int:
    """Bytes; 0 of a process that has ended."""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(match.group(1)) * 1024 if match else 0


def _row(run: dict[str, Any], *, smallest: dict[str, Any], times: list[str]) -> dict[str, Any]:
    events, seconds, peak = run["events"], run["seconds"], run["peak bytes"]
    more = events - smallest["events"]
    row = {
        "events": events,
        "seconds": seconds,
        "events/s": events / seconds,
        "µs/event": 1e6 * seconds / events,
        "peak MB": peak / MEGABYTE,
        "bytes/event": (peak - smallest["peak bytes"]) / more if more else "–",
    }
    return row if len(times) == 1 else {"times": run["times"], **row, **run["ratios"]}


if __name__ == "__main__":
    main(sys.argv[1:])
