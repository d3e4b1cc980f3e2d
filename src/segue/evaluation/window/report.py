"""The report of an evaluation by window, as JSON and as a table for the terminal."""

from __future__ import annotations

from typing import Literal

import msgspec

from segue.evaluation.metrics import RelativeLoss
from segue.evaluation.report import aligned, interval_text, nearest_depth
from segue.evaluation.settings import SeenRule


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
    """Warm targets and cold ones apart; a part without targets is left out."""
    baselines: dict[str, dict[str, float]]
    baseline_intervals: dict[str, dict[str, tuple[float, float]]]
    baseline_notes: dict[str, str]
    ages: list[Age]
    """The model at every age, age 0 first."""

    @property
    def depths(self) -> list[int]:
        """The depths measured, in order."""
        return sorted(int(name.removeprefix("hit@")) for name in self.metrics if name.startswith("hit@"))


def window_table(report: WindowReport) -> str:
    """The report for a terminal: the protocol, the model and the baselines, and the model at every age."""
    k = nearest_depth(report.depths)
    names = [name.partition("@")[0] for name in report.metrics if name.endswith(f"@{k}")]
    rows = [["", *(f"{name}@{k}" for name in names), f"95 % of recall@{k}"]]
    spreads = {"model": report.intervals, **report.baseline_intervals}
    for who, metrics in {"model": report.metrics, **report.baselines}.items():
        figures = [f"{metrics[f'{name}@{k}']:.4f}" for name in names]
        rows.append([who, *figures, interval_text(spreads.get(who, {}).get(f"recall@{k}"))])
    others = [["depth", *names]] + [
        [str(depth), *(f"{report.metrics[f'{name}@{depth}']:.4f}" for name in names)] for depth in report.depths
    ]
    parts = [*_protocol(report), "", *aligned(rows), "", "The model at every depth:", *aligned(others)]
    parts += _warm_and_cold(report, k) if any(part.name == "cold" for part in report.by_target) else []
    return "\n".join([*parts, *(_freshness(report, k) if len(report.ages) > 1 else [])])


def _protocol(report: WindowReport) -> list[str]:
    """How it was measured, as sentences."""
    lines = [
        f"{report.users:,} users with a history before {report.ages[-1].history_before} and {report.targets:,} items "
        f"that they met in the {report.days:g} days after {report.split_time}, ranked among {report.items:,} items; "
        f"ties count against the scorer. Seen items are {report.seen}: {report.repeats:.1%} of the validation targets "
        f"are repeats. Trained on events before {report.trained_before}."
    ]
    if report.unreachable:
        lines.append(f"{report.unreachable:,} targets are seen items, which were excluded: counted as misses.")
    if report.unknown:
        lines.append(f"{report.unknown:,} targets never occur in training: counted as misses.")
    return lines


def _warm_and_cold(report: WindowReport, k: int) -> list[str]:
    rows = [["", "users", "targets", f"recall@{k}", f"hit@{k}"]]
    for part in report.by_target:
        figures = [f"{part.metrics[f'{name}@{k}']:.4f}" for name in ("recall", "hit")]
        rows.append([part.name, f"{part.users:,}", f"{part.targets:,}", *figures])
    return ["", "Warm targets, and cold ones, which are unseen in training:", *aligned(rows)]


def _freshness(report: WindowReport, k: int) -> list[str]:
    rows = [["age in days", f"recall@{k}", f"p90_coverage@{k}", "lost since age 0", "95 %"]]
    for age in report.ages:
        fall = age.fall[f"recall@{k}"]
        figures = [f"{age.metrics[f'{name}@{k}']:.4f}" for name in ("recall", "p90_coverage")]
        between = "" if fall.low is None or fall.high is None else f"{fall.low:.1%} … {fall.high:.1%}"
        rows.append([f"{age.days:g}", *figures, "" if fall.value is None else f"{fall.value:.1%}", between])
    return ["", "The same users and targets as embeddings age:", *aligned(rows)]
