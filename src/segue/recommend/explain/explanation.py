"""An explanation: what each event contributed to a score, and the attention weights."""

from __future__ import annotations

from typing import Literal

import msgspec

from segue.recommend.answer import PlannedItem, ScoredItem


class Contribution(msgspec.Struct, frozen=True):
    """What one entry of a history did for an item's score."""

    item: str
    title: str | None
    """From the catalogue; null where it has none."""
    known: bool
    """Whether the model knows the item; one it does not know was left out of the question."""
    contribution: float | None
    """The score with the whole history less the score without this entry; the history's differences need not add up
    to the score. Null where there is no such number: the item is unknown, the entry is older than the model has room
    for, or it is the only known one, without which there is nothing to score by."""


class Attention(msgspec.Struct, frozen=True):
    """Who looked at whom in one layer of the model."""

    name: str
    """`layer 1` and so on, or where in the model it stands."""
    rows: list[int | None]
    """Who looks: places in `contributions`, oldest first. Null is no entry but a token of the model's own: the question
    after the history, or the steps of a decoder in their order."""
    columns: list[int | None]
    """Who is looked at, in the same way: the newest 64 entries at most of those that the model looked at, and after
    them the question where it has a token of its own; or the steps of a decoder that looks back at them."""
    weights: list[list[list[float]]]
    """[head][row][column], to six decimals; zero above the diagonal where nobody looks ahead. A row adds up to one, or
    to less where it also looks at entries older than these; where attention is hard, it is one at a single entry.
    HSTU's weights stand each for itself: they add up to nothing in particular and may be below zero."""


class Explanation(msgspec.Struct, frozen=True):
    """Why an item is answered: what each entry of the history did for its score, and where the model looked."""

    item: ScoredItem
    rank: int | None
    """Its place among the answers, 1 the best; null where the rules do not allow it as one."""
    contributions: list[Contribution]
    """One for each entry of the history, oldest first."""
    attention: list[Attention] = []
    """One for each layer that has any, in the order of the model: the answer is made from the last row of the last, or
    the first where its rows are steps. Empty where the model has none to show, where it was not asked for, and in a
    popularity answer."""
    plan: list[PlannedItem] = []
    """What the steps in `attention` choose under the same rules, each the likeliest after those before it; empty where
    the model does not plan."""
    unknown: list[str] = []
    """Ids of the history that the model does not know, each once; they were left out of the question."""
    fallback: Literal["popularity"] | None = None
    """Set where the history had nothing the model knows: the score is then the item's events in training."""
    untimed: Literal[True] | msgspec.UnsetType = msgspec.UNSET
    """There, and true, where the model looks at times and the history has none: the answer is made without them."""
