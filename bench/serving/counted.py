"""CPU and latency of the service with item-to-item counts and without them: one run, with its file of counts and with
that file left out, served alternately over the histories of its log."""

from __future__ import annotations

import shutil
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

from bench.against.alternate import alternate, rows
from bench.against.subjects import SHAPE, Serve, run_segue
from bench.against.version import ROOT, Version
from bench.tables import publish
from segue import folders
from segue.errors import InputError
from segue.recommend.recommender import COUNTS

WITH, WITHOUT = (Version(name, ROOT, Path(sys.executable)) for name in ("with counts", "without counts"))
COUNTED = ("counts=fitted", *SHAPE)
MOST_CPU = 1.1  # of a request without counts


def measure_service(options: Namespace, *, of: str) -> None:
    """`options`: data, run, rate, seconds and rounds; `of`: what is served, for the notes."""
    with tempfile.TemporaryDirectory(prefix="segue-bench-") as name:
        work = Path(name)
        serve = Serve(options, work)
        make_folders(options.data / "events.tsv.gz", options.run, work)
        results = alternate((WITH, WITHOUT), serve.measure, rounds=options.rounds)
    numbers = rows(results)
    cpu = numbers[0]["ratio"]
    run = "A sasrec of width 64 and two blocks, trained for one epoch," if options.run is None else str(options.run)
    notes = (
        f"{run} over {of}; {options.rate:,.0f} requests a second, one worker, a SQLite store. Medians of "
        f"{options.rounds} alternated rounds of {options.seconds:g} s.",
        f"ratio: with counts divided by without. CPU is that of all of the server's processes: × {cpu:.2f}, expected "
        f"at most × {MOST_CPU:g}.",
    )
    title = f"The service at {options.rate:,.0f} requests a second"
    publish("counts-serve", title=title, rows=numbers, notes=notes, body=results)


def make_folders(log: Path, run: Path | None, work: Path) -> None:
    """A folder for each version with `data` and `run`, as `Serve` expects them."""
    one, other = (work / version.name for version in (WITH, WITHOUT))
    run_segue(WITH, "prepare", log, "--out", one / "data")
    if run is None:
        changes = [part for change in COUNTED for part in ("--set", change)]
        run_segue(WITH, "train", one / "data", "--out", one / "run", "--recipe", "sasrec", *changes)
    else:
        shutil.copytree(run, one / "run")
    shutil.copytree(one / "data", other / "data")
    copy_without_counts(one / "run", other / "run")


def copy_without_counts(run: Path, out: Path) -> None:
    """Copy a run whose answers shall be the model's alone."""
    manifest = folders.read_manifest(run, "run")
    if COUNTS not in manifest["files"]:
        raise InputError(
            f"Expected a run with item-to-item counts, got {run} without {COUNTS}: they did not help on its "
            "validation. Give another log with DATA=folder, or a run with ARGS='--run folder'."
        )
    shutil.copytree(run, out, ignore=shutil.ignore_patterns(COUNTS, folders.MANIFEST))
    facts = {name: fact for name, fact in manifest.items() if name not in ("kind", "format", "files", "counts")}
    folders.write_manifest(out, "run", facts)
