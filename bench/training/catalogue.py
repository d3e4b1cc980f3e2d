"""Milliseconds of a training step as the catalogue grows: sparse (row-wise) updates against the whole table.

Random users with uniform items, the worst case: few rows are used twice. The loop is segue's own,
batching included; the first steps, building and saving are not counted. Each measurement is a process of its own, and
the cases alternate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from settings_tables import objective_settings

from bench.tables import publish
from segue.data.sequences import Sequences
from segue.errors import InputError
from segue.models.build import build_model
from segue.models.encoders.esasrec import ESASRecSettings
from segue.objective.objective import Objective
from segue.training.loop import TrainingProgress, fit
from segue.training.settings import TrainSettings
from segue.training.sparse_rows import LEAST_ROWS
from segue.training.windows import training_windows

ROOT = Path(__file__).parents[2]
LENGTH, USERS = 50, 80  # 4,000 tokens a step
SAMPLED, SCE = "sampled softmax, 3,000 shared", "SCE, 256 a bucket"
LOSSES = {
    SAMPLED: objective_settings(loss="sampled-softmax", sampler="uniform", sampler__negatives=3000),
    SCE: objective_settings(loss="sce", loss__bucket_items=256),
}
ROWS, WHOLE = "rows", "whole table"
WARM = 3  # steps that are not counted
Case = tuple[str, int, str]  # loss, items, what is updated


class EnoughError(Exception):
    """Enough steps are measured."""


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench catalogue", description=__doc__)
    parser.add_argument("--items", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--child", nargs=3, metavar=("LOSS", "ITEMS", "UPDATE"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    if options.child:
        loss, items, update = options.child
        print(json.dumps(step_seconds(loss, int(items), by_rows=update == ROWS, steps=options.steps)))
        return
    show(measure(options), options)


def measure(options: argparse.Namespace) -> dict[Case, list[float]]:
    """Seconds of every counted step of every run. SCE scores the whole table, so it always updates all rows."""
    cases: list[Case] = [(SAMPLED, items, update) for items in options.items for update in (ROWS, WHOLE)]
    cases += [(SCE, items, WHOLE) for items in options.items]
    seconds_of: dict[Case, list[float]] = {case: [] for case in cases}
    numbers = ["--steps", str(options.steps), "--threads", str(options.threads)]
    for run in range(options.runs):
        for case in cases:
            command = [sys.executable, "-m", "bench.training.catalogue", "--child", *map(str, case), *numbers]
            process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            if process.returncode:
                raise InputError(f"{case} failed: {(process.stderr.strip().splitlines() or ['no reason given'])[-1]}")
            seconds = json.loads(process.stdout.strip().splitlines()[-1])
            seconds_of[case] += seconds
            middle = 1000 * statistics.median(seconds)
            print(f"run {run + 1} of {options.runs}  {case}: {middle:.0f} ms a step", file=sys.stderr, flush=True)
    return seconds_of


def random_users(n_items: int, users: int) -> Sequences:
    """Users with equally many events, one more than the model's length: the last target is no input."""
    events = users * (LENGTH + 1)
    return Sequences(
        offsets=np.arange(users + 1, dtype=np.int64) * (LENGTH + 1),
        items=np.random.default_rng(1).integers(1, n_items + 1, events).astype(np.int32),
        times=np.arange(events, dtype=np.int64) * 1_000_000,
    )


def step_seconds(loss: str, n_items: int, *, by_rows: bool, steps: int) -> list[float]:
    """Seconds of each step of segue's own loop, after the warm ones."""
    log = random_users(n_items, USERS * (WARM + steps + 1))
    objective = Objective(LOSSES[loss], np.bincount(log.items, minlength=n_items + 1))
    shape = ESASRecSettings(width=64, depth=2, length=LENGTH)
    model = build_model(shape, n_items, generator=torch.Generator().manual_seed(1))
    model.items.sparse_gradients = by_rows
    times: list[float] = []

    def clock(_step: TrainingProgress) -> None:
        times.append(time.perf_counter())
        if len(times) > WARM + steps:
            raise EnoughError

    with tempfile.TemporaryDirectory(prefix="segue-bench-") as folder, suppress(EnoughError):
        fit(
            model,
            objective,
            training_windows(log, log.offsets[1:], length=LENGTH + objective.extra),
            settings=TrainSettings(tokens=USERS * (LENGTH + 1), device="cpu"),
            epochs=1,
            validate=None,
            state_file=Path(folder) / "state.safetensors",
            progress=clock,
        )
    return [after - before for before, after in pairwise(times)][WARM:]


def show(seconds_of: dict[Case, list[float]], options: argparse.Namespace) -> None:
    middle = {case: 1000 * statistics.median(seconds) for case, seconds in seconds_of.items()}
    fewest = min(options.items)
    least = {SAMPLED: middle[SAMPLED, fewest, ROWS if fewest >= LEAST_ROWS else WHOLE], SCE: middle[SCE, fewest, WHOLE]}
    rows = [
        {
            "loss": loss,
            "updated": update,
            "items": items,
            "ms a step": milliseconds,
            f"times {fewest:,} items": milliseconds / least[loss],
        }
        for (loss, items, update), milliseconds in sorted(middle.items(), key=lambda row: (row[0][0] == SCE, row[0][2]))
    ]
    notes = (
        f"Median of {options.runs} alternated runs of {options.steps} steps, {options.threads} threads.",
        f"segue itself updates rows from {LEAST_ROWS:,} on, where the loss looks rows up; the last column compares "
        f"with what it does at {min(options.items):,} items.",
    )
    body = [{"case": case, "seconds": seconds} for case, seconds in seconds_of.items()]
    title = f"A training step: {USERS * LENGTH:,} tokens, width 64, 2 blocks"
    publish("catalogue", title=title, rows=rows, notes=notes, body=body)


if __name__ == "__main__":
    main(sys.argv[1:])
