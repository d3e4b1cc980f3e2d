"""An explanation: what each event contributed to a score, and the attention weights."""

from __future__ import annotations

from typing import Literal

import msgspec

from segue.recommend.answer import PlannedItem, ScoredItem


class Contribution(msgspec.Struct, frozen=True):
    """The contribution of one entry of a history to an item's score."""

    item: str
    title: str | None
    """From the catalogue; null if it has none."""
    known: bool
    """Whether the model knows the item; an unknown one is skipped."""
    contribution: float | None
    """The score with the whole history minus the score without this entry; contributions need not add up to the score.
    Null if the item is unknown, if the entry is older than the model's length, or if it is the only known entry."""


class Attention(msgspec.Struct, frozen=True):
    """The attention weights of one layer of the model."""

    name: str
    """`layer 1` and so on, or the position of the layer in the model."""
    rows: list[int | None]
    """The tokens that attend: indices in `contributions`, oldest first. Null is a token that is not an entry: the query
    token after the history, or the steps of a decoder in order."""
    columns: list[int | None]
    """The tokens attended to, in the same way: at most the newest 64 entries that the model encoded, and then the query
    token if there is one; or the steps of a decoder that attends to its previous steps."""
    weights: list[list[list[float]]]
    """[head][row][column], to six decimals; zero above the diagonal if attention is causal. A row sums to one, or to
    less if it also attends to entries older than these; with hard attention it is one at a single entry. HSTU's weights
    are not normalised: they have no fixed sum and may be negative."""


class Explanation(msgspec.Struct, frozen=True):
    """Why an item is recommended: the contribution of each entry of the history, and the attention weights."""

    item: ScoredItem
    rank: int | None
    """Its rank, 1 the best; null if the rules do not allow it."""
    contributions: list[Contribution]
    """One for each entry of the history, oldest first."""
    attention: list[Attention] = []
    """One for each layer with attention, in the order of the model: the answer is computed from the last row of the
    last one, or from the first row if rows are steps. Empty if the model has none, if it was not requested, and in a
    popularity answer."""
    plan: list[PlannedItem] = []
    """The items that the steps in `attention` choose under the same rules, each the likeliest after those before it;
    empty if the model does not plan."""
    unknown: list[str] = []
    """Ids of the history that the model does not know, each once; they were skipped."""
    fallback: Literal["popularity"] | None = None
    """Set if the model knows no item of the history: the score is then the item's count in training."""
    untimed: Literal[True] | msgspec.UnsetType = msgspec.UNSET
    """Present and true if the model uses times and the history has none: the answer is computed without them."""
