"""An explanation → lines for a terminal: what counts add, a bar for each entry of the history, then the attention
weights as a summary of every head, as heat maps of some, or as one row in full."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from segue.errors import InputError
from segue.recommend.answer import UNTIMED, Attention, Contribution, Explanation
from segue.recommend.explain.words import shares

HALF = 12  # characters of the longest bar of a contribution
NAMED = 3  # entries named for each head
NAMED_BESIDE = 2  # entries named beside each row of a heat map
WIDE = 32  # columns up to which a cell is two characters wide
BAR = 24  # characters of the longest bar of a row in full
# (up to this share of the largest weight, sign of a positive weight, of a negative one). The shares are squares of
# quarters, so that the small weights of a long history remain visible.
SHADES = ((1 / 16, "░", "-"), (1 / 4, "▒", "-"), (9 / 16, "▓", "="), (1.0, "█", "="))
ZERO = "·"
QUERY = "?"  # label of a token that is not an entry of the history
POPULARITY = (
    "No item of the history is known, so the answer is by popularity: the score is the item's count in training, and "
    "no entry contributed to it."
)


@dataclass(frozen=True, slots=True)
class View:
    """Which attention weights to show; if all are None, a summary."""

    layer: str | None = None
    """Number of the layer, from 1, or its name."""
    head: int | None = None
    query: str | None = None
    """The token that attends: an entry's number, `?` for the query token, or `?2` for the second step of a plan."""


def lines(explanation: Explanation, view: View | None = None) -> Iterator[str]:
    """Yield the text line by line. `view`: which attention weights to show."""
    yield headline(explanation)
    if explanation.fallback:
        yield POPULARITY
    if explanation.unknown:
        yield f"Unknown items, left out: {', '.join(explanation.unknown)}"
    if explanation.untimed:
        yield UNTIMED
    if explanation.counts:
        yield ""
        yield shares(explanation)
        yield from (f"  {reason.score:+9.4f}  {reason.sentence}" for reason in explanation.counts)
    if not explanation.fallback:
        yield ""
        yield "Contribution of each entry of the history, oldest first: the score minus the score without it."
        yield from _bars(explanation.contributions)
    yield from attention_lines(explanation, view or View())


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


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """The attention weights of one token in one head: a row of the layer."""

    layer: Attention
    head: int
    index: int  # of the layer's rows

    @property
    def title(self) -> str:
        return f"{self.layer.name}, head {self.head + 1}"

    @property
    def weights(self) -> list[float]:
        return self.layer.weights[self.head][self.index]


def labels(entries: list[int | None]) -> list[str]:
    """Labels of rows or columns: the number of an entry, from 1; `?` for a query token, `?1`, `?2` … for several."""
    queries = entries.count(None)
    names = iter([QUERY] if queries == 1 else [f"{QUERY}{step}" for step in range(1, queries + 1)])
    return [next(names) if entry is None else str(entry + 1) for entry in entries]


def of_steps(layer: Attention) -> bool:
    """Whether the rows are the steps of a decoder."""
    return all(entry is None for entry in layer.rows)


def attention_lines(explanation: Explanation, view: View) -> Iterator[str]:
    """Yield the attention weights that `view` selects; if there are none, an InputError lists the choices."""
    heads = _chosen_heads(explanation, view)
    if explanation.plan and any(of_steps(layer) for layer, _ in heads):
        yield ""
        yield f"The steps choose {', '.join(f'{at} {item.id}' for at, item in enumerate(explanation.plan, start=1))}."
    if view.layer is None and view.head is None:
        yield from _summary(explanation, _rows(heads, view.query), newest=view.query is None)
    elif view.query is None:
        for layer, head in heads:
            yield from _heat_map(explanation, layer, head)
    else:
        for row in _rows(heads, view.query):
            yield from _in_full(explanation, row)


def _chosen_heads(explanation: Explanation, view: View) -> list[tuple[Attention, int]]:
    layers = {str(number): layer for number, layer in enumerate(explanation.attention, start=1)}
    if not layers and view != View():
        why = "no entry of the history is known" if explanation.fallback else "this model has none"
        raise InputError(f"There is no attention to show, because {why}; leave out --layer, --head and --query.")
    chosen = [layer for number, layer in layers.items() if view.layer in (None, number, layer.name)]
    if layers and not chosen:
        known = ", ".join(f"{number} ({layer.name})" for number, layer in layers.items())
        raise InputError(f"There is no layer {view.layer!r}; there is {known}.")
    heads = [(layer, head) for layer in chosen for head in range(len(layer.weights)) if view.head in (None, head + 1)]
    if layers and not heads:
        most = max(len(layer.weights) for layer in chosen)
        raise InputError(f"There is no head {view.head}; the heads are numbered from 1 to {most}.")
    return heads


def _rows(heads: list[tuple[Attention, int]], query: str | None) -> list[TokenWeights]:
    """The rows of the token with this label; None is the row that the answer is computed from."""
    if query is None:  # the last row, or the first step of a decoder
        return [TokenWeights(layer, head, 0 if of_steps(layer) else len(layer.rows) - 1) for layer, head in heads]
    names = [labels(layer.rows) for layer, _ in heads]
    rows = [
        TokenWeights(layer, head, own.index(query))
        for (layer, head), own in zip(heads, names, strict=True)
        if query in own
    ]
    if heads and not rows:
        known = ", ".join(dict.fromkeys(name for own in names for name in own))
        raise InputError(f"There is no query {query!r} here; the queries are {known}.")
    return rows


def _summary(explanation: Explanation, rows: list[TokenWeights], *, newest: bool) -> Iterator[str]:
    """The strongest keys of each head, by query. `newest`: a query that is an entry is the newest one."""

    def query(row: TokenWeights) -> str:
        is_entry = row.layer.rows[row.index] is not None
        return "the newest known entry" if newest and is_entry else _name(explanation, row.layer.rows, row.index)

    for name, own in groupby(rows, key=query):
        yield ""
        yield f"Attention of {name}, head by head{cut_note(explanation)}:"
        for row in own:
            yield f"  {row.title}: {_strongest(explanation, row, NAMED)}"


def _heat_map(explanation: Explanation, layer: Attention, head: int) -> Iterator[str]:
    """One line for each row: its label, its shaded cells, and its strongest keys by name."""
    weights, names = layer.weights[head], labels(layer.rows)
    most = max(abs(weight) for row in weights for weight in row)
    width, margin = 2 if len(layer.columns) <= WIDE else 1, max(map(len, names))
    yield ""
    yield f"{layer.name}, head {head + 1}: rows attend to columns{cut_note(explanation)}."
    shades = ", ".join(f"{above} to {end * most:.2g}" for end, above, _ in SHADES)
    minus = f"; - to {-most / 4:.2g}, = to {-most:.2g}" if any(weight < 0 for row in weights for weight in row) else ""
    yield f"  {ZERO} 0, {shades}{minus}"
    columns = labels(layer.columns)
    height = max(map(len, columns))
    for digits in zip(*(column.rjust(height) for column in columns), strict=True):  # written from top to bottom
        yield f"  {'':{margin}}  {''.join(f'{digit:{width}}' for digit in digits)}".rstrip()
    for index, name in enumerate(names):
        later = index + 1 if layer.rows == layer.columns else len(layer.columns)  # columns from here on are masked
        cells = "".join(
            width * _shade(weight, most, blank=column >= later) for column, weight in enumerate(weights[index])
        )
        strongest = _strongest(explanation, TokenWeights(layer, head, index), NAMED_BESIDE)
        yield f"  {name:>{margin}}  {cells}  {strongest}"


def _shade(weight: float, most: float, *, blank: bool) -> str:
    if not weight:
        return " " if blank else ZERO
    share = abs(weight) / most
    return next(above if weight > 0 else below for end, above, below in SHADES if share <= end)


def _in_full(explanation: Explanation, row: TokenWeights) -> Iterator[str]:
    """One line for each key: its number, its name, its weight and a bar."""
    most = max(map(abs, row.weights))
    names = labels(row.layer.columns)
    keys = [
        _name(explanation, row.layer.columns, index) if entry is None else explanation.contributions[entry].item
        for index, entry in enumerate(row.layer.columns)
    ]
    margin, width = max(map(len, names)), max(map(len, keys))
    yield ""
    yield f"Attention of {_name(explanation, row.layer.rows, row.index)} in {row.title}{cut_note(explanation)}:"
    for name, key, weight in zip(names, keys, row.weights, strict=True):
        bar = ("█" if weight > 0 else "=") * round(BAR * abs(weight) / most) if most else ""
        yield f"  {name:>{margin}}  {key:{width}}  {weight:8.4f}  {bar}".rstrip()


def _strongest(explanation: Explanation, row: TokenWeights, most: int) -> str:
    """The keys with the largest weights, the largest first and of equal ones the newest."""
    order = sorted(((abs(weight), column) for column, weight in enumerate(row.weights) if weight), reverse=True)[:most]
    query, strongest = _name(explanation, row.layer.rows, row.index), []
    for _, column in order:
        name = _name(explanation, row.layer.columns, column)
        itself = row.layer.columns[column] is None and name == query
        strongest.append(f"{row.weights[column]:.2g} at {'itself' if itself else name}")
    return ", ".join(strongest) or "nothing"


def _name(explanation: Explanation, entries: list[int | None], index: int) -> str:
    """The name of a row or column: an entry with its number, or a token that is not an entry; these are the last."""
    entry, queries = entries[index], entries.count(None)
    if entry is not None:
        return f"{entry + 1} {explanation.contributions[entry].item}"
    return "the query" if queries == 1 else f"step {queries - len(entries) + index + 1}"


def cut_note(explanation: Explanation) -> str:
    """A note if the weights shown do not cover all entries that have a contribution."""
    shown = max(sum(entry is not None for entry in layer.columns) for layer in explanation.attention)
    measured = sum(entry.contribution is not None for entry in explanation.contributions)
    return f", among the newest {shown} entries" if shown < measured else ""
