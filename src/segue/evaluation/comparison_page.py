"""A comparison → one self-contained HTML page with tables and embedded plots.

Plots name runs by their number: a name may be long, or hold characters that the font lacks.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from segue.evaluation.compare import Comparison, difference_cells
from segue.evaluation.report import figure, interval_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    """The whole page."""
    k = comparison.depth
    notes = "".join(f"<p>{escape(note)}</p>" for note in comparison.notes)
    parts = [notes, f"<h2>At {k}</h2>", _main_table(comparison), _picture(f"ndcg@{k}", _bars, comparison)]
    if len(comparison.runs) > 1:
        parts += ["<h2>Difference to the first run</h2>", _difference_table(comparison)]
    parts += ["<h2>At every depth</h2>", _depth_table(comparison), _picture("ndcg by depth", _depths, comparison)]
    for kind, words in (("history", "events before the target"), ("popularity", "training events of the target")):
        if any(run.report.slices.get(kind) for run in comparison.runs):
            parts += [f"<h2>ndcg@{k} by {words}</h2>", _slice_table(comparison, kind)]
            parts.append(_picture(f"ndcg@{k} by {words}", _slice_lines(kind), comparison))
    if any(run.report.ranks_cold for run in comparison.runs):
        parts += [f"<h2>ndcg@{k} of warm targets, and of cold ones, which are unseen in training</h2>"]
        parts.append(_slice_table(comparison, "target"))
    for key in ("loss", "ndcg@10"):
        if any(_curve(run.history, key) for run in comparison.runs):
            parts += [f"<h2>{key} by epoch</h2>", _picture(f"{key} by epoch", _curves(key), comparison)]
    parts.append(_baseline_notes(comparison))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>segue compare</title><style>{STYLE}</style></head>\n<body><h1>Runs compared</h1>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, grey: int = 0) -> str:
    """Cells are text and are escaped here; the last `grey` rows are baselines."""
    lines = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"]
    for index, row in enumerate(rows):
        kind = ' class="baseline"' if index >= len(rows) - grey else ""
        lines.append(f"<tr{kind}>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>")
    return '<div class="scroll"><table>\n' + "\n".join(lines) + "\n</table></div>"


def _label(comparison: Comparison, index: int) -> str:
    timed = ", given the target's timestamp" if comparison.runs[index].report.target_time else ""
    return f"{index + 1} · {comparison.runs[index].name}{timed}"


def _main_table(comparison: Comparison) -> str:
    k, first = comparison.depth, comparison.runs[0].report
    names = [f"{name}@{k}" for name in ("hit", "ndcg", "mrr", "coverage", "popularity")]
    measured = [
        (_label(comparison, index), run.report.metrics, run.report.intervals)
        for index, run in enumerate(comparison.runs)
    ]
    baselines = [
        (name, metrics, first.baseline_intervals.get(name, {}))
        for name, metrics in first.baselines.items()
        if names[1] in metrics
    ]
    rows = [
        [who, *(figure(name, metrics[name]) for name in names), interval_text(spread.get(names[1]))]
        for who, metrics, spread in measured + baselines
    ]
    return _table(["", *names, f"95 % of {names[1]}"], rows, grey=len(baselines))


def _difference_table(comparison: Comparison) -> str:
    rows = [
        [_label(comparison, index), name, *difference_cells(run.differences[name])]
        for index, run in enumerate(comparison.runs)
        for name in (f"hit@{comparison.depth}", f"ndcg@{comparison.depth}", f"mrr@{comparison.depth}")
        if name in run.differences
    ]
    return _table(["", "metric", "difference", "95 %", "p"], rows)


def _depth_table(comparison: Comparison) -> str:
    names = [f"{name}@{k}" for k in comparison.depths for name in ("hit", "ndcg", "mrr")]
    rows = [
        [_label(comparison, index), *(figure(name, run.report.metrics[name]) for name in names)]
        for index, run in enumerate(comparison.runs)
    ]
    return _table(["", *names], rows)


def _slice_table(comparison: Comparison, kind: str) -> str:
    slices = comparison.runs[0].report.slices.get(kind, [])
    rows = [["cases", *(f"{part.cases:,}" for part in slices)]]
    for index, run in enumerate(comparison.runs):
        values = {part.name: part.metrics for part in run.report.slices.get(kind, [])}
        name = f"ndcg@{comparison.depth}"
        cells = [figure(name, values[part.name][name]) if part.name in values else "" for part in slices]
        rows.append([_label(comparison, index), *cells])
    return _table(["", *(part.name for part in slices)], rows)


def _baseline_notes(comparison: Comparison) -> str:
    notes = comparison.runs[0].report.baseline_notes
    if not notes:
        return ""
    lines = "".join(f"<li>{escape(name)}: {escape(note)}.</li>" for name, note in notes.items())
    return f"<h2>Baselines</h2><ul>{lines}</ul>"


def _picture(title: str, draw: Callable[[Axes, Comparison], None], comparison: Comparison) -> str:
    """A plot as an SVG in an image element, from which nothing can reach the page."""
    import matplotlib as mpl  # it takes half a second, and only this page needs it
    from matplotlib.figure import Figure

    with mpl.rc_context(
        {"svg.hashsalt": "segue", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
    ):
        drawing = Figure(figsize=(8, 3.2), layout="constrained")
        axes = drawing.add_subplot()
        draw(axes, comparison)
        file = io.BytesIO()
        drawing.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    data = base64.b64encode(file.getvalue()).decode("ascii")
    return f'<img alt="{escape(title)}" src="data:image/svg+xml;base64,{data}">'


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _bars(axes: Axes, comparison: Comparison) -> None:
    name, first = f"ndcg@{comparison.depth}", comparison.runs[0].report
    bars = [
        (f"run {index + 1}", run.report.metrics[name], run.report.intervals.get(name), _colour(index))
        for index, run in enumerate(comparison.runs)
    ]
    bars += [
        (who, metrics[name], first.baseline_intervals.get(who, {}).get(name), GREY)
        for who, metrics in first.baselines.items()
        if name in metrics
    ]
    for row, (_, value, spread, colour) in enumerate(bars):
        axes.barh(row, value, color=colour)
        if spread is not None:
            axes.plot(spread, (row, row), color="#1a202c", linewidth=1.2)
    axes.set_yticks(range(len(bars)), labels=[label for label, *_ in bars])
    axes.invert_yaxis()
    axes.set_xlabel(f"{name}, with 95 % intervals")


def _depths(axes: Axes, comparison: Comparison) -> None:
    for index, run in enumerate(comparison.runs):
        values = [run.report.metrics[f"ndcg@{k}"] for k in comparison.depths]
        axes.plot(range(len(values)), values, marker="o", color=_colour(index), label=f"run {index + 1}")
    axes.set_xticks(range(len(comparison.depths)), labels=[str(k) for k in comparison.depths])
    axes.set_xlabel("depth")
    axes.set_ylabel("ndcg")
    axes.legend(frameon=False)


def _slice_lines(kind: str) -> Callable[[Axes, Comparison], None]:
    def draw(axes: Axes, comparison: Comparison) -> None:
        name = f"ndcg@{comparison.depth}"
        labels = [part.name for part in comparison.runs[0].report.slices.get(kind, [])]
        for index, run in enumerate(comparison.runs):
            slices = [part for part in run.report.slices.get(kind, []) if part.name in labels]
            columns = [labels.index(part.name) for part in slices]
            values = [part.metrics[name] for part in slices]
            axes.plot(columns, values, marker="o", color=_colour(index), label=f"run {index + 1}")
        axes.set_xticks(range(len(labels)), labels=labels)
        axes.set_ylabel(name)
        axes.legend(frameon=False)

    return draw


def _curves(key: str) -> Callable[[Axes, Comparison], None]:
    def draw(axes: Axes, comparison: Comparison) -> None:
        for index, run in enumerate(comparison.runs):
            if points := _curve(run.history, key):
                epochs, values = zip(*points, strict=True)
                axes.plot(epochs, values, color=_colour(index), label=f"run {index + 1}")
        axes.set_xlabel("epoch")
        axes.set_ylabel(key)
        axes.legend(frameon=False)

    return draw


def _curve(history: Sequence[dict[str, Any]], key: str) -> list[tuple[float, float]]:
    """(epoch, value) of the records that have both as numbers."""
    return [
        (float(record["epoch"]), float(record[key]))
        for record in history
        if isinstance(record.get("epoch"), int | float) and isinstance(record.get(key), int | float)
    ]
