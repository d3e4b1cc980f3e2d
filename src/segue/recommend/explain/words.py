"""What the counts add to an item's score → reasons in words."""

from __future__ import annotations

import numpy as np

from segue.counts.counts import Counts
from segue.counts.features import HORIZON, REPEATED, TOGETHER
from segue.counts.reasons import Reason, reasons
from segue.data.vocabulary import Vocabulary
from segue.recommend.answer import CountReason, Explanation

EVENTS = ("", "two events ", "three events ")  # by lag


def count_reasons(counts: Counts, vocabulary: Vocabulary, items: np.ndarray, candidate: int) -> list[CountReason]:
    """The reasons for a candidate after a history of known items [n]; the largest addition first."""
    found = reasons(counts, items, candidate)
    numbers = np.array([reason.source for reason in found], dtype=np.int64)
    return [
        CountReason(
            item=name,
            title=title,
            kind="repeated" if reason.feature == REPEATED else "together" if reason.feature == TOGETHER else "followed",
            distance=reason.distance,
            count=reason.count,
            score=reason.score,
            sentence=sentence(reason, title or name, len(items)),
        )
        for reason, name, title in zip(found, vocabulary.ids(numbers), vocabulary.titles(numbers), strict=True)
    ]


def sentence(reason: Reason, name: str, events: int) -> str:
    """A reason in words, whose subject is the recommended item. `events`: how many known ones the history has."""
    times = "once" if reason.count == 1 else f"{reason.count:,} times"
    if reason.feature == REPEATED:
        where = "this history" if events <= HORIZON else f"the newest {HORIZON} events"
        ago = "as the newest event" if reason.distance == 1 else f"{reason.distance} events ago"
        return f"{times} in {where}, {ago if reason.count == 1 else f'last {ago}'}"
    if reason.feature == TOGETHER:
        return f"{reason.count:,} {'user has' if reason.count == 1 else 'users have'} it near {quoted(name)}"
    verb = "followed" if reason.feature == 0 else f"came {EVENTS[reason.feature]}after"
    return f"{verb} {quoted(name)} {times}"


def quoted(name: str) -> str:
    """A name as it stands in a sentence. The page finds it there by its first mark."""
    return f"“{name}”"


def shares(explanation: Explanation) -> str:
    """One sentence on how much of the score is the model's, and how much the counts add."""
    model = explanation.item.score - explanation.counts_score
    return f"Of this score, {model:.4f} is the model's; counts of the training log add {explanation.counts_score:+.4f}."
