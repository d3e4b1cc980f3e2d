"""`segue prepare` on a log by the local engine and by Spark: whether every digest is equal, and the seconds of each.

    python -m bench spark --data FOLDER

The real commands run as child processes, Spark as a local session over all cores, so its start is counted. The log is
given as it is, and as a folder of Parquet files, which Spark reads side by side.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import polars as pl

from bench.data.prepare import MEGABYTE, SEGUE, measure_command
from bench.tables import publish

PARTS = 8
NOTES = (
    "Seconds of the whole command; Spark in a session of its own on this machine, started and stopped. peak MB is "
    "resident memory, children (Java, Python on the executors) included.",
    "equal: every file of the data folder has the digest of the local engine's.",
)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench spark", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="folder with events.tsv.gz")
    options = parser.parse_args(argv)
    log = options.data / "events.tsv.gz"
    with tempfile.TemporaryDirectory(prefix="segue-bench-") as name:
        parquet = _as_parquet(log, Path(name) / "parquet")
        files = sorted(map(str, parquet.iterdir()))
        logs = {log.name: ([str(log)], [str(log)]), f"{PARTS} Parquet files": (files, [str(parquet)])}
        runs = [
            run
            for title, (paths, folder) in logs.items()
            for run in _compared(title, {"local": paths, "spark": folder}, Path(name))
        ]
    rows = [{key: run[key] for key in ("log", "engine", "events", "seconds", "peak MB", "equal")} for run in runs]
    publish(
        "spark",
        title=f"segue prepare: {log.parent.name}",
        rows=rows,
        notes=NOTES,
        body=runs,
    )
    if not all(run["equal"] in ("yes", "–") for run in runs):
        sys.exit("bench: the data folders differ")


def _as_parquet(log: Path, folder: Path) -> Path:
    """The same rows, in order, as text, in several files."""
    folder.mkdir()
    table = pl.read_csv(log, separator="\t", infer_schema=False)
    for number, part in enumerate(table.iter_slices(-(-table.height // PARTS))):
        part.write_parquet(folder / f"part-{number:02}.parquet")
    return folder


def _compared(title: str, sources: dict[str, list[str]], folder: Path) -> list[dict[str, Any]]:
    """The time of each engine, the local one first, and whether Spark's data are equal."""
    runs: list[dict[str, Any]] = []
    for engine, paths in sources.items():
        out = folder / f"{title}-{engine}".replace(" ", "-")
        command = [*SEGUE, "prepare", *paths, "--out", str(out), "--engine", engine, "--json"]
        seconds, peak, report = measure_command(command)
        equal = "–" if not runs else ("yes" if report["files"] == runs[0]["files"] else "no")
        facts = {"log": title, "engine": engine, "events": report["counts"]["events"], "seconds": seconds}
        runs.append(facts | {"peak MB": peak / MEGABYTE, "equal": equal, "files": report["files"]})
    return runs


if __name__ == "__main__":
    main(sys.argv[1:])
