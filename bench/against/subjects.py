"""What can be measured of two versions, each through its own command line: an epoch, the service, `prepare`."""

from __future__ import annotations

import json
import random
import shutil
import statistics
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import polars as pl

from bench.against.alternate import Numbers
from bench.against.version import Version
from bench.data import make_log
from bench.data.prepare import MEGABYTE, measure_command
from bench.data.scale import EVENTS_A_USER, EVENTS_AN_ITEM
from bench.serving import load
from bench.serving.server import Server, free_port
from bench.serving.watch import Watch
from segue.errors import InputError

SHAPE = ("model.width=64", "model.depth=2", "train.epochs=1")  # of the run that is served
TIME_FORMATS = {"seconds": None, "ISO": "%Y-%m-%dT%H:%M:%SZ", "format": "%d.%m.%Y %H:%M:%S"}
A_ROW = r"^([^,]*,[^,]*,)(\d+)(.*)$"  # of make_log: user and item, the seconds, fields too many


class Subject(Protocol):
    def begin(self, version: Version) -> None:
        """Prepare a version, once, before any measurement."""

    def measure(self, version: Version) -> Numbers: ...


class Epoch:
    """Seconds of a training epoch, as the run's manifest has them; the first epoch of each training is left out."""

    def __init__(self, settings: Namespace, work: Path) -> None:
        self._log, self._work, self._recipe, self._threads = _log(settings), work, settings.recipe, settings.threads

    def begin(self, version: Version) -> None:
        run_segue(version, "prepare", self._log, "--out", self._work / version.name)

    def measure(self, version: Version) -> Numbers:
        run = self._work / f"{version.name}-run"
        changes = ("--set", "train.epochs=2", "--set", f"train.threads={self._threads}")
        run_segue(version, "train", self._work / version.name, "--out", run, "--recipe", self._recipe, *changes)
        seconds = json.loads((run / "manifest.json").read_bytes())["training"]["seconds"]
        shutil.rmtree(run)
        return {"s an epoch": statistics.median(seconds[1:])}


class Serve:
    """Processor time of an answer and its latency, under a constant rate, of a service over the log's histories."""

    def __init__(self, settings: Namespace, work: Path) -> None:
        self._log, self._work = _log(settings), work
        self._rate, self._seconds = settings.rate, settings.seconds
        users = pl.read_csv(self._log, separator="\t", columns=["user"], infer_schema=False)["user"].unique()
        self._users = users.sort().to_list()

    def begin(self, version: Version) -> None:
        folder = self._work / version.name
        changes = [part for change in SHAPE for part in ("--set", change)]
        run_segue(version, "prepare", self._log, "--out", folder / "data")
        run_segue(version, "train", folder / "data", "--out", folder / "run", "--recipe", "sasrec", *changes)
        self._started(version).stop()  # the first start fills the store

    def measure(self, version: Version) -> Numbers:
        server = self._started(version)
        try:
            load.finish(load.start(self._job(server.port, self._seconds / 4)))
            with Watch(server.pid) as watch:
                answers = load.finish(load.start(self._job(server.port, self._seconds))).kind("GET")
                cpu_seconds = watch.cpu_seconds()
        finally:
            server.stop()
        if answers.failed or answers.p50 is None or answers.p90 is None:
            raise InputError(
                f"{answers.failed} of {answers.requests} requests to {version.name} failed at {self._rate:g} a second; "
                "expected none. Measure at a smaller rate: ARGS='--rate 200'."
            )
        return {"CPU ms a request": 1000 * cpu_seconds / answers.requests, "p50 ms": answers.p50, "p90 ms": answers.p90}

    def _started(self, version: Version) -> Server:
        folder = self._work / version.name
        arguments = [str(folder / "run"), "--data", str(folder / "data"), "--store", str(folder / "events.db")]
        server = Server(arguments, port=free_port(), log=folder / "server.log", segue=version.segue())
        server.wait_ready()
        return server

    def _job(self, port: int, seconds: float) -> load.Job:
        chance, count = random.Random(1), round(self._rate * seconds)
        paths = [f"/users/{user}/recommendations" for user in chance.choices(self._users, k=count)]
        return load.Job(port=port, kinds=[load.Kind(name="GET", paths=paths, rate=self._rate)], seconds=seconds)


class Prepare:
    """Seconds of `segue prepare` on one generated log whose times are written in several ways."""

    def __init__(self, settings: Namespace, work: Path) -> None:
        self._work, self._logs = work, dict[str, Path]()
        first = work / "seconds.csv"
        print(f"writing a log of {settings.events:,} events …", file=sys.stderr, flush=True)
        users, items = max(2, settings.events // EVENTS_A_USER), max(2, settings.events // EVENTS_AN_ITEM)
        make_log.make_log(first, events=settings.events, users=users, items=items)
        for name in settings.times:
            self._logs[name] = first if name == "seconds" else work / f"{name}.csv"
            if name != "seconds":
                write_times(first, self._logs[name], TIME_FORMATS[name] or "")

    def begin(self, version: Version) -> None:
        """Nothing to prepare."""

    def measure(self, version: Version) -> Numbers:
        numbers: Numbers = {}
        for name, log in self._logs.items():
            out, options = self._work / "data", ("--time-format", TIME_FORMATS[name]) if name == "format" else ()
            seconds, peak, _ = measure_command(version.segue("prepare", log, "--out", out, "--json", *options))
            shutil.rmtree(out)
            numbers |= {f"s, {name}": seconds, f"peak MB, {name}": peak / MEGABYTE}
            if name != "seconds" and "s, seconds" in numbers:
                numbers[f"{name} / seconds"] = seconds / numbers["s, seconds"]
        return numbers


SUBJECTS: dict[str, Callable[[Namespace, Path], Subject]] = {"epoch": Epoch, "serve": Serve, "prepare": Prepare}


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--recipe", default="default", help="epoch: the recipe")
    parser.add_argument("--threads", type=int, default=2, help="epoch: threads of a training")
    parser.add_argument("--rate", type=float, default=500.0, help="serve: requests a second")
    parser.add_argument("--seconds", type=float, default=20.0, help="serve: of each measurement")
    parser.add_argument("--events", type=int, default=10_000_000, help="prepare: of the generated log")
    parser.add_argument(
        "--times", nargs="+", choices=list(TIME_FORMATS), default=list(TIME_FORMATS), help="prepare: how times stand"
    )


def write_times(log: Path, out: Path, form: str) -> None:
    """Copy a log of `make_log` with its seconds written in another form; rows without seconds stay as they are."""
    line = pl.col("line")
    time = pl.from_epoch(line.str.extract(A_ROW, 2).cast(pl.Int64), time_unit="s").dt.strftime(form)
    text = pl.concat_str(line.str.extract(A_ROW, 1), time, line.str.extract(A_ROW, 3))
    lines = pl.scan_csv(log, has_header=False, separator="\x01", quote_char=None, new_columns=["line"])
    rewritten_lines = lines.select(pl.when(line.str.contains(A_ROW)).then(text).otherwise(line))
    rewritten_lines.sink_csv(out, include_header=False, separator="\x01", quote_style="never")


def run_segue(version: Version, *arguments: object) -> None:
    process = subprocess.run(version.segue(*arguments), capture_output=True, text=True, check=False)
    if process.returncode:
        reason = (process.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise InputError(f"`segue {arguments[0]}` of the version {version.name} failed: {reason}")


def _log(options: Namespace) -> Path:
    log: Path | None = options.data / "events.tsv.gz" if options.data else None
    if log is None or not log.is_file():
        raise InputError(
            f"Expected a log for {options.subject}, got {options.data or 'none'}: give DATA=folder with an "
            "events.tsv.gz of the columns user, item and ts."
        )
    return log
