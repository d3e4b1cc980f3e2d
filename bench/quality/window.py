"""PinnerFormer's claims on public logs: recall of the next two weeks, by objective, negatives and age.

    make bench SUBJECT=window                                        the demo's shop, which is downloaded
    make bench SUBJECT=window DATA=folder ARGS="--log beauty"        Amazon Beauty: events.tsv.gz and items.tsv.gz
    make bench SUBJECT=window DATA=folder ARGS="--log ml-1m"         reported only: few users have a window there
    … ARGS="--log shop --only dense-1"                               one training; `--only none` trains nothing

Every training is a run of its own in a cache folder and is made once; after Ctrl-C the same command resumes it. The
table has the arms of which all seeds are trained.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from bench.data.cut_logs import BEAUTY, ML_1M, SHOP, CutLog, prepared
from bench.quality.paired import averaged, difference, difference_of_losses, mean_interval, verdict
from bench.quality.results import resumable, run_folder, select_trainings, trained
from bench.quality.results_table import Row, Training, figure
from bench.tables import markdown, plain, write_section, written
from segue import api
from segue.errors import SegueError
from segue.evaluation.metrics import Difference
from segue.evaluation.window.evaluate import WindowEvaluation
from segue.folders import read_manifest
from segue.recommend.recommender import Recommender
from segue.runs.measure import measure_window
from segue.runs.read import settings_of
from segue.terminal import Display, print_error, print_line

DOCUMENT = Path(__file__).parents[2] / "docs" / "window.md"
DAYS, AGES, DEPTH = 14, (0, 1, 3, 7, 14), 10
RECALL = f"recall@{DEPTH}"
SEEDS = (1, 2, 3)

# Validation chooses the epoch by the same metric as the test; a run's own report has one query a user. Small enough for
# one core: about two minutes a training on the shop and on Beauty, three on MovieLens.
COMMON = (
    *("evaluate.days=14", "evaluate.target=first", "evaluate.bootstrap=100"),
    *("model.width=64", "train.tokens=2000", "train.averaging=0.99", "train.patience=4", "train.threads=1"),
)
# Half of the shop's customers have at most 45 purchases, most of Beauty's at most 10 reviews. People buy again in the
# shop, so seen items are kept there; in the other logs validation decides.
OF_LOG = {
    "shop": ("model.length=100", "train.epochs=10", "evaluate.seen=keep"),
    "beauty": ("model.length=50", "train.epochs=16"),
    "ml-1m": ("model.length=100", "train.epochs=4"),
}
LOGS = {log.name: log for log in (SHOP, BEAUTY, ML_1M)}


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to train."""

    name: str
    what: str
    recipe: str = "pinnerformer"
    set: tuple[str, ...] = ()


ARMS = (
    Arm("dense", "dense all-action, 28 days; answers of the batch and uniform, log q"),
    Arm("all", "all-action, 28 days", set=("objective.task=all-action",)),
    Arm("next", "next action", set=("objective.task=next-action",)),
    Arm(
        "answers",
        "dense; answers of the batch alone, log q",
        set=("objective.sampler=targets", "objective.sampler.negatives=1024"),
    ),
    Arm("uniform", "dense; uniform alone", set=("objective.sampler=uniform", "objective.sampler.negatives=1024")),
    # With the learning rate of the others: the recipe's own needs many more epochs.
    Arm("sasrec", "SASRec, full softmax", recipe="sasrec", set=("train.learning_rate=2e-3", "train.decay=1.0")),
)


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim of the paper about two arms: the first has more, or loses less."""

    text: str
    ours: str
    theirs: str
    paper: str
    fall: bool = False

    @property
    def side(self) -> Literal["more", "less"]:
        return "less" if self.fall else "more"


CLAIMS = (
    Claim("dense all-action over all-action", "dense", "all", ".229 and .224"),
    Claim("all-action over next action", "all", "next", ".224 and .186"),
    Claim("dense all-action over next action", "dense", "next", ".229 and .186"),
    Claim("mixed negatives over those of the batch alone", "dense", "answers", ".229 and .167"),
    Claim("mixed negatives over uniform ones alone", "dense", "uniform", ".229 and .139"),
    Claim(
        "lost in 14 days: dense less than SASRec", "dense", "sasrec", "8.3 % and 13.9 %, realtime to stale", fall=True
    ),
)


@dataclass(frozen=True, slots=True, eq=False)
class Measurement:
    """The evaluations of an arm's seeds, over the same users."""

    plain: list[WindowEvaluation]
    aged: list[WindowEvaluation]
    minutes: float

    def values(self, age: float | None = None, measure: str = RECALL) -> np.ndarray:
        """A metric of each user, averaged over the seeds; at an age, of the users with a history at every age."""
        if age is None:
            return averaged([one.values[0][measure] for one in self.plain])
        return averaged([one.values[age][measure] for one in self.aged])

    def figure(self, name: str) -> float:
        """A metric of the reports, averaged over the seeds."""
        return float(np.mean([one.report.metrics[name] for one in self.plain]))

    def aged_figure(self, name: str, age: float) -> float:
        """The same at an age, of the users with a history at every age."""
        return float(np.mean([at.metrics[name] for one in self.aged for at in one.report.ages if at.days == age]))


@resumable()
def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench window", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, help="folder of the log, for all but the shop")
    parser.add_argument("--log", choices=LOGS, default="shop")
    parser.add_argument("--only", help="an arm, or ARM-SEED, to train; the table is made of what is there")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "segue-results")
    options = parser.parse_args(argv)
    log = LOGS[options.log]
    selected = select_trainings(trainings(log.name, ARMS, options.seeds), options.only)
    data = prepared(log, options.data, options.cache)
    for one in selected:
        with Display() as display:
            trained(one, data, options.cache, display.step)
    evaluations = {arm.name: read_arm(log.name, arm, options.seeds, data, options.cache) for arm in ARMS}
    arms = {name: arm for name, arm in evaluations.items() if arm is not None}
    if not arms:
        print_error("Nothing to show yet: expected an arm with runs of all its seeds. Train them without --only.")
        return
    baselines = _baselines(log.name, next(iter(arms)), options.seeds[0], data, options.cache)
    show(log, arms, baselines, seeds=options.seeds)


def trainings(log: str, arms: Sequence[Arm], seeds: Sequence[int]) -> list[Training]:
    """Every training of a log, seed after seed, so that the first table is complete early."""
    rows = [
        Row(
            name=f"window-{log}/{arm.name}",
            log=log,
            recipe=arm.recipe,
            set=(*arm.set, *OF_LOG[log], *COMMON),
            seeds=SEEDS,
        )
        for arm in arms
    ]
    return [Training(row, seed) for seed in seeds for row in rows]


def read_arm(log: str, arm: Arm, seeds: Sequence[int], data: api.Data, cache: Path) -> Measurement | None:
    """An arm over all of its seeds, None while one is missing."""
    runs = [run_folder(one, data, cache) for one in trainings(log, [arm], seeds)]
    if not all(run.exists() for run in runs):
        return None
    seconds = [sum(read_manifest(run, "run")["training"]["seconds"]) for run in runs]
    return Measurement(
        plain=[_evaluated(run, data, (0,)) for run in runs],
        aged=[_evaluated(run, data, AGES) for run in runs],
        minutes=float(np.mean(seconds)) / 60,
    )


def _evaluated(run: Path, data: api.Data, ages: Sequence[float], *, baselines: bool = False) -> WindowEvaluation:
    recommender = Recommender.open(run)
    settings = settings_of(recommender)
    return measure_window(recommender.model, data, settings, days=DAYS, ages=ages, baselines=baselines)


def _baselines(log: str, arm: str, seed: int, data: api.Data, cache: Path) -> WindowEvaluation:
    """The baselines, which are the same for every arm."""
    (one,) = trainings(log, [each for each in ARMS if each.name == arm], [seed])
    return _evaluated(run_folder(one, data, cache), data, (0,), baselines=True)


def show(log: CutLog, arms_found: dict[str, Measurement], baselines: WindowEvaluation, *, seeds: Sequence[int]) -> None:
    """Print and write the tables: the arms, their ages, and the claims of the paper."""
    report = baselines.report
    arms, ages, claims = arm_rows(arms_found, baselines), age_rows(arms_found), claim_rows(arms_found)
    notes = [
        f"Cut {log.cut}: {report.users:,} users with a history, {report.targets:,} items met in the {DAYS} days after "
        f"it ({report.unknown:,} of them unknown to training, misses); {report.items:,} items, seen items "
        f"{report.seen}, trained on events before {report.trained_before}. Means of the seeds "
        f"{', '.join(map(str, seeds))}; 95 %: seeds averaged, users resampled.",
    ]
    tables = {name: rows for name, rows in (("arms", arms), ("ages", ages), ("claims", claims)) if rows}
    print_line("\n".join([log.title, *notes, *_separated(tables, plain), ""]))
    written(f"window-{log.name}", rows=arms, notes=notes, body=tables)
    write_section(DOCUMENT, f"window {log.name}", [*notes, *_separated(tables, markdown)])


def _separated(
    tables: dict[str, list[dict[str, str]]], lines_of: Callable[[Sequence[Mapping[str, str]]], list[str]]
) -> list[str]:
    """The lines of every table, with an empty one before each."""
    return [line for rows in tables.values() for line in ("", *lines_of(rows))]


def arm_rows(arms: dict[str, Measurement], baselines: WindowEvaluation) -> list[dict[str, str]]:
    """A row for each arm and each baseline, with coverage."""
    rows = []
    for arm in ARMS:
        if (measurement := arms.get(arm.name)) is None:
            continue
        low, high = mean_interval(measurement.values(), measurement.plain[0].users)
        seeds = [one.report.metrics[RECALL] for one in measurement.plain]
        figures = {
            name: measurement.figure(f"{name}@{DEPTH}") for name in ("recall", "hit", "p90_coverage", "coverage")
        }
        interval = f"{figure(low)} – {figure(high)}"
        rows.append(_row(f"{arm.name}: {arm.what}", figures, interval, f"{figure(min(seeds))} – {figure(max(seeds))}"))
        rows[-1]["minutes"] = f"{measurement.minutes:.1f}"
    for name, metrics in baselines.report.baselines.items():
        figures = {one: metrics[f"{one}@{DEPTH}"] for one in ("recall", "hit", "p90_coverage", "coverage")}
        low, high = baselines.report.baseline_intervals[name][RECALL]
        rows.append(_row(name, figures, f"{figure(low)} – {figure(high)}", "–") | {"minutes": "–"})
    return rows


def _row(name: str, figures: dict[str, float], interval: str, seeds: str) -> dict[str, str]:
    cells = {f"{one}@{DEPTH}": figure(value) for one, value in figures.items()}
    return {"": name, **cells, f"95 % of {RECALL}": interval, "seeds": seeds}


def age_rows(arms: dict[str, Measurement]) -> list[dict[str, str]]:
    """How recall falls with the age of the embedding, for the arms of the freshness claim, and their coverage."""
    rows, metric = [], f"p90_coverage@{DEPTH}"
    for name in ("dense", "next", "sasrec"):
        if (measurement := arms.get(name)) is None:
            continue
        means = {age: float(measurement.values(age).mean()) for age in AGES}
        cells = {f"{age} d": figure(mean) for age, mean in means.items()}
        cells |= {"lost by 14 d": f"{1 - means[14] / means[0]:.1%}"}
        cells |= {f"{metric} at {age} d": figure(measurement.aged_figure(metric, age)) for age in (AGES[0], AGES[-1])}
        rows.append({RECALL + " at age": name, **cells})
    return rows


def claim_rows(arms: dict[str, Measurement]) -> list[dict[str, str]]:
    """The paper's claims and the differences measured here, for every pair of arms with runs."""
    rows = []
    for claim in CLAIMS:
        if claim.ours in arms and claim.theirs in arms:
            change = claim_difference(claim, arms[claim.ours], arms[claim.theirs])
            template = "{:+.1%}" if claim.fall else "{:+.4f}"
            value, low, high = (template.format(number) for number in (change.value, change.low, change.high))
            rows.append(
                {
                    "claim": claim.text,
                    "the paper's figures": claim.paper,
                    "difference here": value,
                    "95 %": f"{low} – {high}",
                    "so": verdict(change, paper=claim.side),
                }
            )
    return rows


def claim_difference(claim: Claim, ours: Measurement, theirs: Measurement) -> Difference:
    """The first arm minus the second: in recall, or in the share of it that is lost by the greatest age."""
    if not claim.fall:
        return difference(ours.values(), theirs.values(), ours.plain[0].users)
    first, last = AGES[0], AGES[-1]
    users = ours.aged[0].users
    ours_values, theirs_values = ((arm.values(first), arm.values(last)) for arm in (ours, theirs))
    return difference_of_losses(ours_values, theirs_values, users)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except SegueError as error:
        sys.exit(f"bench: {error}")
