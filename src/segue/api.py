"""The public verbs: prepare, train, load, evaluate, compare. What they take and give are ids, never numbers.

Importing this is light: torch is imported by the verbs that need it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import msgspec
import numpy as np

from segue.data.dataset import Data
from segue.data.prepare import prepare
from segue.data.settings import EngineName, on_spark
from segue.data.write.summary import summary_lines
from segue.errors import FolderError, InputError, SettingsError
from segue.folders import read_manifest, verify_contents
from segue.recommend.answer import BEAM, UNTIMED

if TYPE_CHECKING:
    from segue.config import About, Settings
    from segue.evaluation.compare import Comparison, MeasuredRun
    from segue.evaluation.report import Report
    from segue.evaluation.window.report import WindowReport
    from segue.export import Export
    from segue.models.build import Builder
    from segue.recommend.explain.explanation import Explanation
    from segue.recommend.jobs.embed import EmbedReport
    from segue.recommend.jobs.runner import JobRunner
    from segue.recommend.new_items import ItemsAdded
    from segue.recommend.recommender import Recommender
    from segue.training.loop import TrainingProgress

__all__ = [
    "BEAM",
    "UNTIMED",
    "Data",
    "Recommender",
    "Report",
    "add_items",
    "compare",
    "comparison_table",
    "embed",
    "evaluate",
    "explanation_lines",
    "export",
    "history_of",
    "kept_report",
    "load",
    "prepare",
    "recipes",
    "recommend_users",
    "report_table",
    "summary_lines",
    "train",
    "write_comparison",
    "write_explanation",
]

Measured = Callable[[str, int, int], None]
"""Told who is measured, how many cases are done, and of how many."""


def __getattr__(name: str) -> Any:
    if name == "Recommender":
        from segue.recommend.recommender import Recommender

        return Recommender
    if name == "Report":
        from segue.evaluation.report import Report

        return Report
    raise AttributeError(f"module 'segue.api' has no attribute {name!r}")


def train(
    data: Data | Path | str,
    *,
    out: Path | str | None = None,
    recipe: str | Path | None = None,
    overrides: Sequence[str] = (),
    encoder: Builder | None = None,
    from_run: Recommender | Path | str | None = None,
    resume: bool = False,
    all_events: bool = False,
    processes: int = 1,
    progress: Callable[[TrainingProgress], None] | None = None,
    measured: Measured | None = None,
) -> Recommender:
    """Train a model and measure it. Gives a Recommender; with `out`, its run folder stays there.

    recipe: a name of `segue recipes` or a TOML file. overrides: `section.key=value` laid over it.
    encoder: a builder of your own in the place of the recipe's, as docs/your-model.md shows. No folder holds code: who
        opens the run gives it again.
    from_run: a run to go on from, on a log that has grown: its settings, unless a recipe or overrides change how it is
        trained, and its weights, those of items by their ids. It need not be there any more when this one is resumed.
    resume: go on with training that was interrupted, or with a finished run that is given more epochs.
    all_events: once validation has chosen the epochs, train that many on every event, for serving.
    processes: of this machine, that share every batch; where one dies, all go on from the last epoch. Each of them
        imports the script that calls this, which needs `if __name__ == "__main__":` for that. Under `torchrun` leave it
        out: there every process calls this.
    progress, measured: told how training and how measuring is getting on; by another thread where there are processes.
    """
    from segue.recommend.recommender import Recommender
    from segue.runs import Call, make_run, make_run_on

    if processes < 1:
        raise SettingsError(f"processes must be at least 1, got {processes}.")
    if processes > 1:
        call = Call(
            data=(data if isinstance(data, Data) else Data.open(Path(data))).folder,
            out=None if out is None else Path(out),
            recipe=recipe,
            overrides=tuple(overrides),
            encoder=encoder,
            from_run=_folder_of(from_run),
            resume=resume,
            all_events=all_events,
        )
        return make_run_on(processes, call, progress=progress, measured=measured)
    origin = Recommender.open(from_run, encoder=encoder) if isinstance(from_run, Path | str) else from_run
    return make_run(
        data if isinstance(data, Data) else Data.open(Path(data)),
        out=None if out is None else Path(out),
        recipe=recipe,
        overrides=overrides,
        encoder=encoder,
        from_run=origin,
        resume=resume,
        all_events=all_events,
        progress=progress,
        measured=measured,
    )


def _folder_of(run: Recommender | Path | str | None) -> Path | None:
    """What a process can open for itself."""
    if run is None or isinstance(run, Path | str):
        return None if run is None else Path(run)
    if run.folder is None:
        raise FolderError("from_run was not opened from a run folder, so other processes cannot open it; load one.")
    return run.folder


def load(folder: Path | str, *, encoder: Builder | None = None) -> Recommender | Data:
    """Open what `prepare` or `train` made: a run folder gives a Recommender, a data folder gives Data.

    encoder: the builder that the run was trained with, where one was given to `train`.
    """
    from segue.folders import kind_of
    from segue.recommend.recommender import Recommender

    if kind_of(Path(folder)) == "run":
        return Recommender.open(folder, encoder=encoder)
    if encoder is not None:
        raise SettingsError(f"{folder} is a data folder, which has no encoder: leave encoder= out.")
    return Data.open(Path(folder))


@overload
def evaluate(
    run: Recommender | Path | str,
    *,
    data: Data | Path | str | None = None,
    at: Sequence[int] | None = None,
    days: None = None,
    encoder: Builder | None = None,
    progress: Measured | None = None,
) -> Report: ...


@overload
def evaluate(
    run: Recommender | Path | str,
    *,
    data: Data | Path | str | None = None,
    at: Sequence[int] | None = None,
    days: float,
    ages: Sequence[float] | None = None,
    interest: str | None = None,
    encoder: Builder | None = None,
    progress: Measured | None = None,
) -> WindowReport: ...


@overload
def evaluate(
    run: Recommender | Path | str,
    *,
    data: Data | Path | str | None = None,
    at: Sequence[int] | None = None,
    days: float | None = None,
    ages: Sequence[float] | None = None,
    interest: str | None = None,
    encoder: Builder | None = None,
    progress: Measured | None = None,
) -> Report | WindowReport: ...


def evaluate(
    run: Recommender | Path | str,
    *,
    data: Data | Path | str | None = None,
    at: Sequence[int] | None = None,
    days: float | None = None,
    ages: Sequence[float] | None = None,
    interest: str | None = None,
    encoder: Builder | None = None,
    progress: Measured | None = None,
) -> Report | WindowReport:
    """Measure a run and the baselines, by one ruler, on the test part of the data it was trained on.

    days: measure by window instead, on data prepared with `--split time:WHEN`: how much of what each user meets in so
        many days after WHEN is among the answers.
    ages: of the window, also with histories that end so many days before WHEN: how fast an embedding ages.
    interest: of the window, a column of the catalogue, such as a category: how varied a user's list is in it, in the
        place of the run's `evaluate.interest`.
    encoder: as for `load`, where `run` is a folder.

    A run trained with `all_events` has seen the test part: for it this is the report of the run that chose its epochs.
    """
    from segue.recommend.recommender import Recommender
    from segue.runs import data_of, measure, refuse_added, settings_of

    for name, value in (("--ages", ages), ("--interest", interest)):
        if value is not None and days is None:
            raise InputError(f"{name} needs --days: how many days after the moment of the split are asked for.")
    recommender = run if isinstance(run, Recommender) else Recommender.open(run, encoder=encoder)
    refuse_added(recommender.manifest, recommender.folder, "measured", "measure")
    settings, asked = settings_of(recommender), {"at": at if at is None else tuple(at), "interest": interest}
    given = {name: value for name, value in asked.items() if value is not None}
    settings = msgspec.structs.replace(settings, evaluate=msgspec.structs.replace(settings.evaluate, **given))
    if days is not None:
        return _evaluate_window(recommender, data, settings, days, (0,) if ages is None else ages, progress)
    if not recommender.manifest["all"]:
        known = data_of(recommender, data)
        known.verify()
        return measure(recommender.model, known, settings, note=None, progress=progress).report
    report = kept_report(recommender)
    if at is not None and sorted(set(at)) != report.depths:
        raise SettingsError(
            f"{recommender.folder} was trained on every event, so its test cannot be taken again; its report has the "
            f"depths {', '.join(map(str, report.depths))}. Leave --at out."
        )
    return report


def _evaluate_window(
    recommender: Recommender,
    data: Data | Path | str | None,
    settings: Settings,
    days: float,
    ages: Sequence[float],
    progress: Measured | None,
) -> WindowReport:
    from segue.runs import data_of, measure_window

    if recommender.manifest["all"]:
        raise SettingsError(
            f"{recommender.folder} was trained on every event, those of the window too: evaluate by window a run "
            "trained without --all."
        )
    known = data_of(recommender, data)
    known.verify()
    return measure_window(recommender.model, known, settings, days=days, ages=ages, progress=progress).report


def kept_report(recommender: Recommender) -> Report:
    """The report in a run folder."""
    from segue.evaluation.report import Report

    assert recommender.folder is not None
    verify_contents(recommender.folder, recommender.manifest, "run", names=("metrics.json",))
    return msgspec.json.decode((recommender.folder / "metrics.json").read_bytes(), type=Report)


def report_table(report: Report | WindowReport) -> str:
    """A report as lines for a terminal."""
    from segue.evaluation.report import Report, table
    from segue.evaluation.window.report import window_table

    return table(report) if isinstance(report, Report) else window_table(report)


def compare(runs: Sequence[Path | str]) -> Comparison:
    """Set runs side by side, with paired intervals of their differences to the first."""
    from segue.evaluation.compare import compare as side_by_side

    measured = [_measured(Path(run)) for run in runs]
    return side_by_side(measured, users=_case_users(Path(runs[0]), measured[0].report))


def _case_users(run: Path, report: Report) -> np.ndarray | None:
    """Whose case each is, where the run's data is still there: one user's cases of a split in time vary together."""
    remembered = read_manifest(run, "run")["data"]
    if report.split == "last" or not Path(remembered["folder"]).exists():
        return None
    data = Data.open(remembered["folder"])
    return data.split.cases(report.part, report.target).users if data.digest == remembered["digest"] else None


def comparison_table(comparison: Comparison) -> str:
    """A comparison as lines for a terminal."""
    from segue.evaluation.compare import comparison_table as lines

    return lines(comparison)


def write_comparison(comparison: Comparison, path: Path) -> None:
    """A comparison as a self-contained page with plots."""
    from segue.evaluation.comparison_page import html

    _write_page(html(comparison), path)


def explanation_lines(
    explanation: Explanation, *, layer: str | None = None, head: int | None = None, query: str | None = None
) -> list[str]:
    """An explanation as lines for a terminal.

    layer, head: draw the weights of this layer (its number or its name), of this head or of all of them.
    query: who looks, as an entry's number, `?` for the question or `?2` for a plan's second step; else the one that the
        answer is made from, or in a drawing everyone.
    """
    from segue.recommend.explain.attention_text import View
    from segue.recommend.explain.text import lines

    return list(lines(explanation, View(layer=layer, head=head, query=query)))


def write_explanation(explanation: Explanation, path: Path) -> None:
    """An explanation as a self-contained page with bars and heat maps."""
    from segue.recommend.explain.page import html

    _write_page(html(explanation), path)


def export(
    run: Recommender | Path | str, *, onnx: Path | str, progress: Callable[[str, int, int], None] | None = None
) -> Export:
    """Write a run as one ONNX file that `segue.slim` answers from without torch; it is complete and compared with
    torch, or not there.

    progress: told of each stage, how many are done and of how many.
    """
    from segue.export import export_onnx
    from segue.recommend.recommender import Recommender

    return export_onnx(run if isinstance(run, Recommender) else Recommender.open(run), Path(onnx), progress=progress)


def add_items(
    run: Recommender | Path | str,
    items: Any,
    *,
    out: Path | str,
    item: str | None = None,
    encoder: Builder | None = None,
) -> ItemsAdded:
    """A run with items that it was not trained on, which are known by their content: another run folder, complete or
    not there at all. In Python, `Recommender.with_items` does it without a folder.

    items: a catalogue, as `prepare` takes it. An item that was added before gets the new content; one that the run was
        trained with is refused.
    item: the catalogue's column of the id, where it is not found by its usual names.
    encoder: as for `load`, where `run` is a folder.
    """
    from segue.data.read.new_items import read_items
    from segue.recommend.new_items import ItemsAdded
    from segue.recommend.recommender import Recommender

    before = run if isinstance(run, Recommender) else Recommender.open(run, encoder=encoder)
    table, duplicates = read_items(items, item=item)
    after = before.with_items(table)
    after.save(out)
    added = len(after.vocabulary) - len(before.vocabulary)
    return ItemsAdded(
        run=str(out),
        added=added,
        changed=table.height - added,
        duplicates=duplicates,
        items=len(after.vocabulary),
        ignored=[name for name in table.columns if name not in after.vocabulary.table.columns],
    )


def _write_page(page: str, path: Path) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} could not be written: {error.strerror or error}.") from error


def _measured(folder: Path) -> MeasuredRun:
    from segue.evaluation.compare import MeasuredRun
    from segue.evaluation.report import Report

    manifest = read_manifest(folder, "run")
    verify_contents(folder, manifest, "run", names=("metrics.json", "ranks.npy", "history.jsonl"))
    lines = (folder / "history.jsonl").read_bytes().splitlines()
    return MeasuredRun(
        name=folder.name,
        data=manifest["data"]["digest"],
        report=msgspec.json.decode((folder / "metrics.json").read_bytes(), type=Report),
        ranks=np.load(folder / "ranks.npy"),
        history=[msgspec.json.decode(line) for line in lines],
    )


def recipes() -> dict[str, About]:
    """The recipes shipped with the package, and what each says of itself."""
    from segue.config import make_settings, read_recipe, recipe_names

    return {name: make_settings(read_recipe(name)).about for name in recipe_names()}


def history_of(recommender: Recommender, user: str, *, data: Data | Path | str | None = None) -> list[Any]:
    """A user's history in the log, as `recommend` takes it."""
    from segue.recommend.jobs.batch import user_history

    return list(user_history(_log_of(recommender, data), user))


def recommend_users(
    recommender: Recommender,
    users: Path,
    *,
    out: Path,
    k: int = 10,
    data: Data | Path | str | None = None,
    exclude: Sequence[str] | None = None,
    only: Sequence[str] | None = None,
    keep_seen: bool | None = None,
    engine: EngineName = "local",
    spark_remote: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> Any:
    """Answers for a file of users, from their histories in the log, as a Parquet data set.

    engine, spark_remote: as for `embed`.
    """
    from segue.recommend.jobs.batch import recommend_users as answer_users

    log = _log_of(recommender, data)
    return answer_users(
        recommender,
        log,
        users,
        out,
        k=k,
        exclude=exclude,
        only=only,
        keep_seen=keep_seen,
        progress=progress,
        runner=_runner(engine, spark_remote, recommender, log),
    )


def embed(
    run: Recommender | Path | str,
    data: Data | Path | str,
    *,
    out: Path | str,
    since: Path | str | None = None,
    items: bool = False,
    encoder: Builder | None = None,
    engine: EngineName = "local",
    spark_remote: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> EmbedReport:
    """The embedding of everyone in a log, as a Parquet data set in `out`; killed, it goes on when it is called again.

    since: what an earlier call for the same run wrote: only users with events that it did not know are embedded.
    items: write the items' embeddings too.
    encoder: as for `load`, where `run` is a folder.
    engine: who embeds: `local`, this process on all cores; or `spark`, the executors of a cluster, all of which must
        see the run and the data at the same paths and have segue installed. Only this process writes; the rows are the
        same.
    spark_remote: the address of a Spark Connect server (sc://host:port). Without it, the session that runs in this
        process; else what SPARK_REMOTE or spark-submit say; else a local session.
    progress: told how many users are done, and of how many.
    """
    from segue.recommend.jobs.embed import embed_users
    from segue.recommend.recommender import Recommender

    if encoder is not None and engine == "spark":
        raise SettingsError(
            "encoder= stays in this process, so Spark's executors cannot open such a run; leave engine out."
        )
    recommender = run if isinstance(run, Recommender) else Recommender.open(run, encoder=encoder)
    log = data if isinstance(data, Data) else Data.open(data)
    runner = _runner(engine, spark_remote, recommender, log)
    return embed_users(recommender, log, out, since=since, items=items, progress=progress, runner=runner)


def _runner(engine: EngineName, remote: str | None, recommender: Recommender, data: Data) -> JobRunner | None:
    """Who answers, None for this process."""
    if not on_spark(engine, remote):
        return None
    from segue.recommend.jobs.spark import SparkRunner

    return SparkRunner(recommender, data, remote=remote)


def _log_of(recommender: Recommender, data: Data | Path | str | None) -> Data:
    """Where histories are looked up: the data given, which may be a newer log, or the one the run remembers."""
    from segue.runs import data_of

    if data is None:
        return data_of(recommender, None)
    return data if isinstance(data, Data) else Data.open(data)
