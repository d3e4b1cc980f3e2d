"""The reports of an evaluation by next event and by window, as JSON and as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from segue.data.split import SplitPart, Target
from segue.evaluation.metrics import RelativeLoss, summary
from segue.evaluation.settings import SeenRule
from segue.evaluation.verdict import Verdict

REPORT = "metrics.json"  # the file of a run
HISTORY_EDGES = (0, 1, 5, 10, 20, 50, 100, 200)  # a slice starts at its edge and ends before the next
POPULARITY_EDGES = (0, 1, 5, 20, 100, 500, 2000)
USUAL_DEPTH = 10  # the depth tables show first


class Slice(msgspec.Struct, frozen=True):
    """The metrics of some of the cases."""

    name: str
    cases: int
    metrics: dict[str, float]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one scorer and of the baselines on one part of the data."""

    split: Literal["last", "time"]
    part: SplitPart
    target: Target
    cases: int
    items: int
    ties: Literal["pessimistic"] = "pessimistic"
    seen: SeenRule
    repeats: float
    """Share of the validation targets that occur in their history, by which `seen` is chosen."""
    unreachable: int
    """Cases whose target the seen filter excludes: misses."""
    unknown: int
    """Cases whose target was unseen in training and has no known content: misses."""
    without_history: int
    """Cases without any earlier event, which are ranked by popularity."""
    target_time: bool
    metrics: dict[str, float]
    """hit, ndcg, mrr, coverage (share of the catalogue shown to anybody) and popularity (mean training events of the
    items shown), each at every depth."""
    intervals: dict[str, tuple[float, float]]
    """95 % intervals, users resampled."""
    baselines: dict[str, dict[str, float]]
    baseline_intervals: dict[str, dict[str, tuple[float, float]]]
    baseline_notes: dict[str, str]
    slices: dict[str, list[Slice]]
    """By `history` (events before the target) and `popularity` (training events of the target). If any target is cold
    (unseen in training), also by `target`: warm or cold."""
    note: str | None = None
    verdict: Verdict | None = None
    """By ndcg at the depth that tables show first. None in reports of earlier versions."""

    @property
    def ranks_cold(self) -> bool:
        """Whether some cold targets were candidates, so that tables show warm and cold targets separately."""
        cold = [part.cases for part in self.slices.get("target", []) if part.name == "cold"]
        return bool(cold) and cold[0] > self.unknown

    @property
    def depths(self) -> list[int]:
        return depths_of(self.metrics)


class TargetPart(msgspec.Struct, frozen=True, kw_only=True):
    """The warm or the cold targets (unseen in training), over the users with any of them."""

    name: Literal["warm", "cold"]
    users: int
    targets: int
    metrics: dict[str, float]
    """recall and hit of the model at age 0, each at every depth."""


class Age(msgspec.Struct, frozen=True, kw_only=True):
    """The same users and targets, with histories that end so many days before the split."""

    days: float
    history_before: str
    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    fall: dict[str, RelativeLoss]
    """By recall@k: the share of the recall at age 0 that is lost."""


class WindowReport(msgspec.Struct, frozen=True, kw_only=True):
    """The results over the days after the split; `segue.evaluation.window` defines the metrics."""

    split_time: str
    days: float
    trained_before: str
    """The end of the training part. Validation, which chose the epoch, is between it and the split."""
    users: int
    targets: int
    """Distinct items of the window, summed over the users."""
    items: int
    ties: Literal["pessimistic"] = "pessimistic"
    seen: SeenRule
    repeats: float
    """Share of the validation targets that occur in their history, by which `seen` is chosen."""
    unreachable: int
    """Targets that the seen filter excludes: misses."""
    unknown: int
    """Targets that were unseen in training and have no known content: misses."""
    metrics: dict[str, float]
    """Of the model at age 0: recall, hit, coverage, p90_coverage and, with `evaluate.interest`, entropy, each at every
    depth."""
    intervals: dict[str, tuple[float, float]]
    """95 % intervals, users resampled."""
    by_target: list[TargetPart]
    """The warm targets, then the cold ones; a part without targets is left out."""
    baselines: dict[str, dict[str, float]]
    baseline_intervals: dict[str, dict[str, tuple[float, float]]]
    baseline_notes: dict[str, str]
    ages: list[Age]
    """The model at every age, age 0 first."""
    verdict: Verdict | None = None
    """By recall at age 0, at the depth that tables show first; without a shortcut."""

    @property
    def depths(self) -> list[int]:
        return depths_of(self.metrics)


def depths_of(metrics: Iterable[str]) -> list[int]:
    """The depths of some metrics, ascending."""
    return sorted(int(name.removeprefix("hit@")) for name in metrics if name.startswith("hit@"))


def nearest_depth(depths: Sequence[int]) -> int:
    """The depth that tables show first: 10, or the nearest to it."""
    return min(depths, key=lambda k: abs(k - USUAL_DEPTH))


def slices(sizes: np.ndarray, ranks: np.ndarray, edges: Sequence[int], ks: Sequence[int]) -> list[Slice]:
    """Cases by the interval of their size; empty intervals are left out."""
    which = np.digitize(sizes, edges) - 1
    names = [*(str(a) if b == a + 1 else f"{a}–{b - 1}" for a, b in pairwise(edges)), f"{edges[-1]}+"]
    return [
        Slice(name=names[index], cases=int(inside.sum()), metrics=summary(ranks[inside], ks))
        for index in range(len(edges))
        if (inside := which == index).any()
    ]


def warm_and_cold(cold: np.ndarray, ranks: np.ndarray, ks: Sequence[int]) -> list[Slice]:
    """Cases with warm and with cold targets; an empty slice is left out."""
    return [
        Slice(name=name, cases=int(inside.sum()), metrics=summary(ranks[inside], ks))
        for name, inside in (("warm", ~cold), ("cold", cold))
        if inside.any()
    ]


def stored_verdict(run: Path) -> Verdict | None:
    """Whether a run is better than the simple methods, by its report; None if it has none, or an early one."""
    path = run / REPORT
    return msgspec.json.decode(path.read_bytes(), type=Report).verdict if path.exists() else None


def table(report: Report | WindowReport) -> str:
    """The report for a terminal: verdict, protocol, the model and the baselines, then what else was measured."""
    k, main = nearest_depth(report.depths), "ndcg" if isinstance(report, Report) else "recall"
    names = [name.partition("@")[0] for name in report.metrics if name.endswith(f"@{k}")]
    rows = [["", *(f"{name}@{k}" for name in names), f"95 % of {main}@{k}"]]
    spreads = {"model": report.intervals, **report.baseline_intervals}
    for scorer, metrics in {"model": report.metrics, **report.baselines}.items():
        rows.append([scorer, *figures(metrics, names, k), interval_text(spreads.get(scorer, {}).get(f"{main}@{k}"))])
    others = [[str(depth), *figures(report.metrics, names, depth)] for depth in report.depths]
    verdict = [] if report.verdict is None else [*report.verdict.sentences, ""]
    lines = [*verdict, *protocol(report), "", *aligned(rows), "", "The model at every depth:"]
    lines += [*aligned([["depth", *names], *others]), *_warm_and_cold(report, k)]
    if isinstance(report, WindowReport):
        lines += _freshness(report, k) if len(report.ages) > 1 else []
    elif report.note is not None:
        lines += ["", report.note]
    return "\n".join(lines)


def _warm_and_cold(report: Report | WindowReport, k: int) -> list[str]:
    if isinstance(report, WindowReport):
        names, head = ("recall", "hit"), ["", "users", "targets", f"recall@{k}", f"hit@{k}"]
        rows = [
            [part.name, f"{part.users:,}", f"{part.targets:,}", *figures(part.metrics, names, k)]
            for part in report.by_target
        ]
        cold = any(part.name == "cold" for part in report.by_target)
    else:
        metrics, head = ("hit", "ndcg", "mrr"), ["", "cases", f"hit@{k}", f"ndcg@{k}", f"mrr@{k}"]
        parts = report.slices.get("target", [])
        rows = [[part.name, f"{part.cases:,}", *figures(part.metrics, metrics, k)] for part in parts]
        cold = report.ranks_cold
    return ["", "Warm targets, and cold ones, which are unseen in training:", *aligned([head, *rows])] if cold else []


def _freshness(report: WindowReport, k: int) -> list[str]:
    rows = [["age in days", f"recall@{k}", f"p90_coverage@{k}", "lost since age 0", "95 %"]]
    for age in report.ages:
        fall = age.fall[f"recall@{k}"]
        between = "" if fall.low is None or fall.high is None else f"{fall.low:.1%} … {fall.high:.1%}"
        lost = "" if fall.value is None else f"{fall.value:.1%}"
        rows.append([f"{age.days:g}", *figures(age.metrics, ("recall", "p90_coverage"), k), lost, between])
    return ["", "The same users and targets as embeddings age:", *aligned(rows)]


def protocol(report: Report | WindowReport) -> list[str]:
    """The evaluation protocol, as sentences."""
    rules = (
        f"ranked among {report.items:,} items; ties count against the scorer. Seen items are {report.seen}: "
        f"{report.repeats:.1%} of the validation targets are repeats."
    )
    if isinstance(report, WindowReport):
        lines = [
            f"{report.users:,} users with a history before {report.ages[-1].history_before} and {report.targets:,} "
            f"items of their events in the {report.days:g} days after {report.split_time}, {rules} Trained on events "
            f"before {report.trained_before}."
        ]
    else:
        lines = [f"{report.cases:,} cases of the {report.part} part (--split {report.split}), {rules}"]
    if report.unreachable:
        lines.append(f"{report.unreachable:,} targets are seen items, which were excluded: counted as misses.")
    if report.unknown:
        lines.append(f"{report.unknown:,} targets never occur in training: counted as misses.")
    if isinstance(report, Report) and report.without_history:
        lines.append(f"{report.without_history:,} cases have no history and were ranked by popularity.")
    if isinstance(report, Report) and report.target_time:
        lines.append("The model was given the target's timestamp; compare it only with models that were given it, too.")
    return lines


def figures(metrics: Mapping[str, float], names: Iterable[str], k: int) -> list[str]:
    """The cells of some metrics at depth k. Popularity is a count, all other metrics are shares."""
    values = {name: metrics[f"{name}@{k}"] for name in names}
    return [f"{value:,.0f}" if name == "popularity" else f"{value:.4f}" for name, value in values.items()]


def interval_text(interval: tuple[float, float] | None) -> str:
    return "" if interval is None else f"{interval[0]:.4f} … {interval[1]:.4f}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines; the first column is aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
        ).rstrip()
        for row in rows
    ]
