"""`segue prepare` and `segue train` without a flag on every log of a folder, beside the best simple method.

    make bench SUBJECT=strangers DATA=folder                                every folder in it that has an events file
    make bench SUBJECT=strangers DATA=folder ARGS="--only lastfm ml-100k"   some of them; `--only none` trains nothing
    make bench SUBJECT=strangers DATA=folder ARGS="--only shop"             the log of `make demo`, with its 90 seconds
    make bench SUBJECT=strangers DATA=folder ARGS="--only lastfm --rivals"  three recipes with counts, too

Each training is a run in a cache folder and is made once; after Ctrl-C the same command resumes it. Each log is entered
in strangers.json as soon as it is measured, and the table of docs/results.md is written anew.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.quality.results import NONE, Paths, measured_run, resumable, trained
from bench.quality.results_table import Measured, Results, Row, Rows, Training, figure, read_results, read_rows
from bench.tables import markdown, plain, write_section
from segue import api
from segue.config.derived import settings_for
from segue.config.recipes import DEFAULT_RECIPE
from segue.demo import shop
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
SHOP, SHOP_MINUTES = "shop", "train.minutes=1.5"  # as `make demo`
COUNTS = "counts=fitted"
RIVALS = {
    "sasrec as for Beauty": (
        *("sasrec", "model.length=50", "model.dropout=0.5", "train.epochs=30", "train.patience=10"),
        *("train.learning_rate=2e-3", "train.decay=1.0"),
    ),
    "gru4rec": ("gru4rec",),
    "esasrec, 60 epochs": ("esasrec", "train.epochs=60", "train.patience=10"),
}
"""What somebody would set by hand: a recipe and settings, each trained with counts."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A log, and the measurement of the recipe that `segue train` takes by itself."""

    users: int
    items: int
    events: int
    default: dict[int, Measured] = {}
    """By the seed."""
    baseline: str
    """The simple method with the best ndcg@10 of the test part."""
    baseline_ndcg: float
    difference: Difference
    """The ndcg@10 of the first seed's model minus the baseline's, paired by user."""
    rivals: dict[str, Measured] = {}

    @property
    def ndcg(self) -> float:
        """The mean of the seeds."""
        return statistics.mean(one.ndcg for one in self.default.values())


@resumable()
def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="make bench SUBJECT=strangers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="DATA=: a folder with a folder for each log")
    parser.add_argument("--only", nargs="+", metavar="LOG", help=f"logs by the names of their folders; {NONE}: none")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="of the models without a flag")
    parser.add_argument("--rivals", action="store_true", help="train what somebody would set by hand, too")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "segue-results")
    options = parser.parse_args(argv)
    paths, entries = Paths.of_project(options.cache), read_entries(ENTRIES)
    rows, results = read_rows(paths.rows), read_results(paths.measured)
    for name, events in chosen_logs(options.data, options.only).items():
        for entry in measure(name, events, options.cache, entries.get(name), options.seeds, rivals=options.rivals):
            entries = dict(sorted({**entries, name: entry}.items()))
            write_json(ENTRIES, entries)
            write_document(paths.document, table(entries, rows, results))
    print_line("\n".join(plain(table(entries, rows, results))) if entries else "No log is measured yet.")


def read_entries(path: Path) -> dict[str, Entry]:
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Entry]) if path.exists() else {}


def chosen_logs(folder: Path, only: Sequence[str] | None) -> dict[str, Path | None]:
    """The events files of the logs in a folder, by the names of their folders; None for the log of the demo."""
    logs: dict[str, Path | None] = {path.parent.name: path for path in sorted(folder.glob("*/events.*"))}
    if only == [NONE]:
        return {}
    if only is not None and SHOP in only:
        logs.setdefault(SHOP, None)
    missing = [name for name in only or () if name not in logs]
    if missing or not logs:
        raise InputError(
            f"Expected folders with an events file in {folder} (events.csv.gz, events.tsv …), got "
            f"{', '.join(logs) or 'none'}{f', and no {missing[0]}' if missing else ''}: name the folder with DATA=."
        )
    return {name: path for name, path in logs.items() if only is None or name in only}


def prepared(name: str, events: Path | None, cache: Path) -> api.Data:
    """The data folder of a log, made once."""
    out = cache / "data" / f"stranger-{name}{'' if events is None else f'-{digest(events)[:12]}'}"
    if out.exists():
        return api.Data.open(out)
    with Display() as display:
        if events is not None:
            return api.prepare(events, out=out, progress=display.stage)
        with tempfile.TemporaryDirectory(prefix="segue-bench-") as folder:
            log = shop.clean(shop.fetch(cache=shop.cache_folder()), out=Path(folder))
            return api.prepare(log.events, out=out, user="customer", items=log.items, progress=display.stage)


def measure(
    name: str, events: Path | None, cache: Path, known: Entry | None, seeds: Sequence[int], *, rivals: bool
) -> Iterator[Entry]:
    """Prepare, train and measure a log without a flag; the entry after each training. Each step is made once."""
    data, changes = prepared(name, events, cache), (SHOP_MINUTES,) if name == SHOP else ()
    derived = settings_for(None, changes, data).settings
    rules = hashlib.sha256(msgspec.json.encode(derived)).hexdigest()[:8]  # other rules are another run
    default, by_hand = ({}, {}) if known is None else (dict(known.default), dict(known.rivals))
    entry = known
    for seed in seeds:
        row = Row(name=f"strangers/{name}-{seed}-{rules}", log=name, recipe=DEFAULT_RECIPE, set=changes)
        run, default[seed] = _measured(Training(row, seed), data, cache)
        if entry is None or seed == min(default):
            entry = entry_of(data, run)
        entry = msgspec.structs.replace(entry, default=dict(sorted(default.items())), rivals=dict(by_hand))
        yield entry
    for rival, (recipe, *settings) in RIVALS.items() if rivals else ():
        row = Row(name=f"strangers/{name}-{rival}".replace(" ", "-"), log=name, recipe=recipe, set=(*settings, COUNTS))
        _, by_hand[rival] = _measured(Training(row, seed=1), data, cache)
        assert entry is not None
        entry = msgspec.structs.replace(entry, rivals=dict(by_hand))
        yield entry


def _measured(training: Training, data: api.Data, cache: Path) -> tuple[Path, Measured]:
    with Display() as display:
        run = trained(training, data, cache, display.step)
    return run, measured_run(training, run)


def entry_of(data: api.Data, run: Path) -> Entry:
    """The entry of a log with the comparison of one run, before measurements are entered."""
    report = msgspec.json.decode((run / "metrics.json").read_bytes(), type=Report)
    baseline = max(report.baselines, key=lambda method: report.baselines[method][METRIC])
    return Entry(
        **{count: data.manifest["counts"][count] for count in ("users", "items", "events")},
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
            "minutes": f"{statistics.mean(one.minutes for one in entry.default.values()):.1f}",
            "`segue train`": figure(entry.ndcg) + _seeds(entry),
            "best simple method": f"{figure(entry.baseline_ndcg)} {entry.baseline}",
            "difference": f"{entry.difference.value:+.4f}",
            "95 %": f"{entry.difference.low:+.4f} to {entry.difference.high:+.4f}",
            "best by hand, with counts": _best_rival(entry),
            **_known(entry, rows, results),
        }
        for name, entry in entries.items()
    ]


def _seeds(entry: Entry) -> str:
    values = [one.ndcg for one in entry.default.values()]
    return f" ({figure(min(values))} to {figure(max(values))}, {len(values)} seeds)" if len(values) > 1 else ""


def _best_rival(entry: Entry) -> str:
    if not entry.rivals:
        return "–"
    best = max(entry.rivals, key=lambda name: entry.rivals[name].ndcg)
    return f"{figure(entry.rivals[best].ndcg)} {best}"


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
