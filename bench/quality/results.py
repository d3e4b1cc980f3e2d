"""A row of docs/results.md: prepare its log, train, measure, enter it in results.json and the tables.

    python -m bench.quality.results                                      the rows, and which of them are measured
    python -m bench.quality.results --row ml-1m/sasrec --data FOLDER     one row; an interrupted row is resumed
    python -m bench.quality.results --row ml-1m/baselines --data FOLDER  the methods without training on that log
    python -m bench.quality.results --row table                          the tables alone

`make results` calls it. Data folders and runs stay in a cache folder, so nothing is trained twice: the name of a run
holds digests of the recipe and of the data, and another recipe is another run.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import polars as pl

from bench.quality.results_table import (
    Log,
    Machine,
    Measured,
    Results,
    Rows,
    Simple,
    Training,
    difference_text,
    figure,
    read_results,
    read_rows,
    write_results,
    write_tables,
)
from bench.recommend.code_assignment import assigned_by
from bench.tables import machine
from segue import api
from segue.config.recipes import read_recipe
from segue.config.settings import make_settings
from segue.errors import InputError, SegueError
from segue.evaluation.baselines.popularity import Popularity
from segue.evaluation.evaluate import evaluate
from segue.evaluation.metrics import Difference
from segue.evaluation.report import Report
from segue.evaluation.split_log import SplitLog
from segue.folders import digest, partial_of, read_manifest
from segue.terminal import Display, print_error, print_line

if TYPE_CHECKING:
    from segue.training.loop import TrainingProgress

ROOT = Path(__file__).parents[2]
EVENTS = "events.tsv.gz"
TABLE, BASELINES = "table", "/baselines"
ORDER = "shuffled place"
NONE = "none"
"""As a choice of trainings: nothing is trained, and what is there is shown."""


@dataclass(frozen=True, slots=True)
class Paths:
    """The files of the results, and the cache of data folders and runs."""

    rows: Path
    measured: Path
    document: Path
    cache: Path

    @classmethod
    def of_project(cls, cache: Path) -> Paths:
        return cls(
            rows=ROOT / "bench" / "quality" / "results.toml",
            measured=ROOT / "bench" / "quality" / "results.json",
            document=ROOT / "docs" / "results.md",
            cache=cache,
        )


@contextmanager
def resumable() -> Iterator[None]:
    """For a command whose trainings can be resumed: Ctrl-C ends it with a sentence, not with a traceback."""
    try:
        yield
    except KeyboardInterrupt:
        print_error("Interrupted; the same command goes on from the last epoch that was finished.")
        sys.exit(130)


@resumable()
def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="make results", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--row",
        help=f"ROW=: a row of bench/quality/results.toml, LOG{BASELINES} for what needs no training there, or "
        f"{TABLE} to write the tables only",
    )
    parser.add_argument("--data", type=Path, help=f"DATA=: the folder with the log of the row, {EVENTS}")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "segue-results")
    options = parser.parse_args(argv)
    paths = Paths.of_project(options.cache)
    rows = read_rows(paths.rows)
    if options.row is None:
        show_rows(rows, read_results(paths.measured))
    elif options.row == TABLE:
        write_tables(paths.document, rows, read_results(paths.measured))
    else:
        simple = options.row.endswith(BASELINES)
        trainings = rows.of_log(options.row.removesuffix(BASELINES))[:1] if simple else rows.named(options.row)
        if options.data is None or not (options.data / EVENTS).is_file():
            parser.error(
                f"{options.row} needs DATA=folder with {EVENTS}, the log of {rows.logs[trainings[0].row.log].url}"
            )
        for one in trainings:
            if simple:
                make_baselines(one, rows, options.data, paths)
                continue
            with Display() as display:
                make_row(one, rows, options.data, paths, progress=display.step)


def show_rows(rows: Rows, results: Results) -> None:
    """The rows, and which of them are measured."""
    width = max(len(one.name) for one in rows.trainings)
    for one in rows.trainings:
        measurement = results.rows.get(one.name)
        state = "not measured yet" if measurement is None else f"{measurement.date}  ndcg@10 {figure(measurement.ndcg)}"
        print_line(f"{one.name:{width}}  {state}")
    print_line("\nMake one with: make results ROW=NAME DATA=folder-of-its-log")


def make_row(
    one: Training,
    rows: Rows,
    folder: Path,
    paths: Paths,
    *,
    progress: Callable[[TrainingProgress], None] | None = None,
) -> Measured:
    """Measure a row, resuming an earlier attempt, and enter it; a run that is entered is not measured again."""
    make_settings(read_recipe(one.row.recipe), one.overrides)  # refused now, not after the log has been read
    data = prepared(one, rows.logs[one.row.log], folder, paths.cache)
    run = trained(one, data, paths.cache, progress)
    results = read_results(paths.measured)
    measurement = results.rows.get(one.name)
    if measurement is None or measurement.run != _run_digest(run) or measurement.recipe_digest != one.digest:
        measurement = results.rows[one.name] = measured_run(one, run)
    _say_row(one, measurement)
    _compare(one, rows, data, results, paths.cache)
    write_results(paths.measured, results, rows)
    write_tables(paths.document, rows, results)
    return measurement


def make_baselines(one: Training, rows: Rows, folder: Path, paths: Paths) -> None:
    """Measure and enter the baselines, by the rules of this row of the log."""
    data = prepared(one, rows.logs[one.row.log], folder, paths.cache)
    settings = make_settings(read_recipe(one.row.recipe), one.overrides).evaluate
    log = SplitLog.of(data)
    report = evaluate(Popularity.fit(log), log, settings=settings).report  # any scorer: only the baselines are used
    baselines = {
        name: Simple(metrics["hit@10"], metrics["ndcg@10"], report.baseline_intervals[name]["ndcg@10"])
        for name, metrics in report.baselines.items()
    }
    results = read_results(paths.measured)
    results.baselines[one.row.log] = dict(sorted(baselines.items(), key=lambda baseline: baseline[1].ndcg))
    write_results(paths.measured, results, rows)
    write_tables(paths.document, rows, results)
    for name, baseline in results.baselines[one.row.log].items():
        print_line(f"{one.row.log}, {name}: hit@10 {figure(baseline.hit)}, ndcg@10 {figure(baseline.ndcg)}")


def prepared(one: Training, log: Log, folder: Path, cache: Path) -> api.Data:
    """The row's data folder, made once; refused if the log is not that of the row."""
    events = folder / EVENTS
    shuffle = one.row.shuffle_ties
    ties = "" if shuffle is None else f"-ties-shuffled-{shuffle}"
    data_folder = cache / "data" / f"{one.row.log}{ties}-{digest(events)[:12]}"
    if data_folder.exists():
        data = api.Data.open(data_folder)
    else:
        with Display() as display:
            if shuffle is None:
                data = api.prepare(events, out=data_folder, progress=display.stage)
            else:
                data = api.prepare(shuffled(events, seed=shuffle), order=ORDER, out=data_folder, progress=display.stage)
    counts = {name: data.manifest["counts"][name] for name in ("users", "items", "events")}
    expected = {name: getattr(log, name) for name in counts}
    if counts != expected:
        raise InputError(
            f"{events} is not the log of {one.name}: after preparing it has {counts}, expected {expected}."
        )
    return data


def shuffled(events: Path, *, seed: int) -> pl.DataFrame:
    """The log with a column that orders events of equal time at random."""
    table = pl.read_csv(events, separator="\t")
    return table.with_columns(pl.Series(ORDER, np.random.default_rng(seed).permutation(len(table))))


def run_folder(one: Training, data: api.Data, cache: Path) -> Path:
    return cache / "runs" / f"{one.name}-{one.digest[:8]}-{data.digest[:8]}"


def trained(one: Training, data: api.Data, cache: Path, progress: Callable[[TrainingProgress], None] | None) -> Path:
    """The run of a training, made unless it exists; an interrupted training is resumed."""
    run = run_folder(one, data, cache)
    if not run.exists():
        run.parent.mkdir(parents=True, exist_ok=True)
        _train(one, data, run, progress)
    return run


def select_trainings(trainings: Sequence[Training], only: str | None) -> list[Training]:
    """All trainings, or those of the row or the one training with this name, the part after its last /."""
    if only is None:
        return list(trainings)
    if only == NONE:
        return []
    matches = [one for one in trainings if only in (_short(one.row.name), _short(one.name))]
    if not matches:
        names = ", ".join(_short(one.name) for one in trainings)
        raise InputError(f"There is no training {only!r}; there are {names}, and {NONE} trains nothing.")
    return matches


def _short(name: str) -> str:
    return name.rpartition("/")[2]


def _train(one: Training, data: api.Data, run: Path, progress: Callable[[TrainingProgress], None] | None) -> None:
    resume = partial_of(run).exists()
    if not resume:
        _commit_file(run).write_text(_commit() or "", encoding="utf-8")
    print_line(f"{one.name}: {'going on with' if resume else 'training into'} {run}")
    with assigned_by(one.row.codes):
        api.train(
            data,
            out=run,
            recipe=one.row.recipe,
            overrides=one.overrides,
            resume=resume,
            progress=progress,
        )


def measured_run(one: Training, run: Path) -> Measured:
    """The measurement of a finished run."""
    manifest = read_manifest(run, "run")
    report = msgspec.json.decode((run / "metrics.json").read_bytes(), type=Report)
    training = manifest["training"]
    end_time = datetime.datetime.fromtimestamp((run / "manifest.json").stat().st_mtime, datetime.UTC)
    return Measured(
        recipe_digest=one.digest,
        commit=_commit_file(run).read_text(encoding="utf-8") if _commit_file(run).exists() else None,
        run=_run_digest(run),
        data=manifest["data"]["digest"][:12],
        seed=one.seed,
        epochs=training["epochs"],
        best_epoch=training["best_epoch"],
        minutes=round(sum(training["seconds"]) / 60, 2),
        hit=report.metrics["hit@10"],
        hit_interval=report.intervals["hit@10"],
        ndcg=report.metrics["ndcg@10"],
        ndcg_interval=report.intervals["ndcg@10"],
        machine=Machine(
            cores=machine()["cores"],
            threads=training["threads"],
            python=platform.python_version(),
            torch=manifest["torch"],
            segue=manifest["segue"],
        ),
        date=end_time.date().isoformat(),
    )


def _run_digest(run: Path) -> str:
    return digest(run / "manifest.json")[:12]


def _commit_file(run: Path) -> Path:
    """The file beside a run with the commit at the start of its training, not of its entry."""
    return run.with_name(run.name + ".commit")


def _commit() -> str | None:
    """The commit of the code, with a + where the package differs from it; None outside a repository."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False)
    if head.returncode:
        return None
    status = subprocess.run([*git, "status", "--porcelain", "src"], capture_output=True, text=True, check=False)
    return head.stdout.strip() + ("+" if status.stdout else "")


def _say_row(one: Training, measurement: Measured) -> None:
    low, high = measurement.ndcg_interval
    print_line(
        f"{one.name}: hit@10 {figure(measurement.hit)}, ndcg@10 {figure(measurement.ndcg)}, "
        f"95 % {figure(low)} to {figure(high)}, epoch {measurement.best_epoch} of {measurement.epochs}, "
        f"{measurement.minutes:.1f} minutes"
    )
    if one.row.at_least is not None and measurement.ndcg < one.row.at_least:
        print_line(f"It falls short of {figure(one.row.at_least)}; say in its `note` what was tried.")
    if one.row.at_most is not None and measurement.ndcg > one.row.at_most:
        print_line(f"It is above {figure(one.row.at_most)}, so it is not what it should reproduce.")


def _compare(one: Training, rows: Rows, data: api.Data, results: Results, cache: Path) -> None:
    """Update each paired difference with this row; without runs of both rows, remove it."""
    for pair in rows.rows:
        if pair.against is None or one.name not in (pair.name, pair.against):
            continue
        ours, theirs = rows.named(pair.name)[0], rows.named(pair.against)[0]
        folders = [run_folder(side, data, cache) for side in (theirs, ours)]
        results.differences.pop(pair.name, None)
        if all(folder.exists() for folder in folders):
            change = _difference(folders)
            results.differences[pair.name] = change
            print_line(difference_text(ours.name, theirs.name, change))


def _difference(folders: list[Path]) -> Difference:
    """The second's ndcg@10 minus the first's."""
    return api.compare(folders).runs[1].differences["ndcg@10"]


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except SegueError as error:
        sys.exit(f"results: {error}")
