"""What a search found: every trial, the best of them, and lines for a terminal."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

import msgspec

from segue.evaluation.report import aligned

Outcome = Literal["finished", "pruned", "failed", "out of time", "interrupted"]
OVER: tuple[Outcome, ...] = ("finished", "pruned", "failed")
HALF_RUN: tuple[Outcome, ...] = ("out of time", "interrupted")
"""Trials that are not counted: a resumed search runs them again, from the epoch they had reached."""
SHOWN = 5


class TrialRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One trial."""

    trial: int
    """From 1 on; in Optuna's study it has the number before."""
    outcome: Outcome
    score: float | None
    """The best validation NDCG@10 of its epochs. Where it did not finish, its settings reach at least this."""
    epochs: int
    best_epoch: int
    seconds: float | None
    """How long it took, None where it was interrupted: nobody knows when."""
    values: dict[str, Any]
    """The settings that are searched."""
    changes: dict[str, tuple[Any, Any]]
    """What differs from the recipe: its value, and the trial's."""


class Tuning(msgspec.Struct, frozen=True, kw_only=True):
    """All trials so far."""

    folder: str
    recipe: str
    """Where the search began."""
    trials: list[TrialRecord]

    @property
    def counted(self) -> list[TrialRecord]:
        """Those that are over."""
        return [record for record in self.trials if record.outcome in OVER]

    @property
    def ranked(self) -> list[TrialRecord]:
        """Those to choose from, best first, all settings once: not what failed, as it would again. Of equals the
        earliest, so that the recipe comes before others."""
        sound = [one for one in self.trials if one.score is not None and one.outcome != "failed"]
        best: list[TrialRecord] = []
        for record in sorted(sound, key=lambda one: (-(one.score or 0.0), one.outcome in HALF_RUN, one.trial)):
            if all(record.values != other.values for other in best):
                best.append(record)
        return best

    @property
    def best(self) -> TrialRecord | None:
        return next(iter(self.ranked), None)


def tuning_table(tuning: Tuning) -> str:
    """The best trials and what they share, as lines for a terminal."""
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
            f"{len(tuning.trials)} trials: {kinds}. Scores are those of validation; the test part was not looked at.",
            "",
            *lines,
            "",
            _gain(tuning),
            *_shared(tuning),
        ]
    )


def changes_text(record: TrialRecord) -> str:
    """What is new in a trial, in words. Keys without their sections: the knobs' are all different."""
    changes = (f"{_key(name)} {_plain(before)} → {_plain(after)}" for name, (before, after) in record.changes.items())
    return ", ".join(changes) or "nothing: the recipe as it is"


def _gain(tuning: Tuning) -> str:
    """The best beside the recipe."""
    best, recipe = tuning.best, next((record for record in tuning.ranked if not record.changes), None)
    if best is None or recipe is None:
        return "The recipe as it is has no score."
    if not best.changes:
        return "No trial was better than the recipe as it is."
    return f"The recipe as it is reached {recipe.score:.4f}, the best trial {best.score:.4f}."


def _key(name: str) -> str:
    return name.rpartition(".")[2]


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _shared(tuning: Tuning) -> list[str]:
    """The choices that all of the best made and some of the others did not."""
    top, rest = tuning.ranked[:SHOWN], tuning.ranked[SHOWN:]
    if len(rest) < SHOWN:  # among few trials, sharing is chance
        return []
    common = [
        f"{_key(name)} {_plain(value)}"
        for name, value in top[0].values.items()
        if all(record.values.get(name) == value for record in top)
        and any(record.values.get(name) != value for record in rest)
    ]
    return [f"All of the best {SHOWN} have {', '.join(common)}."] if common else []
