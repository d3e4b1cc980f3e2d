"""A scorer and a log → the report on the scorer and the baselines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from segue.data.split import Cases, SplitPart
from segue.errors import InputError
from segue.evaluation.baselines import BASELINES
from segue.evaluation.evaluator import Evaluator, Measurement, Scorer
from segue.evaluation.metrics import coverage, intervals, mean_popularity, ndcg, rank_totals, summary
from segue.evaluation.ranks import MISS
from segue.evaluation.report import (
    HISTORY_EDGES,
    POPULARITY_EDGES,
    Report,
    Slice,
    nearest_depth,
    slices,
    warm_and_cold,
)
from segue.evaluation.settings import EvaluateSettings, seen_rule
from segue.evaluation.split_log import SplitLog
from segue.evaluation.verdict import Verdict, judge
from segue.process_group import SINGLE_PROCESS, ProcessGroup

EvaluationProgress = Callable[[str, int, int], None]
"""Progress: called with the name of the scorer, the number of cases measured, and of all cases."""


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """The report, and its ranks in the order of `split.cases(part, target)`."""

    report: Report
    ranks: np.ndarray  # [C] int64, MISS where the target was no candidate


def evaluate(
    scorer: Scorer,
    log: SplitLog,
    *,
    settings: EvaluateSettings,
    part: SplitPart = "test",
    target_time: bool = False,
    answerable: Callable[[np.ndarray], np.ndarray] | None = None,
    baselines: bool = True,
    note: str | None = None,
    progress: EvaluationProgress | None = None,
    group: ProcessGroup = SINGLE_PROCESS,
) -> Evaluation:
    """Measure the scorer and the baselines on one part of the log.

    `answerable`: the items' training events [V + 1] → the items that the scorer can rank and read [V + 1] bool; by
    default those with any. The baselines rank the same items and read those with training events. `group`: the
    processes that share the cases; all of them get the report.
    """
    cases, ks = log.split.cases(part, settings.target), sorted(set(settings.at))
    if not len(cases):
        raise InputError(
            f"The {part} part has no cases, so there is nothing to measure: with --split last a user needs three "
            "events, with --split time:WHEN there must be events from WHEN on. Prepare the data with another --split."
        )
    rule, repeats = seen_rule(settings, log.sequences, log.split)
    counts = log.training_counts
    known = counts > 0 if answerable is None else answerable(counts)
    evaluator = Evaluator(
        sequences=log.sequences, counts=counts, seen=rule, target_time=target_time, answerable=known, group=group
    )
    rng = np.random.default_rng(0)  # the same resamples every time

    def measure(by: Evaluator, name: str, scorer: Scorer) -> tuple[Measurement, dict[str, tuple[float, float]]]:
        measured = by.measure(scorer, cases, ks, progress=None if progress is None else partial(progress, name))
        return measured, intervals(rank_totals(measured.ranks, ks, cases.users), samples=settings.bootstrap, rng=rng)

    measured, model_intervals = measure(replace(evaluator, readable=known), "model", scorer)
    metrics, spreads, notes, ranks = {}, {}, {}, {}
    for name, fit in BASELINES.items() if baselines else ():
        baseline = fit(log)
        theirs, spreads[name] = measure(evaluator, name, baseline)
        metrics[name], notes[name], ranks[name] = _metrics(theirs, counts, ks), baseline.note, theirs.ranks

    targets = log.sequences.items[cases.targets]
    unknown = ~known[targets]
    report = Report(
        split=log.kind,
        part=part,
        target=settings.target,
        cases=len(cases),
        items=log.n_items,
        seen=rule,
        repeats=repeats,
        unreachable=int(((measured.ranks == MISS) & ~unknown).sum()),
        unknown=int(unknown.sum()),
        without_history=int((cases.targets == cases.starts).sum()),
        target_time=target_time,
        metrics=_metrics(measured, counts, ks),
        intervals=model_intervals,
        baselines=metrics,
        baseline_intervals=spreads,
        baseline_notes=notes,
        slices=_slices(cases, counts[targets], measured.ranks, ks),
        note=note,
        verdict=_verdict(measured.ranks, ranks, cases, log, settings, rng),
    )
    return Evaluation(report=report, ranks=measured.ranks)


def _verdict(
    ranks: np.ndarray,
    baselines: Mapping[str, np.ndarray],
    cases: Cases,
    log: SplitLog,
    settings: EvaluateSettings,
    rng: np.random.Generator,
) -> Verdict:
    """Judge the model by its ranks [C] and those of the baselines."""
    k = nearest_depth(sorted(settings.at))
    return judge(
        f"ndcg@{k}",
        ndcg(ranks, k),
        {name: ndcg(theirs, k) for name, theirs in baselines.items()},
        cases.users,
        samples=settings.bootstrap,
        rng=rng,
        explained=baselines["last-item"] <= k if "last-item" in baselines else None,
        by_time=log.kind == "time",
    )


def _metrics(measured: Measurement, counts: np.ndarray, ks: Sequence[int]) -> dict[str, float]:
    means = summary(measured.ranks, ks)
    means |= {f"coverage@{k}": coverage(measured.shown[k]) for k in ks}
    return means | {f"popularity@{k}": mean_popularity(measured.shown[k], counts) for k in ks}


def _slices(cases: Cases, popularity: np.ndarray, ranks: np.ndarray, ks: Sequence[int]) -> dict[str, list[Slice]]:
    by_kind = {
        "history": slices(cases.targets - cases.starts, ranks, HISTORY_EDGES, ks),
        "popularity": slices(popularity, ranks, POPULARITY_EDGES, ks),
    }
    cold = popularity == 0
    return by_kind | {"target": warm_and_cold(cold, ranks, ks)} if cold.any() else by_kind
