"""One process against two: ndcg@10 of the recipe `default` after some epochs, and the seconds of an epoch.

    make bench SUBJECT=processes DATA=folder                     MovieLens-1M, ten epochs, seeds 1, 2 and 3
    … ARGS="--epochs 1 --users 300"                              a trial

Three trainings by one process with two threads, of different seeds, and one by two processes with a thread each. Every
training is a run of its own in a cache folder and is never made twice; Ctrl-C and the same command goes on. The seconds
are those of the trainings themselves, which come one after the other: they mean something on an idle machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from bench.quality.paired import averaged, difference, mean_interval
from bench.tables import publish
from segue import api
from segue.errors import SegueError
from segue.evaluation.metrics import ndcg
from segue.folders import digest, partial_of, read_manifest
from segue.terminal import Display, print_error, print_line

EVENTS = "events.tsv.gz"
DEPTH = 10
TWO_SIDED = 4.303  # Student's t with two degrees of freedom, 95 %


@dataclass(frozen=True, slots=True)
class Arm:
    """A training."""

    processes: int
    threads: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.processes} × {self.threads}, seed {self.seed}"


ALONE = (Arm(1, 2, 1), Arm(1, 2, 2), Arm(1, 2, 3))
TOGETHER = Arm(2, 1, 1)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench processes", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help=f"folder with {EVENTS}")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--users", type=int, help="of the log, for a trial")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "segue-processes")
    chosen = parser.parse_args(argv)
    data = prepared(chosen.data / EVENTS, chosen.users, chosen.cache)
    runs = {arm: trained(arm, data, chosen.epochs, chosen.cache) for arm in (*ALONE, TOGETHER)}
    show(runs, data, chosen.epochs)


def prepared(events: Path, users: int | None, cache: Path) -> api.Data:
    """The log's data folder, made once; of some users where so many are asked for."""
    some = "" if users is None else f"-{users}-users"
    place = cache / f"data{some}-{digest(events)[:12]}"
    if place.exists():
        return api.Data.open(place)
    cache.mkdir(parents=True, exist_ok=True)
    with Display() as display:
        if users is None:
            return api.prepare(events, out=place, progress=display.stage)
        table = pl.read_csv(events, separator="\t")
        kept = table["user"].unique(maintain_order=True).head(users)
        return api.prepare(table.filter(pl.col("user").is_in(kept.to_list())), out=place, progress=display.stage)


def trained(arm: Arm, data: api.Data, epochs: int, cache: Path) -> Path:
    """The run of an arm, made unless it is there; what was interrupted goes on."""
    run = cache / f"run-{arm.processes}x{arm.threads}-seed-{arm.seed}-{epochs}-epochs-{data.digest[:8]}"
    if run.exists():
        return run
    print_line(f"{arm.name}: training into {run}")
    with Display() as display:
        api.train(
            data,
            out=run,
            overrides=[
                f"train.seed={arm.seed}",
                f"train.threads={arm.threads}",
                f"train.epochs={epochs}",
                f"train.patience={epochs}",
            ],
            resume=partial_of(run).exists(),
            processes=arm.processes,
            progress=display.step,
        )
    return run


def show(runs: dict[Arm, Path], data: api.Data, epochs: int) -> None:
    """The table, and whether the two agree."""
    users = data.split.cases("test", "last").users
    values = {arm: ndcg(np.load(run / "ranks.npy"), DEPTH) for arm, run in runs.items()}
    rows = []
    for arm, run in runs.items():
        low, high = mean_interval(values[arm], users)
        seconds = read_manifest(run, "run")["training"]["seconds"]
        rows.append(
            {
                "processes × threads": arm.name,
                "ndcg@10": float(values[arm].mean()),
                "95 % low": low,
                "95 % high": high,
                "s/epoch": statistics.median(seconds),
            }
        )
    apart, inside, sentences = agreement(values, users)
    title = f"One process and two, recipe default, {epochs} epochs, {len(users):,} users"
    body = {"difference": apart, "within the seeds": inside, "epochs": epochs}
    publish("processes", title=title, rows=rows, notes=sentences, body=body)


def agreement(values: dict[Arm, np.ndarray], users: np.ndarray) -> tuple[dict[str, float], bool, list[str]]:
    """Two processes against the three seeds of one: the difference over the same users, and whether what two reached
    is what a fourth seed of one might have."""
    alone = [values[arm] for arm in ALONE]
    means, found = np.array([one.mean() for one in alone]), float(values[TOGETHER].mean())
    spread = TWO_SIDED * float(means.std(ddof=1)) * (1 + 1 / len(means)) ** 0.5
    low, high = float(means.mean()) - spread, float(means.mean()) + spread
    apart = difference(values[TOGETHER], averaged(alone), users)
    sentences = [
        f"Mean of three seeds of one process {means.mean():.4f}; 95 % of a fourth would lie in {low:.4f} … {high:.4f}, "
        f"and two processes reached {found:.4f}.",
        f"Two processes minus that mean, over the same users: {apart.value:+.4f} (95 % {apart.low:+.4f} … "
        f"{apart.high:+.4f}).",
    ]
    return {"value": apart.value, "low": apart.low, "high": apart.high}, low <= found <= high, sentences


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except SegueError as error:
        sys.exit(f"bench: {error}")
    except KeyboardInterrupt:
        print_error("Interrupted; the same command goes on from the last epoch that was finished.")
        sys.exit(130)
