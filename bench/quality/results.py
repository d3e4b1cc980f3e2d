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
    """The files of the results, and where what they are made from is kept."""

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
    """Around a command whose trainings can be taken up again: Ctrl-C ends it with a sentence, not with a traceback."""
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
    chosen = parser.parse_args(argv)
    places = Paths.of_project(chosen.cache)
    rows = read_rows(places.rows)
    if chosen.row is None:
        show_rows(rows, read_results(places.measured))
    elif chosen.row == TABLE:
        write_tables(places.document, rows, read_results(places.measured))
    else:
        simple = chosen.row.endswith(BASELINES)
        wanted = rows.of_log(chosen.row.removesuffix(BASELINES))[:1] if simple else rows.named(chosen.row)
        if chosen.data is None or not (chosen.data / EVENTS).is_file():
            parser.error(f"{chosen.row} needs DATA=folder with {EVENTS}, the log of {rows.logs[wanted[0].row.log].url}")
        for one in wanted:
            if simple:
                make_baselines(one, rows, chosen.data, places)
                continue
            with Display() as display:
                make_row(one, rows, chosen.data, places, progress=display.step)


def show_rows(rows: Rows, results: Results) -> None:
    """What there is, and what is still to be measured."""
    wide = max(len(one.name) for one in rows.trainings)
    for one in rows.trainings:
        measured = results.rows.get(one.name)
        state = "not measured yet" if measured is None else f"{measured.date}  ndcg@10 {figure(measured.ndcg)}"
        print_line(f"{one.name:{wide}}  {state}")
    print_line("\nMake one with: make results ROW=NAME DATA=folder-of-its-log")


def make_row(
    one: Training,
    rows: Rows,
    folder: Path,
    places: Paths,
    *,
    progress: Callable[[TrainingProgress], None] | None = None,
) -> Measured:
    """Measure a row, going on where an earlier attempt stopped, and enter it; a run that is entered stays as it is."""
    make_settings(read_recipe(one.row.recipe), one.overrides)  # refused now, not after the log has been read
    data = prepared(one, rows.logs[one.row.log], folder, places.cache)
    run = trained(one, data, places.cache, progress)
    results = read_results(places.measured)
    entered = results.rows.get(one.name)
    if entered is None or entered.run != _run_digest(run) or entered.recipe_digest != one.digest:
        entered = results.rows[one.name] = measured_run(one, run)
    _say_row(one, entered)
    _compare(one, rows, data, results, places.cache)
    write_results(places.measured, results, rows)
    write_tables(places.document, rows, results)
    return entered


def make_baselines(one: Training, rows: Rows, folder: Path, places: Paths) -> None:
    """Measure and enter what methods without training reach, by the rules of this row of the log."""
    data = prepared(one, rows.logs[one.row.log], folder, places.cache)
    settings = make_settings(read_recipe(one.row.recipe), one.overrides).evaluate
    log = SplitLog.of(data)
    report = evaluate(Popularity.fit(log), log, settings=settings).report  # any scorer: the baselines are beside it
    found = {
        name: Simple(metrics["hit@10"], metrics["ndcg@10"], report.baseline_intervals[name]["ndcg@10"])
        for name, metrics in report.baselines.items()
    }
    results = read_results(places.measured)
    results.baselines[one.row.log] = dict(sorted(found.items(), key=lambda each: each[1].ndcg))
    write_results(places.measured, results, rows)
    write_tables(places.document, rows, results)
    for name, each in results.baselines[one.row.log].items():
        print_line(f"{one.row.log}, {name}: hit@10 {figure(each.hit)}, ndcg@10 {figure(each.ndcg)}")


def prepared(one: Training, log: Log, folder: Path, cache: Path) -> api.Data:
    """The row's data folder, made once; refused where the log is not the one that the row is about."""
    events = folder / EVENTS
    shuffle = one.row.shuffle_ties
    ties = "" if shuffle is None else f"-ties-shuffled-{shuffle}"
    place = cache / "data" / f"{one.row.log}{ties}-{digest(events)[:12]}"
    if place.exists():
        data = api.Data.open(place)
    else:
        with Display() as display:
            if shuffle is None:
                data = api.prepare(events, out=place, progress=display.stage)
            else:
                data = api.prepare(shuffled(events, seed=shuffle), order=ORDER, out=place, progress=display.stage)
    found = {name: data.manifest["counts"][name] for name in ("users", "items", "events")}
    expected = {name: getattr(log, name) for name in found}
    if found != expected:
        raise InputError(f"{events} is not the log of {one.name}: after preparing it has {found}, expected {expected}.")
    return data


def shuffled(events: Path, *, seed: int) -> pl.DataFrame:
    """The log with a column that orders events of equal time at random."""
    table = pl.read_csv(events, separator="\t")
    return table.with_columns(pl.Series(ORDER, np.random.default_rng(seed).permutation(len(table))))


def run_folder(one: Training, data: api.Data, cache: Path) -> Path:
    return cache / "runs" / f"{one.name}-{one.digest[:8]}-{data.digest[:8]}"


def trained(one: Training, data: api.Data, cache: Path, progress: Callable[[TrainingProgress], None] | None) -> Path:
    """The run of a training, made unless it is there; what was interrupted goes on."""
    run = run_folder(one, data, cache)
    if not run.exists():
        run.parent.mkdir(parents=True, exist_ok=True)
        _train(one, data, run, progress)
    return run


def select_trainings(trainings: Sequence[Training], only: str | None) -> list[Training]:
    """All of them, or those of the row or of the single training with this name, which is what follows its last /."""
    if only is None:
        return list(trainings)
    if only == NONE:
        return []
    found = [one for one in trainings if only in (_short(one.row.name), _short(one.name))]
    if not found:
        known = ", ".join(_short(one.name) for one in trainings)
        raise InputError(f"There is no training {only!r}; there are {known}, and {NONE} trains nothing.")
    return found


def _short(name: str) -> str:
    return name.rpartition("/")[2]


def _train(one: Training, data: api.Data, run: Path, progress: Callable[[TrainingProgress], None] | None) -> None:
    unfinished = partial_of(run).exists()
    if not unfinished:
        _commit_file(run).write_text(_commit() or "", encoding="utf-8")
    print_line(f"{one.name}: {'going on with' if unfinished else 'training into'} {run}")
    with assigned_by(one.row.codes):
        api.train(
            data,
            out=run,
            recipe=one.row.recipe,
            overrides=one.overrides,
            resume=unfinished,
            progress=progress,
        )


def measured_run(one: Training, run: Path) -> Measured:
    """What a finished run says of itself."""
    manifest = read_manifest(run, "run")
    report = msgspec.json.decode((run / "metrics.json").read_bytes(), type=Report)
    training = manifest["training"]
    ended = datetime.datetime.fromtimestamp((run / "manifest.json").stat().st_mtime, datetime.UTC)
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
        date=ended.date().isoformat(),
    )


def _run_digest(run: Path) -> str:
    return digest(run / "manifest.json")[:12]


def _commit_file(run: Path) -> Path:
    """Beside a run: the commit that its training began with, which need not be the one that enters it."""
    return run.with_name(run.name + ".commit")


def _commit() -> str | None:
    """The commit of the code, with a + where the package differs from it; None outside a repository."""
    git = ["git", "-C", str(ROOT)]
    found = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False)
    if found.returncode:
        return None
    changed = subprocess.run([*git, "status", "--porcelain", "src"], capture_output=True, text=True, check=False)
    return found.stdout.strip() + ("+" if changed.stdout else "")


def _say_row(one: Training, measured: Measured) -> None:
    low, high = measured.ndcg_interval
    print_line(
        f"{one.name}: hit@10 {figure(measured.hit)}, ndcg@10 {figure(measured.ndcg)}, "
        f"95 % {figure(low)} to {figure(high)}, epoch {measured.best_epoch} of {measured.epochs}, "
        f"{measured.minutes:.1f} minutes"
    )
    if one.row.at_least is not None and measured.ndcg < one.row.at_least:
        print_line(f"It falls short of {figure(one.row.at_least)}; say in its `note` what was tried.")
    if one.row.at_most is not None and measured.ndcg > one.row.at_most:
        print_line(f"It is above {figure(one.row.at_most)}, so it is not what it should reproduce.")


def _compare(one: Training, rows: Rows, data: api.Data, results: Results, cache: Path) -> None:
    """Measure again each difference that this row is a side of, where both sides have a run; forget it otherwise."""
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
