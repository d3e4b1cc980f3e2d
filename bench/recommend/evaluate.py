"""Seconds of an evaluation: the model and each baseline, ranked over the full catalogue on the test part of a log."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from bench.tables import publish
from segue import api
from segue.data.sequences import Sequences
from segue.data.split import Split
from segue.errors import InputError
from segue.evaluation.baselines import BASELINES
from segue.evaluation.evaluate import evaluate
from segue.evaluation.evaluator import Evaluator, ModelScorer, Scorer
from segue.evaluation.metrics import summary
from segue.evaluation.settings import EvaluateSettings, seen_rule
from segue.evaluation.split_log import SplitLog
from segue.models.build import build_model
from segue.models.checkpoint import load_model
from segue.models.encoders.esasrec import ESASRecSettings
from segue.models.sequence import SequenceModel

T = TypeVar("T")

NOTES = (
    "fit: what a baseline learns from the training part. measure: each score, its rank, and the lists behind coverage.",
    "ranks alone is what validation does after each epoch. The report adds intervals and slices to all of the above.",
)
UNTRAINED = "The model is untrained, since time does not depend on weights: its quality means nothing."


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench evaluate", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with events.tsv.gz, or a data folder")
    parser.add_argument("--run", type=Path, help="a run folder to measure; otherwise an untrained model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="a further file to write the results to")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(prefix="segue-bench-") as folder:
        has_data = (options.data / "manifest.json").is_file()
        data = (
            api.Data.open(options.data)
            if has_data
            else api.prepare(options.data / "events.tsv.gz", out=Path(folder) / "data")
        )
        n_items = len(data.vocabulary)
        model = _model(options.run, n_items)
        rows = measure(model, data.sequences, data.split, n_items=n_items)
    cases = len(data.split.cases("test"))
    notes = [*NOTES, *([] if options.run else [UNTRAINED])]
    title = f"Evaluation of {cases:,} cases among {n_items:,} items, {options.threads} threads"
    path = publish("evaluate", title=title, rows=rows, notes=notes, body={"cases": cases, "items": n_items})
    if options.json:
        shutil.copyfile(path, options.json)


def measure(model: SequenceModel, sequences: Sequences, split: Split, *, n_items: int) -> list[dict[str, Any]]:
    """A row for the model, one for each baseline, and one for the whole report."""
    settings = EvaluateSettings()
    rule, _ = seen_rule(settings, sequences, split)
    log = SplitLog(sequences, split, n_items)
    evaluator = Evaluator(sequences=sequences, counts=log.training_counts, seen=rule)
    cases = split.cases("test", settings.target)

    def row(who: str, scorer: Scorer, fit: float) -> dict[str, Any]:
        result, seconds = _timed(lambda: evaluator.measure(scorer, cases, settings.at))
        ranks, alone = _timed(lambda: evaluator.ranks(scorer, cases))
        assert (ranks == result.ranks).all()
        figures = summary(ranks, (10,))
        return {
            "who": who,
            "fit s": fit,
            "measure s": seconds,
            "ranks alone s": alone,
            "cases a second": len(cases) / seconds,
            "hit@10": figures["hit@10"],
            "ndcg@10": figures["ndcg@10"],
        }

    rows = [row("model", ModelScorer(model), 0.0)]
    for name, fit in BASELINES.items():
        baseline, seconds = _timed(partial(fit, log))
        rows.append(row(name, baseline, seconds))
    _, seconds = _timed(lambda: evaluate(ModelScorer(model), log, settings=settings))
    whole = {"who": "the whole report", "measure s": seconds, "cases a second": len(cases) / seconds}
    return [*rows, {name: whole.get(name, "–") for name in rows[0]}]


def _model(run: Path | None, n_items: int) -> SequenceModel:
    if run is None:
        return build_model(ESASRecSettings(), n_items, generator=torch.Generator().manual_seed(1))
    model = load_model(run)
    if model.items.n_items != n_items:
        raise InputError(
            f"{run} knows {model.items.n_items:,} items and the data has {n_items:,}; give a run trained on this data."
        )
    return model


def _timed(call: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start


if __name__ == "__main__":
    main(sys.argv[1:])
