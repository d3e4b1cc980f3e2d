"""One process against two: ndcg@10 of the recipe `esasrec` after some epochs, and the seconds of an epoch.

    make bench SUBJECT=processes DATA=folder                     MovieLens-1M, ten epochs, seeds 1, 2 and 3
    … ARGS="--epochs 1 --users 300"                              a trial

Three trainings by one process with two threads, of different seeds, and one by two processes with a thread each. Every
training is a run of its own in a cache folder, made once; after Ctrl-C the same command resumes. The seconds
are those of the trainings themselves, which run in sequence: measure on an idle machine.
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
    options = parser.parse_args(argv)
    data = prepared(options.data / EVENTS, options.users, options.cache)
    runs = {arm: trained(arm, data, options.epochs, options.cache) for arm in (*ALONE, TOGETHER)}
    show(runs, data, options.epochs)


def prepared(events: Path, users: int | None, cache: Path) -> api.Data:
    """The log's data folder, made once, with all users or the given number of them."""
    some = "" if users is None else f"-{users}-users"
    data_folder = cache / f"data{some}-{digest(events)[:12]}"
    if data_folder.exists():
        return api.Data.open(data_folder)
    cache.mkdir(parents=True, exist_ok=True)
    with Display() as display:
        if users is None:
            return api.prepare(events, out=data_folder, progress=display.stage)
        table = pl.read_csv(events, separator="\t")
        sample = table["user"].unique(maintain_order=True).head(users)
        return api.prepare(
            table.filter(pl.col("user").is_in(sample.to_list())), out=data_folder, progress=display.stage
        )


def trained(arm: Arm, data: api.Data, epochs: int, cache: Path) -> Path:
    """The run of an arm, made unless it exists; an interrupted training is resumed."""
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
    change, in_range, sentences = agreement(values, users)
    title = f"One process and two, recipe esasrec, {epochs} epochs, {len(users):,} users"
    body = {"difference": change, "within the seeds": in_range, "epochs": epochs}
    publish("processes", title=title, rows=rows, notes=sentences, body=body)


def agreement(values: dict[Arm, np.ndarray], users: np.ndarray) -> tuple[dict[str, float], bool, list[str]]:
    """Two processes against the three seeds of one: the difference over the same users, and whether their metric
    is plausible for a fourth seed of one."""
    alone = [values[arm] for arm in ALONE]
    means, of_two = np.array([one.mean() for one in alone]), float(values[TOGETHER].mean())
    margin = TWO_SIDED * float(means.std(ddof=1)) * (1 + 1 / len(means)) ** 0.5
    low, high = float(means.mean()) - margin, float(means.mean()) + margin
    change = difference(values[TOGETHER], averaged(alone), users)
    sentences = [
        f"Mean of three seeds of one process {means.mean():.4f}; 95 % of a fourth would lie in {low:.4f} … {high:.4f}, "
        f"and two processes reached {of_two:.4f}.",
        f"Two processes minus that mean, over the same users: {change.value:+.4f} (95 % {change.low:+.4f} … "
        f"{change.high:+.4f}).",
    ]
    return {"value": change.value, "low": change.low, "high": change.high}, low <= of_two <= high, sentences


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except SegueError as error:
        sys.exit(f"bench: {error}")
    except KeyboardInterrupt:
        print_error("Interrupted; the same command goes on from the last epoch that was finished.")
        sys.exit(130)
