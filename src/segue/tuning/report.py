"""The trials of a search, the best of them, and a table for the terminal."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

import msgspec

from segue.evaluation.report import aligned

Outcome = Literal["finished", "pruned", "failed", "out of time", "interrupted"]
FINAL: tuple[Outcome, ...] = ("finished", "pruned", "failed")
UNFINISHED: tuple[Outcome, ...] = ("out of time", "interrupted")
"""Trials that are not counted: a resumed search continues them from their last epoch."""
SHOWN = 5


class TrialRecord(msgspec.Struct, frozen=True, kw_only=True):
    trial: int
    """The number, from 1; in Optuna's study from 0."""
    outcome: Outcome
    score: float | None
    """The best NDCG@10 of its epochs on validation; of an unfinished trial, a lower bound."""
    epochs: int
    best_epoch: int
    seconds: float | None
    """How long it took; None if it was interrupted, as the time of the interruption is unknown."""
    values: dict[str, Any]
    """The searched settings."""
    changes: dict[str, tuple[Any, Any]]
    """Settings that differ from the recipe: its value, and the trial's."""


class Tuning(msgspec.Struct, frozen=True, kw_only=True):
    """All trials so far."""

    folder: str
    recipe: str
    """The recipe of the first trial."""
    trials: list[TrialRecord]

    @property
    def counted(self) -> list[TrialRecord]:
        """The trials that have ended."""
        return [record for record in self.trials if record.outcome in FINAL]

    @property
    def ranked(self) -> list[TrialRecord]:
        """The trials to choose from, best first, equal settings once. A failed trial would fail again and is left
        out. Of equal scores the earliest comes first, so the recipe wins a tie."""
        scored = [one for one in self.trials if one.score is not None and one.outcome != "failed"]
        best: list[TrialRecord] = []
        for record in sorted(scored, key=lambda one: (-(one.score or 0.0), one.outcome in UNFINISHED, one.trial)):
            if all(record.values != other.values for other in best):
                best.append(record)
        return best

    @property
    def best(self) -> TrialRecord | None:
        return next(iter(self.ranked), None)


def tuning_table(tuning: Tuning) -> str:
    """The best trials and what they have in common, as lines for a terminal."""
    counts = Counter(record.outcome for record in tuning.trials)
    kinds = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    rows = [["trial", "ndcg@10", "best epoch", "minutes"]]
    for record in tuning.ranked[:SHOWN]:
        minutes = "" if record.seconds is None else f"{record.seconds / 60:.1f}"
        rows.append([str(record.trial), f"{record.score:.4f}", str(record.best_epoch), minutes])
    notes = [f"what differs from {tuning.recipe}", *(changes_text(record) for record in tuning.ranked[:SHOWN])]
    lines = [f"{line}  {note}" for line, note in zip(aligned(rows), notes, strict=True)]
    return "\n".join(
        [
            f"{len(tuning.trials)} trials: {kinds}. Scores are those of validation; the test part was not used.",
            "",
            *lines,
            "",
            _gain(tuning),
            *_shared(tuning),
        ]
    )


def changes_text(record: TrialRecord) -> str:
    """How a trial differs from the recipe. Keys are shown without their sections: they are all different."""
    changes = (f"{_key(name)} {_plain(before)} → {_plain(after)}" for name, (before, after) in record.changes.items())
    return ", ".join(changes) or "nothing: the recipe itself"


def _gain(tuning: Tuning) -> str:
    """The best score beside the recipe's."""
    best, recipe = tuning.best, next((record for record in tuning.ranked if not record.changes), None)
    if best is None or recipe is None:
        return "The recipe itself has no score."
    if not best.changes:
        return "No trial was better than the recipe itself."
    return f"The recipe itself reached {recipe.score:.4f}, the best trial {best.score:.4f}."


def _key(name: str) -> str:
    return name.rpartition(".")[2]


def _plain(value: Any) -> str:
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _shared(tuning: Tuning) -> list[str]:
    """The settings that all of the best trials have and some of the others do not."""
    top, rest = tuning.ranked[:SHOWN], tuning.ranked[SHOWN:]
    if len(rest) < SHOWN:  # among few trials, it would be chance
        return []
    common = [
        f"{_key(name)} {_plain(value)}"
        for name, value in top[0].values.items()
        if all(record.values.get(name) == value for record in top)
        and any(record.values.get(name) != value for record in rest)
    ]
    return [f"All of the best {SHOWN} have {', '.join(common)}."] if common else []
