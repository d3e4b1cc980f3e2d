"""The report of an evaluation, as JSON and as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from segue.data.split import SplitPart, Target
from segue.evaluation.metrics import summary
from segue.evaluation.settings import SeenRule

HISTORY_EDGES = (0, 1, 5, 10, 20, 50, 100, 200)  # a slice holds its edge and ends before the next
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

    @property
    def ranks_cold(self) -> bool:
        """Whether some cold targets were candidates, so that warm and cold are worth reporting apart."""
        cold = [part.cases for part in self.slices.get("target", []) if part.name == "cold"]
        return bool(cold) and cold[0] > self.unknown

    @property
    def depths(self) -> list[int]:
        """The depths measured, in order."""
        return sorted(int(name.removeprefix("hit@")) for name in self.metrics if name.startswith("hit@"))

    @property
    def depth(self) -> int:
        """The depth that tables show first."""
        return nearest_depth(self.depths)


def nearest_depth(depths: Sequence[int]) -> int:
    """10, or the nearest depth to it."""
    return min(depths, key=lambda k: abs(k - USUAL_DEPTH))


def slices(sizes: np.ndarray, ranks: np.ndarray, edges: Sequence[int], ks: Sequence[int]) -> list[Slice]:
    """Cases by the interval of their size; empty intervals are left out."""
    which = np.digitize(sizes, edges) - 1
    return [
        Slice(name=_between(edges, index), cases=int(inside.sum()), metrics=summary(ranks[inside], ks))
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


def _between(edges: Sequence[int], index: int) -> str:
    if index == len(edges) - 1:
        return f"{edges[index]}+"
    last = edges[index + 1] - 1
    return str(last) if last == edges[index] else f"{edges[index]}–{last}"


def table(report: Report) -> str:
    """The report for a terminal: the protocol, then the model and the baselines."""
    k = report.depth
    names = [f"{name}@{k}" for name in ("hit", "ndcg", "mrr", "coverage", "popularity")]
    measured = [("model", report.metrics, report.intervals)]
    measured += [(name, metrics, report.baseline_intervals.get(name, {})) for name, metrics in report.baselines.items()]
    rows = [["", *names, f"95 % of ndcg@{k}"]]
    for who, metrics, spread in measured:
        figures = (figure(name, metrics[name]) for name in names)
        rows.append([who, *figures, interval_text(spread.get(f"ndcg@{k}"))])
    others = [["depth", "hit", "ndcg", "mrr", "coverage", "popularity"]]
    for depth in report.depths:
        of_depth = (f"{name}@{depth}" for name in others[0][1:])
        others.append([str(depth), *(figure(name, report.metrics[name]) for name in of_depth)])
    parts = [*protocol(report), "", *aligned(rows), "", "The model at every depth:", *aligned(others)]
    if report.ranks_cold:
        parts += ["", "Warm targets, and cold ones, which are unseen in training:", *aligned(_by_target(report, k))]
    return "\n".join(parts + ([] if report.note is None else ["", report.note]))


def _by_target(report: Report, k: int) -> list[list[str]]:
    names = [f"{name}@{k}" for name in ("hit", "ndcg", "mrr")]
    rows = [
        [part.name, f"{part.cases:,}", *(figure(name, part.metrics[name]) for name in names)]
        for part in report.slices["target"]
    ]
    return [["", "cases", *names], *rows]


def protocol(report: Report) -> list[str]:
    """How it was measured, as sentences."""
    lines = [
        f"{report.cases:,} cases of the {report.part} part (--split {report.split}), ranked among {report.items:,} "
        f"items; ties count against the scorer. Seen items are {report.seen}: {report.repeats:.1%} of the "
        "validation targets are repeats."
    ]
    if report.unreachable:
        lines.append(f"{report.unreachable:,} targets are seen items, which were excluded: counted as misses.")
    if report.unknown:
        lines.append(f"{report.unknown:,} targets never occur in training: counted as misses.")
    if report.without_history:
        lines.append(f"{report.without_history:,} cases have no history and were ranked by popularity.")
    if report.target_time:
        lines.append("The model was given the target's timestamp; compare it only with models that were given it, too.")
    return lines


def figure(name: str, value: float) -> str:
    """Popularity is a count, all other metrics are shares."""
    return f"{value:,.0f}" if name.startswith("popularity") else f"{value:.4f}"


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
