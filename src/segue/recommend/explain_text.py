"""An explanation → lines for a terminal: a bar for each entry of the history, then where the answer's token looks."""

from __future__ import annotations

from collections.abc import Iterator

from segue.recommend.answers import Contribution, Explanation

HALF = 12  # characters of the longest bar
MOST_LOOKS = 3  # entries named for each head


def lines(explanation: Explanation) -> Iterator[str]:
    """The whole text, line by line."""
    yield headline(explanation)
    if explanation.fallback:
        yield POPULARITY
    if explanation.unknown:
        yield f"Unknown items, left out: {', '.join(explanation.unknown)}"
    if not explanation.fallback:
        yield ""
        yield "What each entry of the history did, oldest first: the score less the score without it."
        yield from _bars(explanation.contributions)
        yield from _looks(explanation)


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


def _looks(explanation: Explanation) -> Iterator[str]:
    if explanation.attention is None:
        return
    places = explanation.attention.entries
    yield ""
    asking = "question" if places[-1] is None else "newest known entry"
    yield f"Where the {asking} looks, head by head{cut_note(explanation)}:"
    for layer, heads in enumerate(explanation.attention.weights, start=1):
        for head, weights in enumerate(heads, start=1):
            looks = sorted(zip(weights[-1], range(len(places)), strict=True), reverse=True)[:MOST_LOOKS]
            named = ", ".join(f"{weight:.2g} at {_named(explanation, places[column])}" for weight, column in looks)
            yield f"  layer {layer}, head {head}: {named}"


def _named(explanation: Explanation, place: int | None) -> str:
    return "itself" if place is None else f"{place + 1} {explanation.contributions[place].item}"


def cut_note(explanation: Explanation) -> str:
    """Said where the attention shown is only a part."""
    assert explanation.attention is not None
    shown = sum(place is not None for place in explanation.attention.entries)
    looked = sum(entry.contribution is not None for entry in explanation.contributions)
    return f", among the newest {shown} entries" if shown < looked else ""
