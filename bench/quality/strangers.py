"""`segue prepare` and `segue train` without a flag on every log of a folder, beside the best simple method.

    make bench SUBJECT=strangers DATA=folder                                every folder in it that has an events file
    make bench SUBJECT=strangers DATA=folder ARGS="--only lastfm ml-100k"   some of them; `--only none` trains nothing

Each training is a run in a cache folder and is made once; after Ctrl-C the same command resumes it. Each log is entered
in strangers.json as soon as it is measured, and the table of docs/results.md is written anew.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.quality.results import NONE, Paths, measured_run, resumable, trained
from bench.quality.results_table import Measured, Results, Row, Rows, Training, figure, read_results, read_rows
from bench.tables import markdown, plain, write_section
from segue import api
from segue.config.recipes import DEFAULT_RECIPE
from segue.errors import InputError
from segue.evaluation.baselines import BASELINES
from segue.evaluation.evaluator import Evaluator
from segue.evaluation.metrics import Difference, differences, rank_totals
from segue.evaluation.report import Report
from segue.evaluation.split_log import SplitLog
from segue.folders import digest, write_json
from segue.terminal import Display, print_line

ENTRIES = Path(__file__).parent / "strangers.json"
METRIC, DEPTH, SAMPLES = "ndcg@10", 10, 2000


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A log, and the measurement of the recipe that `segue train` takes by itself."""

    users: int
    items: int
    events: int
    default: Measured
    baseline: str
    """The simple method with the best ndcg@10 of the test part."""
    baseline_ndcg: float
    difference: Difference
    """The model's ndcg@10 minus the baseline's, paired by user."""


@resumable()
def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="make bench SUBJECT=strangers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="DATA=: a folder with a folder for each log")
    parser.add_argument("--only", nargs="+", metavar="LOG", help=f"logs by the names of their folders; {NONE}: none")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "segue-results")
    options = parser.parse_args(argv)
    paths, entries = Paths.of_project(options.cache), read_entries(ENTRIES)
    rows, results = read_rows(paths.rows), read_results(paths.measured)
    for name, events in chosen_logs(options.data, options.only).items():
        entries = dict(sorted({**entries, name: measure(name, events, options.cache)}.items()))
        write_json(ENTRIES, entries)
        write_document(paths.document, table(entries, rows, results))
    print_line("\n".join(plain(table(entries, rows, results))) if entries else "No log is measured yet.")


def read_entries(path: Path) -> dict[str, Entry]:
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Entry]) if path.exists() else {}


def chosen_logs(folder: Path, only: Sequence[str] | None) -> dict[str, Path]:
    """The events files of the logs in a folder, by the names of their folders."""
    logs = {path.parent.name: path for path in sorted(folder.glob("*/events.*"))}
    if only == [NONE]:
        return {}
    missing = [name for name in only or () if name not in logs]
    if missing or not logs:
        raise InputError(
            f"Expected folders with an events file in {folder} (events.csv.gz, events.tsv …), got "
            f"{', '.join(logs) or 'none'}{f', and no {missing[0]}' if missing else ''}: name the folder with DATA=."
        )
    return {name: path for name, path in logs.items() if only is None or name in only}


def measure(name: str, events: Path, cache: Path) -> Entry:
    """Prepare, train and measure a log without a flag; each step is made once."""
    out = cache / "data" / f"stranger-{name}-{digest(events)[:12]}"
    training = Training(Row(name=f"strangers/{name}", log=name, recipe=DEFAULT_RECIPE), seed=1)
    with Display() as display:
        data = api.Data.open(out) if out.exists() else api.prepare(events, out=out, progress=display.stage)
        run = trained(training, data, cache, display.step)
    report = msgspec.json.decode((run / "metrics.json").read_bytes(), type=Report)
    baseline = max(report.baselines, key=lambda method: report.baselines[method][METRIC])
    return Entry(
        **{count: data.manifest["counts"][count] for count in ("users", "items", "events")},
        default=measured_run(training, run),
        baseline=baseline,
        baseline_ndcg=report.baselines[baseline][METRIC],
        difference=difference(np.load(run / "ranks.npy"), data, report, baseline),
    )


def difference(ranks: np.ndarray, data: api.Data, report: Report, baseline: str) -> Difference:
    """The ndcg@10 of a model's ranks minus that of a baseline on the same cases."""
    log = SplitLog.of(data)
    cases = log.split.cases(report.part, report.target)
    evaluator = Evaluator(sequences=log.sequences, counts=log.training_counts, seen=report.seen)
    theirs = evaluator.ranks(BASELINES[baseline](log), cases)
    totals = [rank_totals(each, (DEPTH,), cases.users) for each in (ranks, theirs)]
    return differences(*totals, samples=SAMPLES, rng=np.random.default_rng(0))[METRIC]


def table(entries: dict[str, Entry], rows: Rows, results: Results) -> list[dict[str, str]]:
    """A row for each log: the model without a flag, and what it is compared with."""
    return [
        {
            "log": name,
            "events": f"{entry.events:,}",
            "minutes": f"{entry.default.minutes:.1f}",
            "`segue train`": figure(entry.default.ndcg),
            "best simple method": f"{figure(entry.baseline_ndcg)} {entry.baseline}",
            "difference": f"{entry.difference.value:+.4f}",
            "95 %": f"{entry.difference.low:+.4f} to {entry.difference.high:+.4f}",
            **_known(entry, rows, results),
        }
        for name, entry in entries.items()
    ]


def _known(entry: Entry, rows: Rows, results: Results) -> dict[str, str]:
    """The best row of docs/results.md and the best published figure, where the log is one of its logs."""
    counts = (entry.users, entry.items, entry.events)
    logs = [name for name, log in rows.logs.items() if (log.users, log.items, log.events) == counts]
    own = [one for one in rows.trainings if one.row.log in logs and one.row.shuffle_ties is None]
    measured = {one.name: results.rows[one.name].ndcg for one in own if one.name in results.rows}
    best = max(measured, key=lambda name: measured[name], default="")
    published = max((known.ndcg for one in own for known in one.row.published), default="–")
    return {"best recipe": f"{figure(measured[best])} `{best}`" if best else "–", "best published": published}


def write_document(document: Path, lines: list[dict[str, Any]]) -> None:
    write_section(document, "strangers", ["", *markdown(lines)])
