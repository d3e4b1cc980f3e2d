"""Users a second and peak memory of `segue embed` on generated logs, and what a kill -9 in the middle leaves to do.

    python -m bench embed --users 100000 1000000

The real command runs as a child process; memory is that of the child.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from bench.data.prepare import MEGABYTE, SEGUE, measure_command
from bench.tables import publish
from segue import api, folders
from segue.data.dataset import Data
from segue.data.write.writer import write_table
from segue.errors import InputError
from segue.recommend.jobs.embed import PART_USERS

SIZES = (100_000, 1_000_000)
EVENTS = 50  # of each user
ITEMS = 10_000
TRAINED_USERS = 2_000  # users that the model is trained on
CHUNK = 10_000  # users generated at a time
FIRST_TIME = 1_700_000_000_000_000
MODEL = ("model.width=64", "model.depth=2", f"model.length={EVENTS}", "train.epochs=1", "index=exact")
NOTES = (
    f"{EVENTS} events each, {ITEMS:,} items; sasrec of width 64 with 2 blocks, trained for one epoch on "
    f"{TRAINED_USERS:,} users: the weights do not change the time of an embedding. Starting Python and checking the "
    "log's digests are counted.",
    "peak MB is resident memory. Killed: kill -9 after half of the parts, then the same command again; seconds and "
    "users/s are those of the second. lost and doubled are users, differs is the largest difference to the embeddings "
    "of the uninterrupted command.",
)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench embed", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--users", type=int, nargs="+", default=list(SIZES), help="sizes of the logs")
    parser.add_argument("--folder", type=Path, help="where logs are generated; a million users take 1.2 GB")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="segue-bench-", dir=options.folder) as name:
        folder = Path(name)
        run = folder / "run"
        api.train(make_data(folder / "training", users=TRAINED_USERS), out=run, recipe="sasrec", overrides=MODEL)
        rows = [_whole(run, folder, users) for users in sorted(options.users)]
        rows.append(_killed(run, folder, max(options.users)))
    growth = rows[-2]["peak MB"] / rows[0]["peak MB"] - 1
    title = "segue embed"
    publish("embed", title=title, rows=rows, notes=NOTES, body={"growth of peak memory": growth, "rows": rows})
    if rows[-1]["lost"] or rows[-1]["doubled"]:
        raise InputError("Rows were lost or doubled; the table above says how many.")


def make_data(folder: Path, *, users: int, seed: int = 1) -> Data:
    """A data folder as `prepare` writes it: users with 50 events each, random items, the first ones more often."""
    rng = np.random.default_rng(seed)
    counts = np.zeros(ITEMS + 1, dtype=np.int64)
    with folders.complete_folder(folder) as staging:
        np.save(staging / "offsets.npy", np.arange(users + 1, dtype=np.int64) * EVENTS)
        items, times = (
            np.lib.format.open_memmap(staging / f"{name}.npy", mode="w+", dtype=dtype, shape=(users * EVENTS,))
            for name, dtype in (("items", np.int32), ("times", np.int64))
        )
        for begin in range(0, users, CHUNK):
            some = min(CHUNK, users - begin)
            rows = slice(begin * EVENTS, (begin + some) * EVENTS)
            items[rows] = 1 + (ITEMS * rng.random(some * EVENTS) ** 2).astype(np.int32)
            gaps = rng.integers(1, 86_400, (some, EVENTS)) * 1_000_000
            times[rows] = (FIRST_TIME + np.cumsum(gaps, axis=1)).reshape(-1)
            counts += np.bincount(items[rows], minlength=ITEMS + 1)
        items.flush()
        times.flush()
        write_table(staging / "items.parquet", pl.DataFrame({"id": _ids("i", ITEMS), "count": counts[1:]}))
        write_table(staging / "users.parquet", pl.DataFrame({"id": _ids("u", users)}))
        body: dict[str, Any] = {"split": {"kind": "last"}, "kinds": [], "has_time": True}
        body["counts"] = {"users": users, "items": ITEMS, "events": users * EVENTS}
        folders.write_manifest(staging, "data", {**body, "settings": {"generated": True}})
    return Data.open(folder)


def _ids(letter: str, count: int) -> pl.Series:
    """Ids whose order is that of their numbers."""
    numbers = pl.Series("number", np.arange(count)).cast(pl.String).str.zfill(9)
    return pl.select(pl.lit(letter) + numbers).to_series()


def _command(run: Path, data: Path, out: Path) -> list[str]:
    return [*SEGUE, "embed", str(run), "--data", str(data), "--out", str(out), "--json"]


def _whole(run: Path, folder: Path, users: int) -> dict[str, Any]:
    """Generate a log and embed everyone in it."""
    data, out = folder / f"data-{users}", folder / f"out-{users}"
    print(f"{users:,} users …", file=sys.stderr, flush=True)
    make_data(data, users=users)
    seconds, peak, report = measure_command(_command(run, data, out))
    return _row(f"{users:,} users", users, seconds, peak, report, lost=users - report["rows"], doubled=0, differs=0.0)


def _killed(run: Path, folder: Path, users: int) -> dict[str, Any]:
    """Kill it in the middle, run it again, and compare with the embeddings of the uninterrupted command."""
    data, expected, out = folder / f"data-{users}", folder / f"out-{users}", folder / "killed"
    half = len(list((expected / "users").glob("*.parquet"))) // 2
    child = subprocess.Popen(_command(run, data, out), stdout=subprocess.DEVNULL)
    last_part = folder / "killed.partial" / "users" / f"part-{max(0, half - 1):05}.parquet"
    while child.poll() is None and not last_part.exists():
        time.sleep(0.01)
    if child.poll() is not None:
        raise InputError("The command ended before it could be killed: give a larger --users.")
    time.sleep(0.1)  # into the next part
    child.kill()
    child.wait()
    n_kept = len(list(last_part.parent.glob("part-*.parquet"))) * PART_USERS
    seconds, peak, report = measure_command(_command(run, data, out))
    lost, doubled, differs = compared(expected, out)
    return _row(
        f"{users:,}, killed", users - n_kept, seconds, peak, report, lost=lost, doubled=doubled, differs=differs
    )


def compared(whole: Path, other: Path) -> tuple[int, int, float]:
    """Users of one data set that the other lacks, rows it has too many, and how far embeddings differ; part by part."""
    lost, differs = 0, 0.0
    users = pl.scan_parquet(other / "users" / "*.parquet").select("user").collect()["user"]
    doubled = len(users) - users.n_unique()
    for path in sorted((whole / "users").glob("*.parquet")):
        expected, path_there = pl.read_parquet(path), other / "users" / path.name
        rows = pl.read_parquet(path_there) if path_there.exists() else expected.clear()
        joined = expected.join(rows, on="user", suffix="_there")
        lost += expected.height - joined.height
        if joined.height:
            gap = np.abs(joined["embedding"].to_numpy() - joined["embedding_there"].to_numpy())
            differs = max(differs, float(gap.max()))
    return lost, doubled, differs


def _row(
    what: str,
    users: int,
    seconds: float,
    peak: int,
    report: dict[str, Any],
    *,
    lost: int,
    doubled: int,
    differs: float,
) -> dict[str, Any]:
    return {
        "what": what,
        "seconds": seconds,
        "users/s": users / seconds,
        "peak MB": peak / MEGABYTE,
        "rows": report["rows"],
        "parts": report["parts"],
        "lost": lost,
        "doubled": doubled,
        "differs": differs,
    }


if __name__ == "__main__":
    main(sys.argv[1:])
