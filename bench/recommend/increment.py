"""Microseconds to encode one event more: with the KV cache and over the whole window, alternately, in one run.

One user at a time, 150 events in a window of 200, one thread, as the engine of the service works. What is measured is
the thread's own work, so that a machine with other things to do changes little; building and the first rounds are not
counted. The two query vectors must be equal.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.tables import publish
from segue.config.recipes import read_recipe
from segue.config.settings import make_settings
from segue.data.batch import Batch
from segue.errors import InputError
from segue.layers.packed import tensors
from segue.models.build import build_model
from segue.models.kv_cache import IncrementalEncoder
from segue.models.sequence import SequenceModel

ROOT = Path(__file__).parents[2]
OLDEST = "model.positions='oldest'"  # counted from the newest, every token changes with each event
CASES = {
    "sasrec, width 64": ("sasrec", ["model.width=64", OLDEST]),
    "sasrec": ("sasrec", [OLDEST]),
    "esasrec": ("esasrec", [OLDEST]),
    "hstu": ("hstu", []),
    "hstu-large": ("hstu-large", []),
}
N_ITEMS, EVENTS, USERS, WARM = 3500, 150, 8, 2
NOTES = (
    "Recipes as they are, but for what is named and positions counted from the oldest. Weights are the first ones: an "
    "encoding takes as long whatever they are.",
    "Each extension alternates with a whole encoding, which leaves little of it in the caches. In a row: eight users "
    "are extended one after the other, then encoded whole, as when the service answers several together.",
    "hstu is told the moment of the question: with a new event its last two tokens are encoded.",
)


class Times(NamedTuple):
    """Seconds of encodings: whole windows and new events only."""

    whole: list[float]
    new: list[float]

    @property
    def cheaper(self) -> float:
        return statistics.median(self.whole) / statistics.median(self.new)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench increment", description=__doc__)
    parser.add_argument("--rounds", type=int, default=40, help=f"of {USERS} users each")
    parser.add_argument("--recipes", nargs="+", choices=list(CASES), default=list(CASES), help="which to measure")
    parser.add_argument("--child", choices=list(CASES), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        print(json.dumps(measure(options.child, options.rounds)))
        return
    rows = [_in_a_process(name, options.rounds) for name in options.recipes]
    title = f"One event after {EVENTS}, medians of {USERS * options.rounds}"
    publish("increment", title=title, rows=rows, notes=NOTES, body={"rounds": options.rounds, "users": USERS})


def _in_a_process(name: str, rounds: int) -> dict[str, Any]:
    """The number of threads must be set before numpy is imported."""
    command = [sys.executable, "-m", "bench.recommend.increment", "--child", name, "--rounds", str(rounds)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    process = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    if process.returncode:
        raise InputError(f"{name} failed: {(process.stderr.strip().splitlines() or ['no reason given'])[-1]}")
    row: dict[str, Any] = json.loads(process.stdout.strip().splitlines()[-1])
    return row


def measure(name: str, rounds: int) -> dict[str, Any]:
    """A row of the table."""
    recipe, changes = CASES[name]
    settings = make_settings(read_recipe(recipe), [*changes, "model.length=200"]).model
    model = build_model(settings, N_ITEMS, generator=torch.Generator().manual_seed(1)).eval()
    continuation = IncrementalEncoder(model)
    users = [_history(user) for user in range(USERS)]
    alternating, in_a_row = Times([], []), Times([], [])
    for repeat in range(WARM + rounds):
        for times, group in ((alternating, 1), (in_a_row, USERS)):
            caches = [continuation.encode(_first(user, EVENTS), [0])[1][0] for user in users]
            for first_user in range(0, USERS, group):
                group_users = slice(first_user, first_user + group)
                pairs = zip(caches[group_users], users[group_users], strict=True)
                incremental = [_timed(partial(continuation.extend, *pair)) for pair in pairs]
                complete = [_timed(partial(_query_vector, model, user)) for user in users[group_users]]
                if not np.allclose([one for one, _ in incremental], [one for one, _ in complete], rtol=1e-5, atol=1e-5):
                    raise InputError(f"{name}: a question differs from that of the full pass.")
                if repeat >= WARM:
                    times.new.extend(seconds for _, seconds in incremental)
                    times.whole.extend(seconds for _, seconds in complete)
    return {
        "recipe": name,
        "whole window µs": 1e6 * statistics.median(alternating.whole),
        "one event µs": 1e6 * statistics.median(alternating.new),
        "times cheaper": alternating.cheaper,
        "in a row: µs": 1e6 * statistics.median(in_a_row.new),
        "times": in_a_row.cheaper,
        "memory kB": caches[0].size / 1000,
    }


def _query_vector(model: SequenceModel, window: Batch) -> np.ndarray:
    with torch.inference_mode():
        query: np.ndarray = model.query(tensors(window))[0].numpy()
    return query


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.thread_time_ns()
    result = work()
    return result, (time.thread_time_ns() - start) / 1e9


def _history(user: int) -> Batch:
    """A history of EVENTS + 1 events; the query time is a day later."""
    rng = np.random.default_rng(user)
    times = np.cumsum(rng.integers(1, 10_000, EVENTS + 1))
    items = rng.integers(1, N_ITEMS + 1, EVENTS + 1)
    return Batch(items=items, times=times, lengths=np.array([EVENTS + 1]), query_times=times[-1:] + 86_400)


def _first(history: Batch, events: int) -> Batch:
    return history.tokens(np.arange(events), np.array([events]), query_times=history.query_times)


if __name__ == "__main__":
    main(sys.argv[1:])
