"""Cost of item-to-item counts: CPU of a request to the service; building them for a million items; time of an answer.

    make bench SUBJECT=counts [DATA=folder]       the service over this log, otherwise over a generated one
    … ARGS="--only million"                       or serve: one part alone

The million items are of a generated log: popularity by Zipf's law, and half of the events follow the one before them
within a few ranks of popularity. Counts are built in a process of their own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from bench.data.make_log import FIRST_SECOND
from bench.data.prepare import MEGABYTE, measure_command
from bench.tables import publish
from segue.counts.counts import Counts
from segue.counts.features import FEATURES, GAP, LAST, REPEATED, ItemCounts
from segue.counts.neighbours import PairLimits
from segue.counts.settings import FittedCountsSettings
from segue.data.batch import Batch
from segue.data.sequences import Sequences

if TYPE_CHECKING:
    from segue.index.search import ItemIndex  # the process that builds counts must not import torch

PARTS = ("serve", "million")
ITEMS, EVENTS, EVENTS_A_USER = 1_000_000, 50_000_000, 20
SMALL_ITEMS, SMALL_EVENTS = 3_000, 200_000  # of the log that is served if none is given
FOLLOWING, NEAR = 0.5, 10  # share of events that follow the one before, and the ranks within which they do
ROWS_AT_A_TIME = 1_000_000
WARM = 5  # answers that are not counted
MOST_TIMES = 1.5  # of an answer without counts
WEIGHTS = tuple(0.0 if feature in (REPEATED, GAP, LAST) else 1.0 for feature in range(len(FEATURES)))
LOG, FILE = ("offsets.npy", "items.npy"), "counts.safetensors"


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench counts", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, help="serve: folder with events.tsv.gz; default: a generated log")
    parser.add_argument("--run", type=Path, help="serve: a run of this log with counts; default: one epoch of sasrec")
    parser.add_argument("--only", choices=PARTS, action="append", help="parts to measure; both by default")
    parser.add_argument("--rate", type=float, default=1000.0, help="serve: requests a second")
    parser.add_argument("--seconds", type=float, default=20.0, help="serve: of each measurement")
    parser.add_argument("--rounds", type=int, default=5, help="serve: measurements with counts, and as many without")
    parser.add_argument("--items", type=int, default=ITEMS, help="million: of the catalogue")
    parser.add_argument("--events", type=int, default=EVENTS, help="million: of the log")
    parser.add_argument("--questions", type=int, default=200, help="million: answers that are measured")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        print(json.dumps(build(options.child, options.items)))
        return
    for part in options.only or PARTS:
        if part == "serve":
            serve(options)
        else:
            million(options.items, options.events, options.questions)


def serve(options: argparse.Namespace) -> None:
    """Measure the service over the given log, or over a small one."""
    from bench.serving.counted import measure_service

    options.subject = "counts"
    if options.data:
        measure_service(options, of=f"the log of {options.data}")
        return
    with tempfile.TemporaryDirectory(prefix="segue-bench-") as name:
        options.data = Path(name)
        write_log(options.data, items=SMALL_ITEMS, events=SMALL_EVENTS)
        measure_service(options, of=f"a generated log of {SMALL_EVENTS:,} events of {SMALL_ITEMS:,} items")


def million(items: int, events: int, questions: int) -> None:
    """Generate a log of this size, count it, and answer from the counts."""
    with tempfile.TemporaryDirectory(prefix="segue-bench-") as name:
        folder = Path(name)
        make_sequences(folder, items=items, events=events)
        command = [sys.executable, "-m", "bench.recommend.counts", "--child", name, "--items", str(items)]
        _, peak, report = measure_command(command)
        show_build(folder, items, peak, report)
        show_answers(folder, items, questions)


# --- the log --------------------------------------------------------------------------------------------------------


def make_sequences(folder: Path, *, items: int, events: int, seed: int = 1) -> None:
    """Write the arrays of about `events` events; the numbers of users' events are log-normal."""
    rng = np.random.default_rng(seed)
    activity = rng.lognormal(sigma=1.0, size=max(2, events // EVENTS_A_USER))
    lengths = np.maximum(1, np.rint(activity * (events / activity.sum()))).astype(np.int64)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    numbers = rng.permutation(items).astype(np.int32) + 1  # by rank of popularity
    begins = np.zeros(offsets[-1], dtype=bool)
    begins[offsets[:-1]] = True
    written = np.lib.format.open_memmap(folder / LOG[1], mode="w+", dtype=np.int32, shape=begins.shape)
    for first in range(0, len(begins), ROWS_AT_A_TIME):
        rows = slice(first, first + ROWS_AT_A_TIME)
        written[rows] = numbers[_ranks(begins[rows], items, rng)]
    np.save(folder / LOG[0], offsets)


def _ranks(begins: np.ndarray, items: int, rng: np.random.Generator) -> np.ndarray:
    """The rank of each event's item: a random one by Zipf's law, or one to NEAR ranks after the event before."""
    rows = np.arange(len(begins))
    fresh = begins | (rng.random(len(begins)) >= FOLLOWING)
    fresh[0] = True
    ranks = np.exp(rng.random(len(begins)) * np.log(items + 1)).astype(np.int64) - 1
    steps = np.cumsum(rng.integers(1, NEAR + 1, len(begins)))
    newest = np.maximum.accumulate(np.where(fresh, rows, 0))
    return np.asarray((ranks[newest] + steps - steps[newest]) % items)


def open_sequences(folder: Path) -> Sequences:
    """The log, memory-mapped; it has no times, which counts do not read."""
    offsets, items = (np.load(folder / name, mmap_mode="r") for name in LOG)
    return Sequences(offsets=offsets, items=items, times=np.zeros(0, dtype=np.int64))


def write_log(folder: Path, *, items: int, events: int) -> None:
    """Write an events.tsv.gz, as DATA= has it."""
    make_sequences(folder, items=items, events=events)
    log = open_sequences(folder)
    rows = np.arange(log.n_events)
    table = pl.DataFrame({"user": log.owners(rows), "item": np.asarray(log.items), "ts": FIRST_SECOND + rows})
    table.write_csv(folder / "events.tsv.gz", separator="\t", compression="gzip")


# --- building -------------------------------------------------------------------------------------------------------


def build(folder: Path, items: int) -> dict[str, Any]:
    """Count the log and write the file of a run."""
    settings, log = FittedCountsSettings(), open_sequences(folder)
    limits = PairLimits(least_users=settings.least_users, most=settings.neighbours)
    start, used = time.perf_counter(), time.process_time()
    counts = Counts(ItemCounts.of(log, np.asarray(log.offsets)[1:], items, limits), WEIGHTS)
    seconds = {"seconds": time.perf_counter() - start, "cpu": time.process_time() - used}
    (folder / FILE).write_bytes(counts.to_bytes())
    return {**seconds, "users": log.n_users, "events": log.n_events, **counts.facts()}


def show_build(folder: Path, items: int, peak: int, report: dict[str, Any]) -> None:
    row = {
        "items": items,
        "events": report["events"],
        "users": report["users"],
        "log MB": sum((folder / name).stat().st_size for name in LOG) / MEGABYTE,
        "peak MB": peak / MEGABYTE,
        "seconds": report["seconds"],
        "CPU seconds": report["cpu"],
        "pairs": report["pairs"],
        "counts MB": report["bytes"] / MEGABYTE,
        "file MB": (folder / FILE).stat().st_size / MEGABYTE,
    }
    notes = (
        "A generated log: popularity by Zipf's law, half of the events within a few ranks of the one before. log MB: "
        "its items and users, which are memory-mapped. peak MB: resident memory of the process that counts and writes "
        "the file, Python and the read part of the log included. One thread. counts MB: in memory, with what is "
        "derived from them when a run is opened.",
    )
    publish("counts-build", title="Building item-to-item counts", rows=[row], notes=notes, body=report)


# --- answers --------------------------------------------------------------------------------------------------------


def show_answers(folder: Path, items: int, questions: int) -> None:
    import torch

    from bench.recommend.index import FITTED, random_vectors
    from segue.index.approximate import ApproximateIndex

    torch.set_num_threads(1)
    counts, histories = Counts.open(folder / FILE), sample_histories(open_sequences(folder), questions + WARM)
    vectors, queries = random_vectors(items, FITTED + len(histories), np.random.default_rng(1))
    index = ApproximateIndex.build(vectors, queries=queries[:FITTED])
    kinds: dict[str, ItemIndex] = {"exact": index.exact, "approximate": index}
    rows, body = [], {}
    for name, kind in kinds.items():
        body[name] = answer_times(kind, queries[FITTED:], histories, counts)
        without, counted = (statistics.median(times) for times in body[name].values())
        rows.append({"index": name, "ms without": without, "ms with counts": counted, "ratio": counted / without})
    reached = statistics.mean(len(counts.added(history).items) for history in histories)
    notes = (
        f"Median processor time of {questions} searches for the ten best of {items:,} items of width 64, one at a time "
        "on one thread, alternately without counts and with them. Encoding the history is not included. Histories are "
        f"users of the generated log; their counts reach {reached:,.0f} items on average. Expected: a ratio of at most "
        f"{MOST_TIMES}.",
    )
    publish("counts-answers", title="An answer with counts", rows=rows, notes=notes, body=body)


def sample_histories(log: Sequences, count: int) -> list[Batch]:
    """The histories of random users."""
    users = np.random.default_rng(2).integers(0, log.n_users, count)
    parts = [np.asarray(log.items[log.offsets[user] : log.offsets[user + 1]], dtype=np.int64) for user in users]
    return [Batch(items=part, times=np.zeros_like(part), lengths=np.array([len(part)])) for part in parts]


def answer_times(index: ItemIndex, queries: Any, histories: list[Batch], counts: Counts) -> dict[str, list[float]]:
    """Milliseconds of each answer but the first few, without counts and with them."""
    from segue.recommend.rules import Rules
    from segue.recommend.search import search_items

    times: dict[str, list[float]] = {"without": [], "with": []}
    for row, history in enumerate(histories):
        for name, own in (("without", None), ("with", counts)):
            start = time.thread_time()  # the search runs in this thread; others may be busy
            search_items(index, queries[row : row + 1], history, [Rules()], keep_seen=False, counts=own)
            times[name].append(1000 * (time.thread_time() - start))
    return {name: each[WARM:] for name, each in times.items()}


if __name__ == "__main__":
    main(sys.argv[1:])
