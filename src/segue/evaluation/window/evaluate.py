"""A scorer and a log → the report over the days after the split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np

from segue.data.batch import ragged_rows
from segue.data.split import Cases, first_at
from segue.data.timestamps import MICROSECONDS, iso_text
from segue.errors import SettingsError
from segue.evaluation.baselines import BASELINES
from segue.evaluation.evaluate import EvaluationProgress
from segue.evaluation.evaluator import CasesDone, Evaluator, Measurement, Scorer, top_items
from segue.evaluation.metrics import (
    RelativeLoss,
    coverage,
    entropies,
    hit,
    intervals,
    p90_coverage,
    relative_losses,
    times_shown,
    user_totals,
)
from segue.evaluation.ranks import MISS, Exclusions, ranks_within
from segue.evaluation.report import Age, TargetPart, WindowReport, nearest_depth
from segue.evaluation.settings import MOST_DAYS, EvaluateSettings, seen_rule
from segue.evaluation.split_log import SplitLog
from segue.evaluation.verdict import judge
from segue.evaluation.window.cases import DAY, Positive, WindowCases, held_out_window, split_window

Values = dict[str, np.ndarray]
"""Metric → its value for each user [C]."""


@dataclass(frozen=True, slots=True, eq=False)
class TargetWindow:
    """The days after the split to evaluate, the ages of the histories, and the events that are targets."""

    days: float
    ages: Sequence[float] = (0,)
    """Ages of the histories, in days."""
    positive: Positive | None = None
    """The events that are targets; by default all."""
    interest: np.ndarray | None = None
    """The category of each item [V + 1], 0 for none, for the entropy of lists."""


@dataclass(frozen=True, slots=True, eq=False)
class WindowEvaluation:
    """The report, and the model's metrics for each user at each age in days."""

    report: WindowReport
    users: np.ndarray  # [C] int64
    values: dict[float, Values]


def rank_targets(
    evaluator: Evaluator,
    scorer: Scorer,
    cases: WindowCases,
    ks: Sequence[int],
    *,
    time: int,
    interest: np.ndarray | None = None,
    progress: CasesDone | None = None,
) -> Measurement:
    """Rank every case's targets with the user's history before `time`, in microseconds.

    Ranks are exact up to the greatest depth, beyond it that depth + 1.
    """
    depth, sizes = max(ks), cases.sizes
    first = np.cumsum(sizes) - sizes
    ranks = np.zeros(len(cases.targets), dtype=np.int64)
    shown = {k: np.zeros(evaluator.n_items + 1, dtype=np.int64) for k in ks}
    entropy = {} if interest is None else {k: np.zeros(len(cases)) for k in ks}
    # A history ends before the user's first event from `time` on; there is one, as there are targets.
    histories = Cases(cases.users, cases.starts, first_at(evaluator.sequences, time)[cases.users])
    for chosen, batch in evaluator.batches(histories, progress=progress):
        batch = replace(batch, query_times=np.full(len(chosen), time // MICROSECONDS))
        seen = None
        if evaluator.seen == "excluded":  # items seen before the window, whatever the age of the history
            lengths = cases.ends[chosen] - cases.starts[chosen]
            items = evaluator.sequences.items[ragged_rows(cases.starts[chosen], lengths)]
            seen = Exclusions(rows=np.repeat(np.arange(len(chosen)), lengths), items=items.astype(np.int64))
        scores = evaluator.scores(scorer, batch, seen)
        rows, line = ragged_rows(first[chosen], sizes[chosen]), np.repeat(np.arange(len(chosen)), sizes[chosen])
        ranks[rows] = ranks_within(scores, line, cases.targets[rows], depth)
        lists = top_items(scores, depth)
        for k in ks:
            shown[k] += times_shown(lists, k, evaluator.n_items)
            if interest is not None:
                entropy[k][chosen] = entropies(interest[lists[:, :k]])
    total = evaluator.group.sum
    return Measurement(
        ranks=total(ranks),
        shown={k: total(times) for k, times in shown.items()},
        entropy={k: total(values) for k, values in entropy.items()},
    )


def user_values(cases: WindowCases, result: Measurement, ks: Sequence[int]) -> Values:
    """Every metric that is a mean over users, at every depth."""
    values: Values = {}
    for k in ks:
        hits = np.bincount(cases.owner, weights=hit(result.ranks, k), minlength=len(cases))
        values |= {f"recall@{k}": hits / cases.sizes, f"hit@{k}": (hits > 0).astype(np.float64)}
        values |= {f"entropy@{k}": result.entropy[k]} if result.entropy else {}
    return values


def by_target(cases: WindowCases, result: Measurement, counts: np.ndarray, ks: Sequence[int]) -> list[TargetPart]:
    """recall and hit over the warm and over the cold targets; `counts` [V + 1] are the items' training events."""
    cold, parts = counts[cases.targets] == 0, list[TargetPart]()
    names: dict[Literal["warm", "cold"], np.ndarray] = {"warm": ~cold, "cold": cold}
    for name, which in names.items():
        if which.any():
            some = cases.only(which)
            values = user_values(some, replace(result, ranks=result.ranks[which], entropy={}), ks)
            means = {metric: float(column.mean()) for metric, column in values.items()}
            parts.append(TargetPart(name=name, users=len(some), targets=len(some.targets), metrics=means))
    return parts


def evaluate_window(
    scorer: Scorer,
    log: SplitLog,
    window: TargetWindow,
    *,
    settings: EvaluateSettings,
    target_time: bool = False,
    answerable: Callable[[np.ndarray], np.ndarray] | None = None,
    baselines: bool = True,
    progress: EvaluationProgress | None = None,
) -> WindowEvaluation:
    """Measure the scorer on the window after the split at every age, and the baselines at age 0.

    `target_time` gives the scorer the time at which its history ends. `answerable` is as in `evaluate`.
    """
    if wrong := [age for age in window.ages if not 0 <= age <= MOST_DAYS]:
        raise SettingsError(f"--ages takes numbers of days from 0 to {MOST_DAYS}, got {wrong[0]:g}.")
    ages = sorted({0, *window.ages})  # with age 0, which every other one is compared with
    trained_until, time, _ = split_window(log.split, window.days)
    cases = held_out_window(log.sequences, log.split, window.days, age=max(ages), positive=window.positive)
    ks, (rule, repeats) = sorted(set(settings.at)), seen_rule(settings, log.sequences, log.split)
    counts = log.training_counts
    known = counts > 0 if answerable is None else answerable(counts)
    evaluator = Evaluator(sequences=log.sequences, counts=counts, seen=rule, target_time=target_time, answerable=known)
    resampling = _Resampling(cases.users, settings.bootstrap, np.random.default_rng(0))  # the same every time

    def measure(by: Evaluator, name: str, scorer: Scorer, at: int) -> Measurement:
        done = None if progress is None else partial(progress, name)
        return rank_targets(by, scorer, cases, ks, time=at, interest=window.interest, progress=done)

    reading = replace(evaluator, readable=known)
    aged = {age: measure(reading, "model", scorer, time - round(age * DAY)) for age in ages}
    values = {age: user_values(cases, result, ks) for age, result in aged.items()}
    main, metrics, spreads, notes, recalls = f"recall@{nearest_depth(ks)}", {}, {}, {}, {}
    for name, fit in BASELINES.items() if baselines else ():
        baseline = fit(log)
        result = measure(evaluator, name, baseline, time)
        theirs = user_values(cases, result, ks)
        recalls[name] = theirs[main]
        metrics[name], spreads[name], notes[name] = _metrics(theirs, result, ks), resampling(theirs), baseline.note
    unknown = ~known[cases.targets]
    report = WindowReport(
        split_time=iso_text(time),
        days=window.days,
        trained_before=iso_text(trained_until),
        users=len(cases),
        targets=len(cases.targets),
        items=log.n_items,
        seen=rule,
        repeats=repeats,
        unreachable=int(((aged[0].ranks == MISS) & ~unknown).sum()),
        unknown=int(unknown.sum()),
        metrics=_metrics(values[0], aged[0], ks),
        intervals=resampling(values[0]),
        by_target=by_target(cases, aged[0], counts, ks),
        baselines=metrics,
        baseline_intervals=spreads,
        baseline_notes=notes,
        ages=[
            Age(
                days=age,
                history_before=iso_text(time - round(age * DAY)),
                metrics=_metrics(values[age], aged[age], ks),
                intervals=resampling(values[age]),
                fall=resampling.recall_losses(values[age], values[0]),
            )
            for age in ages
        ],
        verdict=judge(
            main,
            values[0][main],
            recalls,
            cases.users,
            samples=settings.bootstrap,
            rng=resampling.rng,
            by_time=True,
        ),
    )
    return WindowEvaluation(report=report, users=cases.users, values=values)


def _metrics(values: Values, result: Measurement, ks: Sequence[int]) -> dict[str, float]:
    means = {name: float(column.mean()) for name, column in values.items()}
    means |= {f"coverage@{k}": coverage(result.shown[k]) for k in ks}
    return means | {f"p90_coverage@{k}": p90_coverage(result.shown[k]) for k in ks}


@dataclass(frozen=True, slots=True, eq=False)
class _Resampling:
    """The bootstrap over the users of the cases."""

    users: np.ndarray  # [C]
    samples: int
    rng: np.random.Generator

    def __call__(self, values: Values) -> dict[str, tuple[float, float]]:
        """The intervals of all metrics."""
        return intervals(user_totals(values, self.users), samples=self.samples, rng=self.rng)

    def recall_losses(self, values: Values, fresh: Values) -> dict[str, RelativeLoss]:
        """The share of the recall at age 0 that is lost."""
        ours, theirs = (
            user_totals({name: column for name, column in side.items() if name.startswith("recall@")}, self.users)
            for side in (values, fresh)
        )
        return relative_losses(ours, theirs, samples=self.samples, rng=self.rng)
