"""Runs measured on the same cases → a comparison, with each run's paired difference to the first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from segue.errors import FolderError, SettingsError
from segue.evaluation.metrics import Difference, differences, rank_totals
from segue.evaluation.report import Report, aligned, figures, interval_text, nearest_depth, protocol

SAME = ("split", "part", "target", "cases", "items", "seen")  # keys of the report that must be equal
SAMPLES = 2000
METRICS = ("hit", "ndcg", "mrr", "coverage")


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredRun:
    """A run with its report and ranks."""

    name: str
    data: str
    """The digest of its data folder."""
    report: Report
    ranks: np.ndarray  # [C] int64
    history: Sequence[dict[str, Any]] = ()
    """One record for each epoch, as in history.jsonl: `epoch`, and `loss` and `ndcg@10` if they are known. These are of
    the model alone; report and ranks are with item-to-item counts, if the run has them."""


class ComparedRun(msgspec.Struct, frozen=True):
    name: str
    report: Report
    differences: dict[str, Difference]
    """This run minus the first; empty for the first."""
    history: list[dict[str, Any]]


class Comparison(msgspec.Struct, frozen=True):
    """Runs side by side; the first is the reference."""

    runs: list[ComparedRun]
    depths: list[int]
    notes: list[str]

    @property
    def depth(self) -> int:
        """The depth that tables show first."""
        return nearest_depth(self.depths)


def compare(runs: Sequence[MeasuredRun], *, users: np.ndarray | None = None, samples: int = SAMPLES) -> Comparison:
    """Compare runs; runs with other cases or another protocol are refused.

    `users` [C]: the user of each case. A user's cases are resampled together; without `users`, each case independently.
    """
    _check(runs)
    first = runs[0]
    depths = sorted(set.intersection(*(set(run.report.depths) for run in runs)))
    if not depths:
        raise SettingsError("The runs were measured at different depths; evaluate them again with the same --at.")
    rng = np.random.default_rng(0)  # the same resamples every time
    owners = np.arange(len(first.ranks)) if users is None else users
    totals = [rank_totals(run.ranks, depths, owners) for run in runs]
    compared = [
        ComparedRun(
            name=run.name,
            report=run.report,
            differences={} if run is first else differences(own, totals[0], samples=samples, rng=rng),
            history=list(run.history),
        )
        for run, own in zip(runs, totals, strict=True)
    ]
    notes = _notes(runs)
    if users is None and first.report.split == "time" and first.report.target == "each":
        notes.append("A user's cases were resampled independently, so the intervals of the differences are too narrow.")
    return Comparison(runs=compared, depths=depths, notes=notes)


def _check(runs: Sequence[MeasuredRun]) -> None:
    if not runs:
        raise SettingsError("There is nothing to compare; name at least one run.")
    first = runs[0]
    for run in runs:
        if run.data != first.data:
            raise FolderError(
                f"{run.name} and {first.name} were measured on different data (digests {run.data[:12]} and "
                f"{first.data[:12]}), so their metrics cannot be compared. Train both on one data folder."
            )
        for key in SAME:
            ours, theirs = getattr(run.report, key), getattr(first.report, key)
            if ours != theirs:
                raise SettingsError(
                    f"{run.name} has {key} = {ours} and {first.name} has {key} = {theirs}, so their ranks cannot be "
                    "compared. Evaluate both with the same settings."
                )
        if len(run.ranks) != run.report.cases:
            raise FolderError(
                f"{run.name} has {len(run.ranks)} ranks for {run.report.cases} cases: the folder is damaged. "
                "Make it again with `segue train`."
            )


def _notes(runs: Sequence[MeasuredRun]) -> list[str]:
    notes = protocol(msgspec.structs.replace(runs[0].report, target_time=False))
    timed = [run.name for run in runs if run.report.target_time]
    if timed and len(timed) < len(runs):
        notes.append(
            f"Not like for like: {', '.join(timed)} {'was' if len(timed) == 1 else 'were'} given the target's "
            "timestamp, the others were not. Part of the difference may come from that alone."
        )
    elif timed:
        notes.append("All of these models were given the target's timestamp.")
    return notes + [f"{run.name}: {run.report.note}" for run in runs if run.report.note]


def comparison_table(comparison: Comparison) -> str:
    """The comparison as a table for a terminal."""
    k = comparison.depth
    rows = [["", f"hit@{k}", f"ndcg@{k}", "95 %", f"mrr@{k}", f"coverage@{k}", "ndcg − first", "95 %", "p"]]
    for run in comparison.runs:
        hit, ndcg, mrr, coverage = figures(run.report.metrics, METRICS, k)
        mark = " (given the target time)" if run.report.target_time else ""
        spread = interval_text(run.report.intervals.get(f"ndcg@{k}"))
        changes = difference_cells(run.differences.get(f"ndcg@{k}"))
        rows.append([run.name + mark, hit, ndcg, spread, mrr, coverage, *changes])
    for name, metrics in comparison.runs[0].report.baselines.items():
        if f"ndcg@{k}" in metrics:
            hit, ndcg, mrr, coverage = figures(metrics, METRICS, k)
            rows.append([name, hit, ndcg, "", mrr, coverage, "", "", ""])
    return "\n".join([*comparison.notes, "", *aligned(rows)])


def difference_cells(change: Difference | None) -> list[str]:
    """Value, interval and p as cells; empty for no difference."""
    if change is None:
        return ["", "", ""]
    return [f"{change.value:+.4f}", f"{change.low:+.4f} … {change.high:+.4f}", f"{change.p:.3f}"]
