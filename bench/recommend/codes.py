"""Item tables of codes: memory with ten million items, milliseconds of an answer, and what they cost in quality.

    make bench SUBJECT=codes DATA=folder          MovieLens-1M: events.tsv.gz
    … ARGS="--only memory"                        or assign, speed, quality: one part alone

Quality is that of the rows ml-1m/esasrec and ml-1m/esasrec-codes of `make results`, which are made where they are not
measured yet, in its cache folder. Each part is written to a file of its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from bench.data.prepare import measure_command
from bench.quality.results import Paths, make_row, prepared, run_folder
from bench.quality.results_table import Measured, Rows, Training, read_results, read_rows
from bench.tables import publish
from segue import api
from segue.config.recipes import read_recipe
from segue.config.settings import Settings, make_settings
from segue.data.batch import Batch
from segue.data.sequences import Sequences
from segue.data.vocabulary import Vocabulary
from segue.errors import InputError
from segue.index.build import build_index, sample_queries
from segue.index.codes import CodeIndex
from segue.index.exact import ExactIndex, best_columns
from segue.layers.packed import tensors
from segue.models.build import build_model
from segue.models.encoders import ModelSettings
from segue.models.items.code_assignment import assigned_codes
from segue.models.items.coded import CodeSettings, CodeTable
from segue.models.items.tables import DataFacts
from segue.objective.objective import Objective
from segue.recommend.recommender import Recommender
from segue.terminal import Display
from segue.training.optimiser import optimiser
from segue.training.state import TrainingState

PARTS = ("memory", "assign", "speed", "quality")
MEGABYTE = 1_000_000
RECIPE, CODED = "sasrec-sampled", ("model.items=codes",)
MANY, WIDTH, EVENTS_A_USER, USERS = 10_000_000, 64, 20, 2_000_000
SHORT = ("train.epochs=2", "train.stride=0", "model.depth=1", "model.length=50", "objective.sampler.negatives=500")
PLAIN_ROW, CODED_ROW = "ml-1m/esasrec", "ml-1m/esasrec-codes"
MILLION, WARM, CHANGED = 1_000_000, 5, 0.5


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench codes", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, help="folder with events.tsv.gz, for speed and quality")
    parser.add_argument("--only", choices=PARTS, action="append", help="parts to measure; all of them by default")
    parser.add_argument("--items", type=int, default=MANY, help="of the catalogue whose memory is measured")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "segue-results")
    parser.add_argument("--child", choices=("memory", "assign"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        torch.set_num_threads(1)
        report = train_and_answer(options.items) if options.child == "memory" else assign(options.items)
        print(json.dumps(report))
        return
    for part in options.only or PARTS:
        if part in ("memory", "assign"):
            in_a_process_of_its_own(part, options.items)
        elif part == "speed":
            speed(options.data, options.cache, options.questions)
        else:
            quality(options.data, options.cache)


# --- ten million items ----------------------------------------------------------------------------------------------


def in_a_process_of_its_own(part: str, items: int) -> None:
    """Peak memory, imports included."""
    command = [sys.executable, "-m", "bench.recommend.codes", "--child", part, "--items", str(items)]
    seconds, peak, report = measure_command(command)
    row = {"part": part, "items": items, "peak MB": peak / MEGABYTE, "seconds": seconds, **report["row"]}
    publish(f"codes-{part}", title=report["title"], rows=[row], notes=report["notes"], body=report)


def train_and_answer(items: int) -> dict[str, Any]:
    """One training step over a catalogue of this size, then an answer in ids."""
    rng, peaks = np.random.default_rng(1), {"imports": _peak()}
    ids = pl.int_range(1, items + 1, eager=True).cast(pl.String).str.zfill(8)
    table = pl.DataFrame({"id": "item-" + ids, "count": np.ones(items, dtype=np.int64)})
    vocabulary, codes = Vocabulary(table), rng.integers(0, 256, (items + 1, 8), dtype=np.uint8)
    counts = np.concatenate(([0], table["count"].to_numpy()))
    peaks["catalogue"] = _peak()
    settings = make_settings(read_recipe(RECIPE), [*CODED, f"model.width={WIDTH}"])
    first = torch.Generator().manual_seed(1)
    model = build_model(settings.model, items, generator=first, facts=DataFacts(codes=codes))
    objective = Objective(settings.objective, counts, length=model.length, only_trained=True)
    step = _step(TrainingState(model, optimiser(model, settings.train), seed=1), objective, settings, items)
    peaks["a step"] = _peak()
    index = build_index(model, model.answerable(counts), settings.index)
    recommender = Recommender(model, index, vocabulary, settings=settings.model)
    history = vocabulary.ids(rng.integers(1, items + 1, 100))
    start = time.perf_counter()
    answer = recommender.recommend(history, k=100)
    first_answer, start = time.perf_counter() - start, time.perf_counter()
    recommender.recommend(history, k=100)
    second_answer = time.perf_counter() - start
    peaks["answers"] = _peak()
    if len(answer.items) != 100 or answer.unknown or answer.fallback:
        raise InputError(f"An answer of {len(answer.items)} items, {len(answer.unknown)} unknown.")
    row = {"step s": step, "first answer s": first_answer, "answer s": second_answer}
    row |= {f"{name} MB": size / MEGABYTE for name, size in peaks.items()}
    notes = (
        f"{RECIPE} with {' '.join(CODED)} and width {WIDTH}: one step over {settings.train.tokens:,} events with "
        f"{settings.objective.negatives:,} negatives, the exact index, then the 100 best after 100 events, in ids. "
        "Codes are random. Columns in MB: the peak up to there.",
    )
    return {"title": "A catalogue that does not fit", "row": row, "notes": notes}


def _step(state: TrainingState, objective: Objective, settings: Settings, items: int) -> float:
    """Seconds of one step over users with random histories."""
    model, events = state.model, settings.train.tokens
    users = events // settings.model.length
    batch = Batch(
        items=np.random.default_rng(2).integers(1, items + 1, events),
        times=np.arange(events),
        lengths=np.full(users, events // users),
    )
    start = time.perf_counter()
    model.train()
    examples = objective.examples(batch, state.rng)
    hidden = model.encode(tensors(examples.inputs))  # type: ignore[operator]
    torch.autograd.backward(objective.loss(model, hidden, examples, state.generator))  # type: ignore[arg-type]
    state.step(settings.train)
    return time.perf_counter() - start


def assign(items: int) -> dict[str, Any]:
    """Codes for this many items, from users with random histories within a part of the catalogue."""
    rng = np.random.default_rng(1)
    near = rng.integers(0, 100, USERS)[:, None] * (items // 100) + rng.integers(0, items // 100, (USERS, EVENTS_A_USER))
    sequences = Sequences(
        offsets=np.arange(USERS + 1) * EVENTS_A_USER,
        items=(near.ravel() + 1).astype(np.int32),
        times=np.zeros(1, dtype=np.int64),
    )
    del near
    codes = make_settings(read_recipe(RECIPE), [*CODED, f"model.width={WIDTH}"]).model.items
    assert isinstance(codes, CodeSettings)
    start = time.perf_counter()
    assigned_codes(sequences, sequences.offsets[1:], items, parts=codes.parts, values=codes.values, seed=1)
    row = {"events": USERS * EVENTS_A_USER, "assigning s": time.perf_counter() - start}
    notes = (f"{USERS:,} users with {EVENTS_A_USER} events each, one thread.",)
    return {"title": "Codes by clusters", "row": row, "notes": notes}


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# --- milliseconds of an answer --------------------------------------------------------------------------------------


def speed(folder: Path | None, cache: Path, questions: int) -> None:
    """The ten best of a million items, by three methods, for queries of a trained model."""
    torch.set_num_threads(1)
    data = _data(CODED_ROW, folder, cache)
    run, how = _trained_run(data, cache)
    model = run.model
    assert isinstance(model.items, CodeTable)
    queries = sample_queries(model, data.sequences, data.split.cases("valid", "last"))
    assert queries is not None and len(queries) >= questions + WARM
    codes = a_million(model.items.codes.numpy(), np.random.default_rng(1))
    index = CodeIndex.build(model.items.centroids.detach(), torch.from_numpy(codes))
    pairs = torch.from_numpy(index.pairs.astype(np.int32))
    selection = torch.arange(codes.shape[1]), torch.from_numpy(codes).long()
    exact = ExactIndex.build(model.items.centroids.detach()[selection].flatten(1))
    ways: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
        "codes, pruned": lambda question: index.search(question, 10),
        "codes, every item": lambda question: every_item(index, pairs, question, 10),
        "vectors, every item": lambda question: exact.search(question, 10),
    }
    times_of, differ = _measure_ways(ways, queries[: questions + WARM])
    rows = [
        {"way": name, "median ms": statistics.median(times), "95 % ms": float(np.quantile(times, 0.95))}
        for name, times in times_of.items()
    ]
    notes = (
        f"Processor time of {questions} questions of MovieLens-1M's validation, one at a time on one thread, one "
        f"way after the other; {how}, width {model.items.width}. The million: each item of the run 293 times, each "
        f"code of a copy with probability {CHANGED} that of another item drawn at random.",
        f"Answers of the first two that differ, in an item or a score: {differ} of {questions}.",
    )
    publish("codes-speed", title="The ten best of a million items", rows=rows, notes=notes, body=times_of)


def a_million(codes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Codes of a million items [1,000,001, parts] distributed like those of a trained catalogue [V + 1, parts]."""
    trained_codes = codes[1:]
    copies = trained_codes[np.arange(MILLION) % len(trained_codes)]
    others = np.stack([part[rng.integers(0, len(trained_codes), MILLION)] for part in trained_codes.T], axis=1)
    changed = rng.random(copies.shape) < CHANGED
    changed[: len(trained_codes)] = False
    return np.concatenate((codes[:1], np.where(changed, others, copies)))


def every_item(index: CodeIndex, pairs: Tensor, question: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The exact search: sums over all codes of every item, and the best of them. `pairs`: the index's, as torch
    looks them up fastest."""
    products = (index.centroids @ question.view(len(index.centroids), -1, 1))[:, :, 0]
    scores = torch.zeros(len(index.numbers))
    for pair, indices in zip(torch.split(products, 2), pairs, strict=True):
        scores += (pair[0][:, None] + pair[1]).flatten().index_select(0, indices)
    columns, best = best_columns(scores[None], k)
    return torch.from_numpy(index.numbers)[columns], best


def _measure_ways(
    ways: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]], questions: Tensor
) -> tuple[dict[str, list[float]], int]:
    """Milliseconds of each method, and how many answers of the first two differ."""
    times_of: dict[str, list[float]] = {}
    answers = []
    for (
        name,
        way,
    ) in ways.items():  # not alternately: half a gigabyte of vectors would empty the processor's cache before each
        times, results = [], []
        for question in questions:
            start = time.thread_time()  # the search runs in this thread; others may be busy
            results.append(way(question[None]))
            times.append(1000 * (time.thread_time() - start))
        times_of[name] = times[WARM:]
        answers.append([torch.cat(each) for each in zip(*results, strict=True)])
    (items, scores), (others, their_scores) = answers[:2]
    differ = (items != others).any(1) | (scores != their_scores).any(1)
    return times_of, int(differ.sum())


def _trained_run(data: api.Data, cache: Path) -> tuple[Recommender, str]:
    """The run of the first seed if quality was measured, else a run of a short training."""
    first = read_rows(Paths.of_project(cache).rows).named(CODED_ROW)[0]
    run = run_folder(first, data, cache)
    if run.exists():
        return Recommender.open(run), f"the run {first.name}"
    with tempfile.TemporaryDirectory(prefix="segue-bench-") as name, Display() as display:
        overrides = [*CODED, *SHORT, "train.threads=1"]
        trained_run = api.train(data, out=Path(name) / "run", recipe=RECIPE, overrides=overrides, progress=display.step)
        return trained_run, f"{RECIPE} with {' '.join((*CODED, *SHORT))}"


def _data(row: str, folder: Path | None, cache: Path) -> api.Data:
    rows = read_rows(Paths.of_project(cache).rows)
    training = rows.named(row)[0]
    if folder is None:
        raise InputError(f"codes needs DATA=folder with events.tsv.gz, the log of {rows.logs[training.row.log].url}")
    return prepared(training, rows.logs[training.row.log], folder, cache)


# --- quality --------------------------------------------------------------------------------------------------------


def quality(folder: Path | None, cache: Path) -> None:
    """ndcg@10 with codes and without, and the bytes of both tables."""
    data, paths = _data(CODED_ROW, folder, cache), Paths.of_project(cache)
    rows = [_quality_row(name, data, paths, folder) for name in (PLAIN_ROW, CODED_ROW)]
    smaller, lost = rows[0]["table bytes"] / rows[1]["table bytes"], 1 - rows[1]["ndcg@10"] / rows[0]["ndcg@10"]
    notes = (
        f"Means over seeds, which docs/results.md has one by one. The table of codes, codes included, is "
        f"{smaller:.1f} times smaller, and {lost:.1%} of ndcg@10 is lost.",
    )
    publish("codes-quality", title="MovieLens-1M with codes and without", rows=rows, notes=notes, body=rows)


def _quality_row(name: str, data: api.Data, paths: Paths, folder: Path | None) -> dict[str, Any]:
    rows = read_rows(paths.rows)
    trainings = rows.named(name)
    scores = [_measurement(training, rows, paths, folder).ndcg for training in trainings]
    settings = make_settings(read_recipe(trainings[0].row.recipe), trainings[0].overrides).model
    return {
        "row": name,
        "seeds": len(scores),
        "ndcg@10": statistics.fmean(scores),
        "each": " ".join(f"{score:.4f}" for score in scores),
        "table bytes": table_bytes(settings, len(data.vocabulary)),
    }


def table_bytes(settings: ModelSettings, items: int) -> int:
    """Bytes of the table of this many items, codes included; their values do not matter."""
    parts = settings.items.parts if isinstance(settings.items, CodeSettings) else None
    codes = None if parts is None else np.zeros((items + 1, parts), dtype=np.uint8)
    model = build_model(settings, items, generator=torch.Generator(), facts=DataFacts(codes=codes))
    return sum(tensor.nbytes for tensor in model.items.state_dict().values())


def _measurement(training: Training, rows: Rows, paths: Paths, folder: Path | None) -> Measured:
    """The measurement of a training in docs/results.md, made if it is missing."""
    measurement = read_results(paths.measured).rows.get(training.name)
    if measurement is not None and measurement.recipe_digest == training.digest:
        return measurement
    assert folder is not None
    with Display() as display:
        return make_row(training, rows, folder, paths, progress=display.step)


if __name__ == "__main__":
    main(sys.argv[1:])
