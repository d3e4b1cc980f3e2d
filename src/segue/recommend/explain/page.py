"""An explanation → one self-contained HTML file: what counts add, bars of the contributions, a heat map for each head.

It has no script, and its content security policy forbids any. Ids and titles are escaped, and isolated from the text
direction around them.
"""

from __future__ import annotations

import math
from html import escape

from segue.recommend.answer import Attention, CountReason, Explanation
from segue.recommend.explain.text import POPULARITY, QUERY, cut_note, headline, labels, of_steps, reason
from segue.recommend.explain.words import quoted, shares

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
STYLE = """
:root { color-scheme: light dark; --text: #1a202c; --soft: #5a6577; --line: #dfe5ec; --page: #fff; --well: #f4f6f9;
  --up: #2b6cb0; --down: #c05621; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6eaf0; --soft: #9aa7b8; --line: #333d4b; --page: #14181f; --well: #1e242d;
    --up: #63a4e8; --down: #f0904f; }
}
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page); max-width: 62rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin-top: 2rem; }
p.soft, td.soft, figcaption, .title { color: var(--soft); }
bdi { white-space: pre-wrap; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .5rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { font-weight: 600; } .number { text-align: right; white-space: nowrap; }
.chart { width: 40%; } @media (max-width: 40rem) { .chart { width: 28%; } }
.bar { position: relative; height: 1.1rem; background: var(--well); margin-top: .2rem; }
.bar::after { content: ""; position: absolute; left: 50%; top: 0; bottom: 0; border-left: 1px solid var(--soft); }
.bar span { position: absolute; top: 0; bottom: 0; } .up { left: 50%; background: var(--up); }
.down { right: 50%; background: var(--down); }
.maps { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 19rem), 1fr)); gap: 1.5rem; }
figure { margin: 0; }
svg { width: 100%; height: auto; display: block; overflow: visible; } svg rect { fill: var(--up); }
svg rect.well { fill: var(--well); } svg rect.down { fill: var(--down); } svg text { fill: var(--soft); }
.scale { display: inline-flex; gap: 1rem; flex-wrap: wrap; padding: 0; list-style: none; color: var(--soft); }
.scale i { display: inline-block; width: 1rem; height: 1rem; vertical-align: -.15rem; background: var(--up); }
"""
CELL = 8  # units of the drawing
MOST_LABELS = 16  # numbers along a side
LEGEND = (0.01, 0.05, 0.2, 0.5, 1.0)  # shares of the largest weight


def html(explanation: Explanation) -> str:
    """The explanation as an HTML page."""
    parts = [f"<h1>{_text(headline(explanation))}</h1>"]
    if explanation.fallback:
        parts.append(f"<p>{POPULARITY}</p>")
    if explanation.unknown:
        parts.append(f"<p>Unknown items, left out: {', '.join(map(_text, explanation.unknown))}</p>")
    if explanation.counts:
        parts.append(_counts(explanation))
    parts.append(_contributions(explanation))
    if explanation.attention:
        parts.append(_attention(explanation))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>segue explain</title><style>{STYLE}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _text(text: str) -> str:
    return f"<bdi>{escape(text)}</bdi>"


def _bar(value: float, longest: float) -> str:
    share = 50 * abs(value) / longest if longest else 0.0  # percent; the middle is zero
    return f'<div class="bar"><span class="{"up" if value >= 0 else "down"}" style="width:{share:.2f}%"></span></div>'


def _counts(explanation: Explanation) -> str:
    longest = max(abs(each.score) for each in explanation.counts)
    rows = [
        f'<tr><td>{_sentence(each)}</td><td class="number">{each.score:+.4f}</td>'
        f'<td class="chart">{_bar(each.score, longest)}</td></tr>'
        for each in explanation.counts
    ]
    return (
        f'<h2>What the counts add</h2>\n<p class="soft">{shares(explanation)}</p>\n'
        '<table><tr><th>count</th><th class="number">added</th><th></th></tr>\n' + "\n".join(rows) + "\n</table>"
    )


def _sentence(counted: CountReason) -> str:
    """The sentence, in which the name is isolated from the text direction around it."""
    name = counted.title or counted.item
    before, mark, after = counted.sentence.partition(quoted(name))
    return f"{before}“{_text(name)}”{after}" if mark else before


def _contributions(explanation: Explanation) -> str:
    entries = explanation.contributions
    longest = max((abs(entry.contribution) for entry in entries if entry.contribution is not None), default=0.0)
    rows = []
    for number, entry in enumerate(entries, start=1):
        title = f' <span class="title">{_text(entry.title)}</span>' if entry.title else ""
        if entry.contribution is not None:
            bar = _bar(entry.contribution, longest)
            facts = f'<td class="number">{entry.contribution:+.4f}</td><td class="chart">{bar}</td>'
        else:
            why = "" if explanation.fallback and entry.known else reason(entries, entry)
            facts = f'<td class="number">–</td><td class="soft chart">{why}</td>'
        rows.append(f'<tr><td class="number">{number}</td><td>{_text(entry.item)}{title}</td>{facts}</tr>')
    return (
        "<h2>Contribution of each entry of the history</h2>\n"
        '<p class="soft">Oldest first: the score minus the score without that entry. A bar to the right raised the '
        "score, a bar to the left lowered it. Contributions need not add up to the score.</p>\n"
        '<table><tr><th class="number">#</th><th>entry</th><th class="number">contribution</th><th></th></tr>\n'
        + "\n".join(rows)
        + "\n</table>"
    )


def _attention(explanation: Explanation) -> str:
    layers = explanation.attention
    most = max(abs(weight) for layer in layers for head in layer.weights for row in head for weight in row)
    maps = [
        f"<figure>{_heat_map(layer, head, most)}<figcaption>{_text(layer.name)}, head {head + 1}</figcaption></figure>"
        for layer in layers
        for head in range(len(layer.weights))
    ]
    scale = "".join(f'<li><i style="opacity:{math.sqrt(share):.3f}"></i> {share * most:.2g}</li>' for share in LEGEND)
    return (
        f"<h2>Attention weights{cut_note(explanation)}</h2>\n"
        '<p class="soft">Rows are the entries that attend, columns the entries attended to, by their numbers above.'
        f"{_own_tokens(explanation)} Point at a cell for its weight. A negative weight, which only some models have, "
        "has the colour of a negative contribution.</p>\n"
        f'<ul class="scale">{scale}</ul>\n<div class="maps">\n' + "\n".join(maps) + "\n</div>"
    )


def _own_tokens(explanation: Explanation) -> str:
    """A sentence on the rows and columns that are not entries, and on the row that the answer is computed from."""
    steps = max(len(layer.rows) if of_steps(layer) else 0 for layer in explanation.attention)
    if steps > 1:
        chosen = f", which choose {', '.join(_text(item.id) for item in explanation.plan)}" if explanation.plan else ""
        return (
            f" {QUERY}1 to {QUERY}{steps} are the steps of a plan{chosen}. The answer is computed from the first of "
            "them in the last layer."
        )
    own = any(None in layer.rows for layer in explanation.attention)
    query = f" {QUERY} is the query, a token that the model appends to the history." if own else ""
    return f"{query} The answer is computed from the last row of the last layer."


def _heat_map(layer: Attention, head: int, most: float) -> str:
    """The weights of one head, numbered like the entries; zeros above the diagonal are not drawn."""
    rows, columns, weights = labels(layer.rows), labels(layer.columns), layer.weights[head]
    square, longer = layer.rows == layer.columns, max(len(rows), len(columns))
    letters = max(5, longer * CELL // 32)  # the map of a long history is scaled down, so its letters must be larger
    margin, every = 3 * letters, math.ceil(longer / MOST_LABELS)
    wide, high = len(columns) * CELL, len(rows) * CELL
    parts = [f'<rect class="well" x="{margin}" y="{margin}" width="{wide}" height="{high}"/>']
    parts += [
        f'<text x="{margin - letters / 2}" y="{middle + 0.35 * letters}" text-anchor="end">{name}</text>'
        for name, middle in _spaced(rows, margin, every)
    ]
    parts += [
        f'<text x="{middle}" y="{margin - letters / 2}" text-anchor="middle">{name}</text>'
        for name, middle in _spaced(columns, margin, every)
    ]
    # The opacity is a root, so that the small weights of a long history are visible.
    parts += [
        f'<rect{" class=down" if weight < 0 else ""} x="{margin + column * CELL}" y="{margin + row * CELL}" '
        f'width="{CELL}" height="{CELL}" opacity="{math.sqrt(abs(weight) / (most or 1)):.3f}">'
        f"<title>{rows[row]} attends to {columns[column]}: {weight:.4f}</title></rect>"
        for row in range(len(rows))
        for column, weight in enumerate(weights[row])
        if weight or not square or column <= row
    ]
    style = f"max-width:{3 * (margin + wide)}px;font-size:{letters}px"  # the map of a short history stays small
    name = escape(f"attention weights, {layer.name}, head {head + 1}", quote=True)
    return (
        f'<svg viewBox="0 0 {margin + wide} {margin + high}" style="{style}" role="img" aria-label="{name}">'
        f"{''.join(parts)}</svg>"
    )


def _spaced(names: list[str], margin: int, every: int) -> list[tuple[str, float]]:
    """Every n-th of the names, the last among them, and the middle of its cell. `every`: n."""
    last = len(names) - 1
    return [(name, margin + (index + 0.5) * CELL) for index, name in enumerate(names) if (last - index) % every == 0]
