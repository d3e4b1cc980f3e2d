"""The rows of docs/results.md: what they are (results.toml), what was measured (results.json) → Markdown tables."""

from __future__ import annotations

import hashlib
import statistics
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from bench.recommend.code_assignment import Method
from segue.config.recipes import read_recipe
from segue.config.settings import make_settings
from segue.errors import InputError
from segue.evaluation.metrics import Difference
from segue.folders import write_json

BEGIN = "<!-- Made by `make results` from bench/quality/results.toml and results.json beside it: edit those. -->"
END = "<!-- Here ends what `make results` made. -->"
HEADER = (
    "row",
    "`segue train DATA --out RUN` …",
    "seed",
    "epochs (best)",
    "minutes",
    "hit@10",
    "ndcg@10",
    "95 %",
    "required ndcg@10",
    "published hit@10 / ndcg@10",
)
UNMEASURED = "not measured yet"


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where published figures come from."""

    title: str
    url: str


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A published figure, with as many digits as its source prints."""

    model: str
    hit: str = "–"
    ndcg: str
    source: str


class Log(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A log, and the counts that identify it."""

    title: str
    url: str
    about: str
    users: int
    items: int
    events: int


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A row of results.toml; its comments explain the fields."""

    name: str
    log: str
    recipe: str
    set: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (1,)
    shuffle_ties: int | None = None
    codes: Method | None = None
    """The bench's own assignment of item codes."""
    at_least: float | None = None
    at_most: float | None = None
    aim: float | None = None
    against: str | None = None
    note: str = ""
    published: tuple[Figure, ...] = ()


@dataclass(frozen=True, slots=True)
class Training:
    """A row with one of its seeds."""

    row: Row
    seed: int

    @property
    def name(self) -> str:
        return self.row.name if len(self.row.seeds) == 1 else f"{self.row.name}-{self.seed}"

    @property
    def overrides(self) -> list[str]:
        return [*self.row.set, f"train.seed={self.seed}"]

    @property
    def command(self) -> str:
        """The options after `segue train DATA --out RUN`."""
        return " ".join([f"--recipe {self.row.recipe}", *(f"--set {override}" for override in self.overrides)])

    @property
    def digest(self) -> str:
        """Digest of the settings of the row. The recipe's [about] is left out: its score is written there later.

        Settings with their default value are left out too, so that a new setting changes no digest. A changed default
        needs new measurements.
        """
        settings = make_settings(read_recipe(self.row.recipe), self.overrides)
        left_out = ("about.",) if settings.counts.limits else ("about.", "counts.")  # rows are older than counts
        changed = {key: value for key, value in _changed("", settings) if not key.startswith(left_out)}
        content = {"settings": changed, "shuffle_ties": self.row.shuffle_ties, "codes": self.row.codes}
        return hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()[:12]


def _changed(path: str, settings: msgspec.Struct) -> Iterator[tuple[str, Any]]:
    """The kinds of settings, and the values that differ from their kind's defaults, by dotted key."""
    if (kind := settings.__struct_config__.tag) is not None:
        yield f"{path}kind", kind
    for field in msgspec.structs.fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, msgspec.Struct):
            yield from _changed(f"{path}{field.name}.", value)
        elif value != field.default:
            yield f"{path}{field.name}", value


class Rows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of results.toml."""

    logs: dict[str, Log]
    sources: dict[str, Source]
    rows: list[Row]

    @property
    def trainings(self) -> list[Training]:
        return [Training(row, seed) for row in self.rows for seed in row.seeds]

    def named(self, name: str) -> list[Training]:
        """The one training of this name, or all seeds of the row of this name."""
        matches = [one for one in self.trainings if name in (one.name, one.row.name)]
        if not matches:
            raise InputError(f"There is no row {name!r}; there are {', '.join(one.name for one in self.trainings)}.")
        return matches

    def of_log(self, log: str) -> list[Training]:
        """The trainings on a log whose ties are not shuffled."""
        if log not in self.logs:
            raise InputError(f"There is no log {log!r}; there are {', '.join(self.logs)}.")
        return [one for one in self.trainings if one.row.log == log and one.row.shuffle_ties is None]


class Machine(msgspec.Struct, frozen=True):
    """The machine and versions of a measurement."""

    cores: int
    threads: int
    python: str
    torch: str
    segue: str


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The measurement of a training."""

    recipe_digest: str
    """Digest of the settings when the row was measured."""
    commit: str | None
    run: str
    """Digest of the run's manifest: the same run is not entered twice."""
    data: str
    seed: int
    epochs: int
    best_epoch: int
    minutes: float
    """Of the training epochs, without validation and the final evaluation."""
    hit: float
    hit_interval: tuple[float, float]
    ndcg: float
    ndcg_interval: tuple[float, float]
    machine: Machine
    date: str


class Simple(msgspec.Struct, frozen=True):
    """The measurement of a baseline."""

    hit: float
    ndcg: float
    ndcg_interval: tuple[float, float]


class Results(msgspec.Struct):
    """All of results.json."""

    rows: dict[str, Measured]
    differences: dict[str, Difference]
    """By the name of the row: its ndcg@10 minus that of the row it is compared with, paired."""
    baselines: dict[str, dict[str, Simple]] = {}
    """By log and by name, best last."""


def read_rows(path: Path) -> Rows:
    """The rows, every name in them resolved."""
    rows = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), Rows)
    names = [one.name for one in rows.trainings]
    if len(set(names)) < len(names):
        raise InputError(f"{path.name}: two rows have the same name.")
    single = {row.name: (row.log, row.shuffle_ties) for row in rows.rows if len(row.seeds) == 1}
    for row in rows.rows:
        if row.log not in rows.logs:
            raise InputError(f"{path.name}: {row.name} has the log {row.log!r}, expected one of {[*rows.logs]}.")
        for figure in row.published:
            if figure.source not in rows.sources:
                raise InputError(f"{path.name}: {row.name} cites {figure.source!r}, expected one of {[*rows.sources]}.")
        if row.against and not single.get(row.name) == single.get(row.against) == (row.log, row.shuffle_ties):
            raise InputError(f"{path.name}: {row.name} and {row.against} need one seed each and the same log.")
    return rows


def read_results(path: Path) -> Results:
    return msgspec.json.decode(path.read_bytes(), type=Results)


def write_results(path: Path, results: Results, rows: Rows) -> None:
    """Write in the order of the rows, so that a new measurement changes only its own lines."""
    names = [one.name for one in rows.trainings]
    write_json(
        path,
        Results(
            rows={name: results.rows[name] for name in names if name in results.rows},
            differences={name: results.differences[name] for name in names if name in results.differences},
            baselines={log: results.baselines[log] for log in rows.logs if log in results.baselines},
        ),
    )


class DocumentParts(NamedTuple):
    """A document, cut at its markers."""

    before: str
    tables: str
    after: str


def document_parts(path: Path) -> DocumentParts:
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN + "\n")
    text, end, after = rest.partition(END)
    if not (begin and end):
        raise InputError(f"{path} lacks the two lines between which tables go: {BEGIN} and {END}.")
    return DocumentParts(before + begin, text, end + after)


def write_tables(path: Path, rows: Rows, results: Results) -> None:
    """Put the tables between the document's markers."""
    parts = document_parts(path)
    path.write_text(parts.before + tables(rows, results) + parts.after, encoding="utf-8")


def tables(rows: Rows, results: Results) -> str:
    """A table for each log with its notes, the sources, and the machines."""
    lines: list[str] = []
    for name, log in rows.logs.items():
        own = [row for row in rows.rows if row.log == name]
        lines += ["", f"## {log.title}", ""]
        counts = f"{log.users:,} users, {log.items:,} items, {log.events:,} events"
        lines += [f"{counts} ([published]({log.url})). {log.about}", ""]
        lines += [_line(HEADER), _line(["---"] * 2 + ["--:"] * 5 + ["---"] * 3)]
        lines += [line for row in own for line in _row_lines(row, rows, results)]
        lines += [_baseline_line(each, result) for each, result in results.baselines.get(name, {}).items()]
        notes = [note for row in own for note in _notes(row, results)]
        lines += ["", *notes] if notes else []
    sources = [f"- [{name}]({source.url}): {source.title}" for name, source in rows.sources.items()]
    return "\n".join(
        [*lines, "", "## Sources of the published figures", "", *sources, *_machines(rows, results), "", ""]
    )


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _row_lines(row: Row, rows: Rows, results: Results) -> Iterator[str]:
    """A line for each seed, and one for their mean when all are measured."""
    published = "<br>".join(_published(figure, rows.sources) for figure in row.published) or "–"
    trainings = [Training(row, seed) for seed in row.seeds]
    for one in trainings:
        first = one is trainings[0]
        codes = f", codes of the bench: {row.codes}" if row.codes else ""
        cells = [
            f"`{one.name}`",
            f"`{one.command}`{codes}",
            str(one.seed),
            *_measured_cells(one, results.rows.get(one.name)),
        ]
        yield _line([*cells, _required(row) if first else "", published if first else ""])
    results_of_seeds = [results.rows[one.name] for one in trainings if one.name in results.rows]
    if len(results_of_seeds) == len(trainings) > 1:
        mean = [
            figure(statistics.mean(values)) for values in zip(*((m.hit, m.ndcg) for m in results_of_seeds), strict=True)
        ]
        extremes = f"{figure(min(m.ndcg for m in results_of_seeds))} to {figure(max(m.ndcg for m in results_of_seeds))}"
        minutes = f"{statistics.mean(m.minutes for m in results_of_seeds):.1f}"
        yield _line([f"**`{row.name}`, mean**", "", "", "", minutes, *mean, extremes, "", ""])


def _baseline_line(name: str, result: Simple) -> str:
    low, high = result.ndcg_interval
    figures = [figure(result.hit), figure(result.ndcg), f"{figure(low)} to {figure(high)}"]
    return _line([f"{name}, not trained", "", "", "", "", *figures, "", ""])


def _measured_cells(one: Training, result: Measured | None) -> list[str]:
    if result is None:
        return ["", "", "", UNMEASURED, ""]
    low, high = result.ndcg_interval
    note = "" if result.recipe_digest == one.digest else " (the recipe has changed since)"
    return [
        f"{result.epochs} ({result.best_epoch})",
        f"{result.minutes:.1f}",
        figure(result.hit),
        figure(result.ndcg) + note,
        f"{figure(low)} to {figure(high)}",
    ]


def figure(value: float) -> str:
    """A share without its leading zero, as papers print it: .1821."""
    return f"{value:.4f}".removeprefix("0")


def _required(row: Row) -> str:
    bounds = [("at least", row.at_least), ("at most", row.at_most), ("aim", row.aim)]
    return ", ".join(f"{word} {figure(value)}" for word, value in bounds if value is not None) or "–"


def _published(cited: Figure, sources: dict[str, Source]) -> str:
    return f"{cited.hit} / {cited.ndcg} {cited.model} ([{cited.source}]({sources[cited.source].url}))"


def _notes(row: Row, results: Results) -> Iterator[str]:
    if row.note:
        yield f"- `{row.name}`: {row.note}"
    change = results.differences.get(row.name)
    if change is not None and row.against is not None:
        yield f"- {difference_text(row.name, row.against, change)}"


def difference_text(name: str, against: str, change: Difference) -> str:
    """A paired difference as a sentence."""
    return (
        f"`{name}` minus `{against}`, over the same cases: ndcg@10 {change.value:+.4f}, "
        f"95 % {change.low:+.4f} to {change.high:+.4f}, p = {change.p:.3f}."
    )


def _machines(rows: Rows, results: Results) -> Iterator[str]:
    """The rows that each machine measured."""
    by_machine: dict[Machine, list[str]] = {}
    for name in (one.name for one in rows.trainings if one.name in results.rows):
        by_machine.setdefault(results.rows[name].machine, []).append(f"`{name}`")
    if by_machine:
        yield from ("", "## Machines", "")
    for machine, names in by_machine.items():
        yield (
            f"- {machine.cores} cores, {machine.threads} threads, Python {machine.python}, torch {machine.torch}, "
            f"segue {machine.segue}: {', '.join(names)}"
        )
