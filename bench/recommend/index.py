"""Milliseconds of one question to an exact and to an approximate index, and what the approximate one finds.

Made-up vectors in clusters, of different lengths, as trained item tables have them; questions lie between two clusters.
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
    chosen = parser.parse_args(argv)
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    rows = [measure(items, chosen.questions) for items in chosen.items]
    notes = (
        f"Median processor time of {chosen.questions} questions, k = {max(DEPTHS)}, one at a time on one thread, the "
        "indexes taking turns. Recall is that of questions that the index was not fitted to.",
        f"index = 'auto' is approximate from {LEAST_APPROXIMATE:,} items on, where faiss is installed.",
    )
    title = f"One question to an index, width {WIDTH}"
    publish("index", title=title, rows=rows, notes=notes, body={"faiss": version("faiss-cpu"), **vars(chosen)})


def made_up(items: int, questions: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Vectors [items + 1, D], row 0 being padding, and questions; some directions carry more than others."""
    carried = np.exp(-np.arange(WIDTH) / 20)
    centres = rng.standard_normal((max(20, items // ITEMS_A_CLUSTER), WIDTH)) * carried

    def near(rows: int) -> np.ndarray:
        return centres[rng.integers(0, len(centres), rows)] + 0.6 * rng.standard_normal((rows, WIDTH)) * carried

    vectors, asked = near(items + 1), near(questions) + 0.7 * near(questions)
    vectors *= np.exp(0.25 * rng.standard_normal((items + 1, 1))) / np.linalg.norm(vectors, axis=1, keepdims=True)
    return torch.from_numpy(vectors.astype(np.float32)), torch.from_numpy(asked.astype(np.float32))


def measure(items: int, questions: int) -> dict[str, Any]:
    """One row: both indexes of the same items."""
    vectors, asked = made_up(items, FITTED + questions, np.random.default_rng(1))
    began = time.perf_counter()
    index = ApproximateIndex.build(vectors, queries=asked[:FITTED])
    seconds = time.perf_counter() - began
    fresh = asked[FITTED:]
    exact, approximate = (statistics.median(times) for times, _ in turns([index.exact, index], fresh, max(DEPTHS)))
    found = {f"recall@{k}": recall(index, index.exact, fresh, k) for k in DEPTHS}
    return {
        "items": items,
        "exact ms": exact,
        "approximate ms": approximate,
        "times faster": exact / approximate,
        **found,
        "lists": len(index.lists.centres),
        "looked into": index.probes,
        "build s": seconds,
    }


def turns(indexes: list[ItemIndex], questions: Tensor, k: int) -> list[tuple[list[float], Tensor]]:
    """Of each index the milliseconds of every question but the first few, and the scores of its k answers to all."""
    spent: list[list[float]] = [[] for _ in indexes]
    found: list[list[Tensor]] = [[] for _ in indexes]
    for question in questions:
        for index, times, scores in zip(indexes, spent, found, strict=True):
            began = time.thread_time()  # all of it happens in this thread, and others may be busy
            scores.append(index.search(question[None], k)[1])
            times.append(1000 * (time.thread_time() - began))
    return [(times[WARM:], torch.cat(scores)) for times, scores in zip(spent, found, strict=True)]


if __name__ == "__main__":
    main(sys.argv[1:])
