"""Attention → lines for a terminal: the gist of every head, a heat map of some, or one row of them in full."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from segue.errors import InputError
from segue.recommend.explain.explanation import Attention, Explanation

NAMED = 3  # entries named for each head
NAMED_BESIDE = 2  # entries named beside each row of a heat map
WIDE = 32  # columns up to which a cell is two characters wide
BAR = 24  # characters of the longest bar of a row in full
# Up to which share of the largest weight, a weight above zero, one below. The ends are squares of quarters, so that the
# small weights of a long history can be told apart.
SHADES = ((1 / 16, "░", "-"), (1 / 4, "▒", "-"), (9 / 16, "▓", "="), (1.0, "█", "="))
ZERO = "·"
QUESTION = "?"  # stands for a token that is no entry


@dataclass(frozen=True, slots=True)
class View:
    """What of the attention is to be shown; where all is None, the gist."""

    layer: str | None = None
    """Its number, counted from 1, or its name."""
    head: int | None = None
    query: str | None = None
    """Who looks: an entry's number, `?` for the question, or `?2` for the second step of a plan."""


@dataclass(frozen=True, slots=True)
class Row:
    """Where one token looks in one head."""

    layer: Attention
    head: int
    place: int  # among the layer's rows

    @property
    def title(self) -> str:
        return f"{self.layer.name}, head {self.head + 1}"

    @property
    def weights(self) -> list[float]:
        return self.layer.weights[self.head][self.place]


def labels(places: list[int | None]) -> list[str]:
    """What rows and columns are called: an entry's number counted from 1; `?` for a token that is none, with a number
    where there are several."""
    own = places.count(None)
    names = iter([QUESTION] if own == 1 else [f"{QUESTION}{step}" for step in range(1, own + 1)])
    return [next(names) if place is None else str(place + 1) for place in places]


def of_steps(layer: Attention) -> bool:
    """Whether those who look are the steps of a decoder."""
    return all(place is None for place in layer.rows)


def answering(layer: Attention) -> int:
    """The row that an answer is made from: the last, or of a decoder's steps the first."""
    return 0 if of_steps(layer) else len(layer.rows) - 1


def attention_lines(explanation: Explanation, view: View) -> Iterator[str]:
    """What was chosen of it; an InputError says what there is to choose from."""
    heads = _chosen_heads(_chosen_layers(explanation, view), view)
    drawn = view.layer is not None or view.head is not None
    if explanation.plan and any(of_steps(layer) for layer, _ in heads):
        yield ""
        yield f"The steps choose {', '.join(f'{at} {item.id}' for at, item in enumerate(explanation.plan, start=1))}."
    if not drawn:
        yield from _gist(explanation, _rows(heads, view.query), newest=view.query is None)
    elif view.query is None:
        for layer, head in heads:
            yield from _heat_map(explanation, layer, head)
    else:
        for row in _rows(heads, view.query):
            yield from _in_full(explanation, row)


def _chosen_layers(explanation: Explanation, view: View) -> list[Attention]:
    layers = explanation.attention
    if not layers and view != View():
        why = "no entry of the history is known" if explanation.fallback else "this model has none"
        raise InputError(f"There is no attention to show, as {why}; leave out --layer, --head and --query.")
    if view.layer is None:
        return layers
    for number, layer in enumerate(layers, start=1):
        if view.layer in (str(number), layer.name):
            return [layer]
    known = ", ".join(f"{number} ({layer.name})" for number, layer in enumerate(layers, start=1))
    raise InputError(f"There is no layer {view.layer!r}; there is {known}.")


def _chosen_heads(layers: list[Attention], view: View) -> list[tuple[Attention, int]]:
    heads = [(layer, head) for layer in layers for head in range(len(layer.weights))]
    chosen = [(layer, head) for layer, head in heads if view.head in (None, head + 1)]
    if heads and not chosen:
        most = 1 + max(head for _, head in heads)
        raise InputError(f"There is no head {view.head}; the heads are numbered from 1 to {most}.")
    return chosen


def _rows(heads: list[tuple[Attention, int]], query: str | None) -> list[Row]:
    """The rows of the token of that label; where none is named, those that the answer is made from."""
    names = [labels(layer.rows) for layer, _ in heads]
    found = [
        Row(layer, head, answering(layer) if query is None else own.index(query))
        for (layer, head), own in zip(heads, names, strict=True)
        if query is None or query in own
    ]
    if heads and not found:
        known = ", ".join(dict.fromkeys(name for own in names for name in own))
        raise InputError(f"There is no query {query!r} here; those that look are {known}.")
    return found


def _gist(explanation: Explanation, rows: list[Row], *, newest: bool) -> Iterator[str]:
    """The strongest keys of each head, under who looks; `newest` says that an entry that looks is the last one."""

    def looking(row: Row) -> str:
        named = _asking(explanation, row)
        return "the newest known entry" if newest and row.layer.rows[row.place] is not None else named

    for name, own in groupby(rows, key=looking):
        yield ""
        yield f"Where {name} looks, head by head{cut_note(explanation)}:"
        for row in own:
            yield f"  {row.title}: {_strongest(explanation, row, NAMED)}"


def _heat_map(explanation: Explanation, layer: Attention, head: int) -> Iterator[str]:
    """A row a line: its label, its shaded cells, and the strongest of them by name."""
    weights, names = layer.weights[head], labels(layer.rows)
    most = max(abs(weight) for row in weights for weight in row)
    width, margin = 2 if len(layer.columns) <= WIDE else 1, max(map(len, names))
    yield ""
    yield f"{layer.name}, head {head + 1}: a row looks at the columns{cut_note(explanation)}."
    yield _legend(most, below=any(weight < 0 for row in weights for weight in row))
    for digits in _upright(labels(layer.columns)):
        yield f"  {'':{margin}}  {''.join(f'{digit:{width}}' for digit in digits)}".rstrip()
    for place, name in enumerate(names):
        ahead = place + 1 if layer.rows == layer.columns else len(layer.columns)  # cells from which zero is no look
        cells = "".join(
            width * _shade(weight, most, blank=column >= ahead) for column, weight in enumerate(weights[place])
        )
        strongest = _strongest(explanation, Row(layer, head, place), NAMED_BESIDE)
        yield f"  {name:>{margin}}  {cells}  {strongest}"


def _upright(names: list[str]) -> Iterator[tuple[str, ...]]:
    """Names side by side, written from the top down, so that each is one character wide."""
    high = max(map(len, names))
    yield from zip(*(name.rjust(high) for name in names), strict=True)


def _shade(weight: float, most: float, *, blank: bool) -> str:
    if not weight:
        return " " if blank else ZERO
    share = abs(weight) / most
    return next(above if weight > 0 else below for end, above, below in SHADES if share <= end)


def _legend(most: float, *, below: bool) -> str:
    shades = ", ".join(f"{above} to {end * most:.2g}" for end, above, _ in SHADES)
    minus = f"; - to {-most / 4:.2g}, = to {-most:.2g}" if below else ""
    return f"  {ZERO} 0, {shades}{minus}"


def _in_full(explanation: Explanation, row: Row) -> Iterator[str]:
    """A line a key: its number, its name, its weight and a bar."""
    most = max(map(abs, row.weights))
    names = labels(row.layer.columns)
    keys = [
        _own(row.layer.columns, at) if place is None else explanation.contributions[place].item
        for at, place in enumerate(row.layer.columns)
    ]
    margin, width = max(map(len, names)), max(map(len, keys))
    yield ""
    yield f"Where {_asking(explanation, row)} looks in {row.title}{cut_note(explanation)}:"
    for name, key, weight in zip(names, keys, row.weights, strict=True):
        bar = ("█" if weight > 0 else "=") * round(BAR * abs(weight) / most) if most else ""
        yield f"  {name:>{margin}}  {key:{width}}  {weight:8.4f}  {bar}".rstrip()


def _strongest(explanation: Explanation, row: Row, most: int) -> str:
    """The entries that it looks at most, the strongest first and of equal ones the newest."""
    order = sorted(((abs(weight), column) for column, weight in enumerate(row.weights) if weight), reverse=True)[:most]
    named = [f"{row.weights[column]:.2g} at {_looked_at(explanation, row, column)}" for _, column in order]
    return ", ".join(named) or "nowhere"


def _looked_at(explanation: Explanation, row: Row, column: int) -> str:
    place = row.layer.columns[column]
    if place is not None:
        return f"{place + 1} {explanation.contributions[place].item}"
    looking = row.layer.rows
    same = looking[row.place] is None and _own(looking, row.place) == _own(row.layer.columns, column)
    return "itself" if same else _own(row.layer.columns, column)


def _asking(explanation: Explanation, row: Row) -> str:
    place = row.layer.rows[row.place]
    if place is not None:
        return f"{place + 1} {explanation.contributions[place].item}"
    return _own(row.layer.rows, row.place)


def _own(places: list[int | None], at: int) -> str:
    """What a token is called that is no entry; they are the last ones."""
    own = places.count(None)
    return "the question" if own == 1 else f"step {own - len(places) + at + 1}"


def cut_note(explanation: Explanation) -> str:
    """Said where the attention shown is only a part."""
    shown = max(sum(place is not None for place in layer.columns) for layer in explanation.attention)
    looked = sum(entry.contribution is not None for entry in explanation.contributions)
    return f", among the newest {shown} entries" if shown < looked else ""
