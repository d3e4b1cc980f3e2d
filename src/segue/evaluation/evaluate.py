"""A scorer and the data → the report: the scorer among the baselines, all by one evaluator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np

from segue.data.sequences import Sequences
from segue.data.split import Cases, Part, Split
from segue.errors import InputError
from segue.evaluation.baselines import BASELINES
from segue.evaluation.evaluator import Evaluator, Measured, Scorer
from segue.evaluation.metrics import coverage, intervals, mean_popularity, summary, totals
from segue.evaluation.ranks import MISS
from segue.evaluation.report import HISTORY_EDGES, POPULARITY_EDGES, Report, Slice, slices, warm_and_cold
from segue.evaluation.settings import EvaluateSettings, seen_rule
from segue.evaluation.training_counts import training_counts
from segue.process_group import SINGLE_PROCESS, ProcessGroup

Progress = Callable[[str, int, int], None]
"""Told who is measured, how many cases are done, and of how many."""


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """The report, and the ranks behind it in the order of `split.cases(part, target)`."""

    report: Report
    ranks: np.ndarray  # [C] int64, MISS where the target was no candidate


def evaluate(
    scorer: Scorer,
    sequences: Sequences,
    split: Split,
    *,
    n_items: int,
    settings: EvaluateSettings,
    split_kind: Literal["last", "time"] = "last",
    part: Part = "test",
    target_time: bool = False,
    answerable: Callable[[np.ndarray], np.ndarray] | None = None,
    baselines: bool = True,
    note: str | None = None,
    progress: Progress | None = None,
    rng: np.random.Generator | None = None,
    group: ProcessGroup = SINGLE_PROCESS,
) -> Evaluation:
    """Measure the scorer, and with it the baselines, on one part of the data.

    `answerable`: by the items' training events [V + 1], which of them the scorer can answer and read [V + 1]; without
    it, those that have any. All are ranked among these, the baselines with them, who read what was trained on.
    `rng` draws the resamples of the intervals; without it they are the same every time. `group`: the processes that
    share the cases; the report is that of one, and each of them has it.
    """
    cases, ks = _cases(split, part, settings), sorted(set(settings.at))
    rule, repeats = seen_rule(settings, sequences, split)
    counts = training_counts(sequences, split, n_items)
    known = counts > 0 if answerable is None else answerable(counts)
    evaluator = Evaluator(
        sequences=sequences, counts=counts, seen=rule, target_time=target_time, answerable=known, group=group
    )
    rng = np.random.default_rng(0) if rng is None else rng
    measured = _measure(replace(evaluator, readable=known), "model", scorer, cases, ks, progress)
    spread = partial(_intervals, ks=ks, users=cases.users, samples=settings.bootstrap, rng=rng)
    model_spread = spread(measured)
    figures, spreads, notes = {}, {}, {}
    for name, fit in BASELINES.items() if baselines else ():
        baseline = fit(sequences, split, n_items)
        theirs = _measure(evaluator, name, baseline, cases, ks, progress)
        figures[name], spreads[name], notes[name] = (
            _metrics(theirs, evaluator.counts, ks),
            spread(theirs),
            baseline.note,
        )

    targets = sequences.items[cases.targets]
    unknown = ~known[targets]
    report = Report(
        split=split_kind,
        part=part,
        target=settings.target,
        cases=len(cases),
        items=n_items,
        seen=rule,
        repeats=repeats,
        unreachable=int(((measured.ranks == MISS) & ~unknown).sum()),
        unknown=int(unknown.sum()),
        without_history=int((cases.targets == cases.starts).sum()),
        target_time=target_time,
        metrics=_metrics(measured, evaluator.counts, ks),
        intervals=model_spread,
        baselines=figures,
        baseline_intervals=spreads,
        baseline_notes=notes,
        slices=_slices(cases, evaluator.counts[targets], measured.ranks, ks),
        note=note,
    )
    return Evaluation(report=report, ranks=measured.ranks)


def _cases(split: Split, part: Part, settings: EvaluateSettings) -> Cases:
    cases = split.cases(part, settings.target)
    if not len(cases):
        raise InputError(
            f"The {part} part has no cases, so there is nothing to measure: with --split last a user needs three "
            "events, with --split time:WHEN there must be events from WHEN on. Prepare the data with another --split."
        )
    return cases


def _measure(
    evaluator: Evaluator, name: str, scorer: Scorer, cases: Cases, ks: Sequence[int], progress: Progress | None
) -> Measured:
    return evaluator.measure(scorer, cases, ks, progress=None if progress is None else partial(progress, name))


def _metrics(measured: Measured, counts: np.ndarray, ks: Sequence[int]) -> dict[str, float]:
    figures = summary(measured.ranks, ks)
    figures |= {f"coverage@{k}": coverage(measured.shown[k]) for k in ks}
    return figures | {f"popularity@{k}": mean_popularity(measured.shown[k], counts) for k in ks}


def _intervals(
    measured: Measured, *, ks: Sequence[int], users: np.ndarray, samples: int, rng: np.random.Generator
) -> dict[str, tuple[float, float]]:
    return intervals(totals(measured.ranks, ks, users), samples=samples, rng=rng)


def _slices(cases: Cases, popularity: np.ndarray, ranks: np.ndarray, ks: Sequence[int]) -> dict[str, list[Slice]]:
    found = {
        "history": slices(cases.targets - cases.starts, ranks, HISTORY_EDGES, ks),
        "popularity": slices(popularity, ranks, POPULARITY_EDGES, ks),
    }
    cold = popularity == 0
    return found | {"target": warm_and_cold(cold, ranks, ks)} if cold.any() else found
