"""A comparison → one self-contained HTML page with tables and embedded plots.

Plots name runs by their number: a name may be long, or hold characters that the font lacks.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any

from segue.evaluation.compare import Comparison, difference_cells
from segue.evaluation.report import figures, interval_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = Sequence[tuple[float, float]]
COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#805ad5", "#b83280", "#718096")
GREY = "#cbd5e0"
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a202c; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #e2e8f0; text-align: right; }
th:first-child, td:first-child { text-align: left; overflow-wrap: anywhere; }
tr.baseline { color: #718096; } img { max-width: 100%; height: auto; } .scroll { overflow-x: auto; }
"""


def html(comparison: Comparison) -> str:
    """The comparison as an HTML page."""
    k, runs, ticks = comparison.depth, comparison.runs, [str(depth) for depth in comparison.depths]
    notes = "".join(f"<p>{escape(note)}</p>" for note in comparison.notes)
    bars = _picture(f"ndcg@{k}", partial(_draw_bars, comparison=comparison))
    parts = [notes, f"<h2>At {k}</h2>", _main_table(comparison), bars]
    if len(runs) > 1:
        parts += ["<h2>Difference to the first run</h2>", _difference_table(comparison)]
    by_depth = [[(x, run.report.metrics[f"ndcg@{depth}"]) for x, depth in enumerate(ticks)] for run in runs]
    parts += ["<h2>At every depth</h2>", _depth_table(comparison)]
    parts.append(_line_plot("ndcg by depth", by_depth, x="depth", y="ndcg", ticks=ticks))
    for kind, words in (("history", "events before the target"), ("popularity", "training events of the target")):
        if any(run.report.slices.get(kind) for run in runs):
            parts += [f"<h2>ndcg@{k} by {words}</h2>", _slice_table(comparison, kind)]
            values = [{part.name: part.metrics for part in run.report.slices.get(kind, [])} for run in runs]
            slices = list(values[0])
            lines = [[(x, own[name][f"ndcg@{k}"]) for x, name in enumerate(slices) if name in own] for own in values]
            parts.append(_line_plot(f"ndcg@{k} by {words}", lines, x="", y=f"ndcg@{k}", ticks=slices))
    if any(run.report.ranks_cold for run in runs):
        parts += [f"<h2>ndcg@{k} of warm targets, and of cold ones, which are unseen in training</h2>"]
        parts.append(_slice_table(comparison, "target"))
    for key in ("loss", "ndcg@10"):
        if any(curves := [_curve(run.history, key) for run in runs]):
            parts += [f"<h2>{key} by epoch</h2>", _line_plot(f"{key} by epoch", curves, x="epoch", y=key)]
    parts.append(_baseline_notes(comparison))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>segue compare</title><style>{STYLE}</style></head>\n<body><h1>Runs compared</h1>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, grey: int = 0) -> str:
    """An HTML table. Cells are text, which is escaped here; the last `grey` rows are baselines."""
    lines = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"]
    for index, row in enumerate(rows):
        kind = ' class="baseline"' if index >= len(rows) - grey else ""
        lines.append(f"<tr{kind}>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>")
    return '<div class="scroll"><table>\n' + "\n".join(lines) + "\n</table></div>"


def _label(comparison: Comparison, index: int) -> str:
    timed = ", given the target's timestamp" if comparison.runs[index].report.target_time else ""
    return f"{index + 1} · {comparison.runs[index].name}{timed}"


def _scorers(comparison: Comparison) -> list[tuple[str, dict[str, float], dict[str, tuple[float, float]]]]:
    """Label, metrics and intervals of the runs, then of the first one's baselines."""
    reports, first = [run.report for run in comparison.runs], comparison.runs[0].report
    runs = [(_label(comparison, index), report.metrics, report.intervals) for index, report in enumerate(reports)]
    return runs + [
        (name, metrics, first.baseline_intervals.get(name, {}))
        for name, metrics in first.baselines.items()
        if f"ndcg@{comparison.depth}" in metrics
    ]


def _main_table(comparison: Comparison) -> str:
    k, names = comparison.depth, ("hit", "ndcg", "mrr", "coverage", "popularity")
    rows = [
        [label, *figures(metrics, names, k), interval_text(spread.get(f"ndcg@{k}"))]
        for label, metrics, spread in _scorers(comparison)
    ]
    head = ["", *(f"{name}@{k}" for name in names), f"95 % of ndcg@{k}"]
    return _table(head, rows, grey=len(rows) - len(comparison.runs))


def _difference_table(comparison: Comparison) -> str:
    rows = [
        [_label(comparison, index), name, *difference_cells(run.differences[name])]
        for index, run in enumerate(comparison.runs)
        for name in (f"hit@{comparison.depth}", f"ndcg@{comparison.depth}", f"mrr@{comparison.depth}")
        if name in run.differences
    ]
    return _table(["", "metric", "difference", "95 %", "p"], rows)


def _depth_table(comparison: Comparison) -> str:
    names = ("hit", "ndcg", "mrr")
    rows = [
        [
            _label(comparison, index),
            *(cell for k in comparison.depths for cell in figures(run.report.metrics, names, k)),
        ]
        for index, run in enumerate(comparison.runs)
    ]
    return _table(["", *(f"{name}@{k}" for k in comparison.depths for name in names)], rows)


def _slice_table(comparison: Comparison, kind: str) -> str:
    slices = comparison.runs[0].report.slices.get(kind, [])
    rows = [["cases", *(f"{part.cases:,}" for part in slices)]]
    for index, run in enumerate(comparison.runs):
        own = {part.name: part.metrics for part in run.report.slices.get(kind, [])}
        cells = [f"{own[part.name][f'ndcg@{comparison.depth}']:.4f}" if part.name in own else "" for part in slices]
        rows.append([_label(comparison, index), *cells])
    return _table(["", *(part.name for part in slices)], rows)


def _baseline_notes(comparison: Comparison) -> str:
    notes = comparison.runs[0].report.baseline_notes
    if not notes:
        return ""
    lines = "".join(f"<li>{escape(name)}: {escape(note)}.</li>" for name, note in notes.items())
    return f"<h2>Baselines</h2><ul>{lines}</ul>"


def _picture(title: str, draw: Callable[[Axes], None]) -> str:
    """A plot as an SVG in an image element, from which nothing can reach the page."""
    import matplotlib as mpl  # it takes half a second, and only this page needs it
    from matplotlib.figure import Figure

    with mpl.rc_context(
        {"svg.hashsalt": "segue", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
    ):
        drawing = Figure(figsize=(8, 3.2), layout="constrained")
        axes = drawing.add_subplot()
        draw(axes)
        file = io.BytesIO()
        drawing.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    data = base64.b64encode(file.getvalue()).decode("ascii")
    return f'<img alt="{escape(title)}" src="data:image/svg+xml;base64,{data}">'


def _draw_bars(axes: Axes, comparison: Comparison) -> None:
    name, ticks = f"ndcg@{comparison.depth}", [f"run {index + 1}" for index in range(len(comparison.runs))]
    for row, (label, metrics, spread) in enumerate(_scorers(comparison)):
        baseline = row >= len(comparison.runs)
        ticks += [label] if baseline else []
        axes.barh(row, metrics[name], color=GREY if baseline else COLOURS[row % len(COLOURS)])
        if name in spread:
            axes.plot(spread[name], (row, row), color="#1a202c", linewidth=1.2)
    axes.set_yticks(range(len(ticks)), labels=ticks)
    axes.invert_yaxis()
    axes.set_xlabel(f"{name}, with 95 % intervals")


def _line_plot(title: str, lines: Sequence[Points], *, x: str, y: str, ticks: Sequence[str] = ()) -> str:
    """A plot with a line for each run; with `ticks`, the labels of x = 0, 1, …, points are marked."""

    def draw(axes: Axes) -> None:
        for index, points in enumerate(lines):
            if points:
                columns, values = zip(*points, strict=True)
                marker, colour = "o" if ticks else None, COLOURS[index % len(COLOURS)]
                axes.plot(columns, values, marker=marker, color=colour, label=f"run {index + 1}")
        if ticks:
            axes.set_xticks(range(len(ticks)), labels=ticks)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.legend(frameon=False)

    return _picture(title, draw)


def _curve(history: Sequence[dict[str, Any]], key: str) -> Points:
    """(epoch, value) of the records that have both as numbers."""
    return [
        (float(record["epoch"]), float(record[key]))
        for record in history
        if isinstance(record.get("epoch"), int | float) and isinstance(record.get(key), int | float)
    ]
