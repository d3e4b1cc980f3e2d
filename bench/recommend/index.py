"""Milliseconds of one query to an exact and to an approximate index, and the recall of the approximate one.

Random vectors in clusters, of different norms, like trained item tables; queries lie between two clusters.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from importlib.metadata import version
from typing import Any

import faiss
import numpy as np
import torch
from torch import Tensor

from bench.tables import publish
from segue.index.approximate import ApproximateIndex
from segue.index.build import LEAST_APPROXIMATE
from segue.index.search import ItemIndex, recall

WIDTH, ITEMS_A_CLUSTER = 64, 200
FITTED, WARM = (
    400,
    5,
)  # queries that the index is fitted to; first queries that are not counted
DEPTHS = (10, 100)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench index", description=__doc__)
    parser.add_argument("--items", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--questions", type=int, default=200)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    rows = [measure(items, options.questions) for items in options.items]
    notes = (
        f"Median processor time of {options.questions} questions, k = {max(DEPTHS)}, one at a time on one thread, the "
        "indexes taking turns. Recall is that of questions that the index was not fitted to.",
        f"index = 'auto' is approximate from {LEAST_APPROXIMATE:,} items on, where faiss is installed.",
    )
    title = f"One question to an index, width {WIDTH}"
    publish("index", title=title, rows=rows, notes=notes, body={"faiss": version("faiss-cpu"), **vars(options)})


def random_vectors(items: int, questions: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Vectors [items + 1, D], row 0 being padding, and queries; the variance differs by direction."""
    scales = np.exp(-np.arange(WIDTH) / 20)
    centres = rng.standard_normal((max(20, items // ITEMS_A_CLUSTER), WIDTH)) * scales

    def near(rows: int) -> np.ndarray:
        return centres[rng.integers(0, len(centres), rows)] + 0.6 * rng.standard_normal((rows, WIDTH)) * scales

    vectors, queries = near(items + 1), near(questions) + 0.7 * near(questions)
    vectors *= np.exp(0.25 * rng.standard_normal((items + 1, 1))) / np.linalg.norm(vectors, axis=1, keepdims=True)
    return torch.from_numpy(vectors.astype(np.float32)), torch.from_numpy(queries.astype(np.float32))


def measure(items: int, questions: int) -> dict[str, Any]:
    """One row: both indexes of the same items."""
    vectors, queries = random_vectors(items, FITTED + questions, np.random.default_rng(1))
    start = time.perf_counter()
    index = ApproximateIndex.build(vectors, queries=queries[:FITTED])
    seconds = time.perf_counter() - start
    test_queries = queries[FITTED:]
    exact, approximate = (
        statistics.median(times) for times, _ in alternate_searches([index.exact, index], test_queries, max(DEPTHS))
    )
    recalls = {f"recall@{k}": recall(index, index.exact, test_queries, k) for k in DEPTHS}
    return {
        "items": items,
        "exact ms": exact,
        "approximate ms": approximate,
        "times faster": exact / approximate,
        **recalls,
        "lists": len(index.lists.centres),
        "looked into": index.probes,
        "build s": seconds,
    }


def alternate_searches(indexes: list[ItemIndex], questions: Tensor, k: int) -> list[tuple[list[float], Tensor]]:
    """For each index, milliseconds of every query but the first few, and the scores of its k answers."""
    times_of: list[list[float]] = [[] for _ in indexes]
    scores_of: list[list[Tensor]] = [[] for _ in indexes]
    for question in questions:
        for index, times, scores in zip(indexes, times_of, scores_of, strict=True):
            start = time.thread_time()  # the search runs in this thread; others may be busy
            scores.append(index.search(question[None], k)[1])
            times.append(1000 * (time.thread_time() - start))
    return [(times[WARM:], torch.cat(scores)) for times, scores in zip(times_of, scores_of, strict=True)]


if __name__ == "__main__":
    main(sys.argv[1:])
