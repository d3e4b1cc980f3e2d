"""An explanation → lines for a terminal: a bar for each entry of the history, then where the answer's token looks."""

from __future__ import annotations

from collections.abc import Iterator

from segue.recommend.answer import UNTIMED
from segue.recommend.explain.attention_text import View, attention_lines
from segue.recommend.explain.explanation import Contribution, Explanation

HALF = 12  # characters of the longest bar


def lines(explanation: Explanation, view: View | None = None) -> Iterator[str]:
    """The whole text, line by line; `view` is what of the attention is to be shown."""
    yield headline(explanation)
    if explanation.fallback:
        yield POPULARITY
    if explanation.unknown:
        yield f"Unknown items, left out: {', '.join(explanation.unknown)}"
    if explanation.untimed:
        yield UNTIMED
    if not explanation.fallback:
        yield ""
        yield "What each entry of the history did, oldest first: the score less the score without it."
        yield from _bars(explanation.contributions)
    yield from attention_lines(explanation, view or View())


POPULARITY = (
    "No item of the history is known, so answers are by popularity: the score is the item's events in training, and "
    "no entry contributed to it."
)


def headline(explanation: Explanation) -> str:
    """The item, its score and its place, in a sentence."""
    item = explanation.item
    named = f"{item.title} ({item.id})" if item.title else item.id
    place = "no answer under these rules" if explanation.rank is None else f"answer number {explanation.rank}"
    return f"Why {named}: {place}, with a score of {item.score:.4f}."


def reason(entries: list[Contribution], entry: Contribution) -> str:
    """Why an entry has no contribution."""
    if not entry.known:
        return "unknown to the model"
    if sum(each.known for each in entries) == 1:
        return "the only known entry: without it there is nothing to score by"
    return "older than the model has room for"


def _bars(entries: list[Contribution]) -> Iterator[str]:
    """A line an entry; those at the old end that had no room are one line."""
    first = next((place for place, entry in enumerate(entries) if entry.contribution is not None), 0)
    if first:
        shown = "entry 1 is" if first == 1 else f"entries 1 to {first} are"
        yield f"  ({shown} unknown or older than the model has room for)"
    longest = max((abs(entry.contribution) for entry in entries if entry.contribution is not None), default=0.0)
    width = max((len(entry.item) for entry in entries[first:]), default=0)
    digits = len(str(len(entries)))
    for place, entry in enumerate(entries[first:], start=first + 1):
        if entry.contribution is None:
            facts = f"{'':9}  {reason(entries, entry):{2 * HALF + 1}}"
        else:
            facts = f"{entry.contribution:+9.4f}  {_bar(entry.contribution, longest)}"
        yield f"  {place:{digits}}  {entry.item:{width}}  {facts}  {entry.title or ''}".rstrip()


def _bar(value: float, longest: float) -> str:
    """To the right of the middle for what raised the score, to the left for what lowered it."""
    bar = "█" * round(HALF * abs(value) / longest) if longest else ""
    return f"{bar if value < 0 else '':>{HALF}}│{bar if value > 0 else '':<{HALF}}"
