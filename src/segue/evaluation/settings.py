"""How recommendations are evaluated, and whether seen items may be recommended."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from segue.data.batch import cut_by_budget, ragged_rows
from segue.data.sequences import Sequences
from segue.data.split import Cases, Split, Target
from segue.kinds import Count, CountOrZero

SeenRule = Literal["excluded", "kept"]

MOST_REPEATS = 0.05  # above this share of repeats among the validation targets, seen items stay candidates
MOST_DAYS = 36_525  # a century: more is a typing error, and its dates could not be written
ROWS_AT_A_TIME = 4_000_000  # events of histories compared at a time


class EvaluateSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The section `evaluate` of the settings."""

    seen: Literal["auto", "exclude", "keep"] = "auto"
    """Whether items of the history may be recommended. Auto excludes them unless more than 5 % of the validation
    targets are repeats."""
    target: Target = "each"
    """Which of a user's held-out events are targets. It matters if a split in time leaves several."""
    cases: CountOrZero = 0
    """Validation cases that choose the epoch, spread evenly over the log; 0 is all. The test part is always whole."""
    at: Annotated[tuple[Count, ...], Meta(min_length=1)] = (1, 5, 10, 50)
    """The depths of the list at which metrics are taken."""
    bootstrap: CountOrZero = 1000
    """Resamples behind an interval; 0 leaves the intervals out."""
    days: Annotated[float, Meta(ge=0, le=MOST_DAYS)] = 0.0
    """If above 0, under --split time:WHEN, validation chooses the epoch by recall@10 over the events of its first so
    many days, instead of the next event's ndcg@10."""
    interest: str = ""
    """A column of the catalogue, such as a category: evaluation by window then reports how varied a user's list is."""


def seen_rule(settings: EvaluateSettings, sequences: Sequences, split: Split) -> tuple[SeenRule, float]:
    """Whether seen items are excluded or kept, and the share of validation targets that are repeats."""
    share = repeat_share(sequences, split.cases("valid", settings.target))
    if settings.seen == "auto":
        return ("kept" if share > MOST_REPEATS else "excluded"), share
    return ("excluded" if settings.seen == "exclude" else "kept"), share


def repeat_share(sequences: Sequences, cases: Cases) -> float:
    """Share of the targets that occur in their own history; 0 without cases."""
    lengths = cases.targets - cases.starts
    repeats = 0
    for group in cut_by_budget(lengths, ROWS_AT_A_TIME):
        owner = np.repeat(np.arange(len(group)), lengths[group])
        history = sequences.items[ragged_rows(cases.starts[group], lengths[group])]
        same = history == sequences.items[cases.targets[group]][owner]
        repeats += len(np.unique(owner[same]))
    return repeats / max(1, len(cases))
