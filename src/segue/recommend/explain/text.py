"""An explanation → lines for a terminal: a bar for each entry of the history, then the attention weights."""

from __future__ import annotations

from collections.abc import Iterator

from segue.recommend.answer import UNTIMED
from segue.recommend.explain.attention_text import View, attention_lines
from segue.recommend.explain.explanation import Contribution, Explanation

HALF = 12  # characters of the longest bar


def lines(explanation: Explanation, view: View | None = None) -> Iterator[str]:
    """Yield the text line by line. `view`: which attention weights to show."""
    yield headline(explanation)
    if explanation.fallback:
        yield POPULARITY
    if explanation.unknown:
        yield f"Unknown items, left out: {', '.join(explanation.unknown)}"
    if explanation.untimed:
        yield UNTIMED
    if not explanation.fallback:
        yield ""
        yield "Contribution of each entry of the history, oldest first: the score minus the score without it."
        yield from _bars(explanation.contributions)
    yield from attention_lines(explanation, view or View())


POPULARITY = (
    "No item of the history is known, so the answer is by popularity: the score is the item's count in training, and "
    "no entry contributed to it."
)


def headline(explanation: Explanation) -> str:
    """One sentence with the item, its rank and its score."""
    item = explanation.item
    named = f"{item.title} ({item.id})" if item.title else item.id
    rank = "not allowed by these rules" if explanation.rank is None else f"rank {explanation.rank}"
    return f"Why {named}: {rank}, with a score of {item.score:.4f}."


def reason(entries: list[Contribution], entry: Contribution) -> str:
    """Why an entry has no contribution."""
    if not entry.known:
        return "unknown to the model"
    if sum(each.known for each in entries) == 1:
        return "the only known entry: there is no score without it"
    return "older than the model's length"


def _bars(entries: list[Contribution]) -> Iterator[str]:
    """One line for each entry; the oldest ones without a contribution share one line."""
    first = next((index for index, entry in enumerate(entries) if entry.contribution is not None), 0)
    if first:
        shown = "entry 1 is" if first == 1 else f"entries 1 to {first} are"
        yield f"  ({shown} unknown or older than the model's length)"
    longest = max((abs(entry.contribution) for entry in entries if entry.contribution is not None), default=0.0)
    width = max((len(entry.item) for entry in entries[first:]), default=0)
    digits = len(str(len(entries)))
    for number, entry in enumerate(entries[first:], start=first + 1):
        if entry.contribution is None:
            facts = f"{'':9}  {reason(entries, entry):{2 * HALF + 1}}"
        else:
            bar = "█" * round(HALF * abs(entry.contribution) / longest) if longest else ""
            left, right = ("", bar) if entry.contribution > 0 else (bar, "")  # it lowered or raised the score
            facts = f"{entry.contribution:+9.4f}  {left:>{HALF}}│{right:<{HALF}}"
        yield f"  {number:{digits}}  {entry.item:{width}}  {facts}  {entry.title or ''}".rstrip()
