"""Seconds of an answer: one history at a time, and many at once, by a model that is already loaded."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.tables import publish
from segue import api
from segue.recommend.recommender import Recommender

NOTES = (
    "Loading the model is not counted. Histories are the test's own, whole; ids in, ids and scores out.",
    "A run trained here has one epoch behind it: an answer takes as long whatever the weights are.",
)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench recommend", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with events.tsv.gz")
    parser.add_argument("--run", type=Path, help="a run folder to measure; otherwise one is trained for one epoch")
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--many", type=int, default=2000, help="histories of one call of recommend_many")
    parser.add_argument("-k", type=int, default=10)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="segue-bench-") as folder:
        data = api.prepare(options.data / "events.tsv.gz", out=Path(folder) / "data")
        if options.run:
            model = Recommender.open(options.run)
        else:
            model = api.train(data, out=Path(folder) / "run", overrides=["train.epochs=1"])
        rows = measure(model, histories(data, max(options.calls, options.many)), options)
    title = f"Answers of {options.k} items out of {len(model.vocabulary):,}"
    publish("recommend", title=title, rows=rows, notes=NOTES, body={"calls": options.calls, "k": options.k})


def histories(data: Any, count: int) -> list[list[str]]:
    """Histories of random users, as ids, without their last event."""
    offsets = np.asarray(data.sequences.offsets)
    users = np.random.default_rng(1).integers(0, data.sequences.n_users, count)
    ids = data.vocabulary.table["id"].to_list()
    items = np.asarray(data.sequences.items)
    return [[ids[number - 1] for number in items[offsets[user] : offsets[user + 1] - 1]] for user in users]


def measure(model: Recommender, queries: list[list[str]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds of single calls and of one call for many; the first few calls are not counted."""
    for history in queries[:10]:
        model.recommend(history, k=options.k)
    single = [
        _seconds(lambda history=history: model.recommend(history, k=options.k)) for history in queries[: options.calls]
    ]
    many = [_seconds(lambda: model.recommend_many(queries[: options.many], k=options.k)) for _ in range(3)]
    return [
        {
            "call": "recommend, one history",
            "median ms": 1000 * statistics.median(single),
            "p90 ms": 1000 * float(np.quantile(single, 0.9)),
            "answers a second": 1 / statistics.fmean(single),
        },
        {
            "call": f"recommend_many, {options.many} histories",
            "median ms": 1000 * statistics.median(many),
            "p90 ms": "–",
            "answers a second": options.many / statistics.median(many),
        },
    ]


def _seconds(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    main(sys.argv[1:])
